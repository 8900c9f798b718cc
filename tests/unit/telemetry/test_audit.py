"""What has a note, that callers never wait, and where notes go."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.audit import AuditConfig
from headrace.errors import (
    AuthTokenScopeMismatch,
    HeadraceError,
    InternalError,
    KafkaTimeout,
    ProducerQueueFull,
    RecordTooLarge,
)
from headrace.lifecycle import Deadline
from headrace.records import Header, OutgoingRecord, Produced, Record
from headrace.telemetry.audit import Audit
from headrace.telemetry.audit_notes import AuditNote, Consumption, Line
from headrace.telemetry.audit_targets import AuditFile, AuditTopic
from headrace.telemetry.correlation import caller, correlation_id
from headrace.telemetry.metrics import Metrics
from headrace.testing import ManualClock

HEADERS = [("X-Traceability-Id", b"t-1"), ("X-Correlation-Id", b"c-1"), ("color", b"red")]
RECORDS = [OutgoingRecord("orders", key, b"secret value", HEADERS, partition) for key, partition in ((b"k", None),) * 3]
RESULTS = [Produced(2, 7), RecordTooLarge("too large"), KafkaTimeout("no answer")]

STATUSES = ["FAILURE", "UNKNOWN"]
REASONS = [(None, "ERR40017"), (7, InternalError().code)]


class Target:
    """Keeps notes; can be held back, and can lose what it is given."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.keys: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.loses = False

    async def write(self, lines: Sequence[Line]) -> int:
        await self.gate.wait()
        if self.loses:
            return len(lines)
        self.keys += [key for key, _ in lines]
        self.notes += [json.loads(line) for _, line in lines]
        return 0


def audited(act: Callable[[Audit], None], **settings: Any) -> tuple[list[Any], Metrics]:
    """Return what is noted when something is done."""

    async def main() -> tuple[list[Any], Metrics]:
        target, metrics = Target(), Metrics()
        audit = Audit(AuditConfig(**settings), target, metrics, ManualClock(1000.0))
        await audit.start()
        act(audit)
        await audit.drain(Deadline(ManualClock(), 1))
        await audit.stop()
        return target.notes, metrics

    return asyncio.run(main())


def produce(audit: Audit) -> None:
    caller.set("loader")
    audit.produced(RECORDS, RESULTS)


def counted(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("headrace_audit_notes_total")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_each_record_of_a_request_has_a_note_with_the_fields_of_the_original() -> None:
    """Success, failure and unknown are told apart; a key only as its hash, a value never."""
    notes, metrics = audited(produce, to="file", records="all", service_id="billing")
    first, *rest = notes
    assert len(first.pop("id")) == 22
    assert first == {
        "serviceId": "billing",
        "auditType": "PRODUCER",
        "auditStatus": "SUCCESS",
        "timestamp": 1_000_000,
        "caller": "loader",
        "topic": "orders",
        "partition": 2,
        "offset": 7,
        "key": "8254c329a92850f6d539dd376f4816ee",
        "correlationId": "c-1",
        "traceabilityId": "t-1",
    }
    assert [(note["auditStatus"], note["partition"], note["offset"], note["stacktrace"]) for note in rest] == [
        ("FAILURE", 0, 0, "ERR40017 RECORD_TOO_LARGE: too large"),
        ("UNKNOWN", 0, 0, "ERR40013 KAFKA_TIMEOUT: no answer"),
    ]
    assert len({note["id"] for note in rest}) == 2
    assert "secret" not in json.dumps(notes)
    assert counted(metrics) == {"written": 3, "lost": 0}


@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({}, ["FAILURE", "UNKNOWN"]),
        ({"to": "file"}, ["SUCCESS", "FAILURE", "UNKNOWN"]),
        ({"to": "file", "records": "all"}, ["SUCCESS", "FAILURE", "UNKNOWN"]),
        ({"to": "file", "records": "failed"}, ["FAILURE", "UNKNOWN"]),
        ({"to": "file", "records": "none"}, []),
    ],
)
def test_which_records_have_notes(settings: Any, statuses: list[str]) -> None:
    """Those that went well only once a target is in the file; before that, those that failed."""
    notes, _ = audited(produce, **settings)
    assert [note["auditStatus"] for note in notes] == statuses


def test_by_default_a_request_has_one_note_for_what_went_well() -> None:
    """First and last offset and count of each partition, and the correlation id if it is the same in all records.

    What failed has notes of its own, without anything of those that were written.
    """
    results = [Produced(2, 8), Produced(1, 40), RecordTooLarge("too large"), Produced(2, 9), Produced(2, 7)]

    def act(audit: Audit) -> None:
        audit.produced(RECORDS[:1] * 5, results)
        audit.produced(
            [*RECORDS[:1], OutgoingRecord("orders", None, b"v", [("X-Correlation-Id", b"c-2")])], results[::3]
        )

    notes, metrics = audited(act, to="file")
    names = ("topic", "partition", "offset", "lastOffset", "count", "ranges", "correlationId")
    ranges = [
        {"topic": "orders", "partition": 2, "offset": 7, "lastOffset": 9, "count": 3},
        {"topic": "orders", "partition": 1, "offset": 40, "lastOffset": 40, "count": 1},
    ]
    assert [tuple(note.get(name) for name in names) for note in notes] == [
        (None, None, None, None, 4, ranges, "c-1"),
        ("orders", 0, 0, None, None, None, "c-1"),
        ("orders", 2, 8, 9, 2, None, None),
    ]
    assert [note["auditStatus"] for note in notes] == ["SUCCESS", "FAILURE", "SUCCESS"]
    assert counted(metrics) == {"written": 3, "lost": 0}


def test_a_request_to_hundreds_of_partitions_has_notes_that_each_fit_into_a_record() -> None:
    """A hundred ranges in each; the last range alone has the fields of a note for one partition."""
    notes, _ = audited(lambda audit: audit.produced(RECORDS[:1] * 201, [Produced(n, n) for n in range(201)]), to="file")
    assert [(len(note.get("ranges", ())), note["count"], note.get("partition")) for note in notes] == [
        (100, 100, None),
        (100, 100, None),
        (0, 1, 200),
    ]
    assert {one["partition"] for note in notes for one in note.get("ranges", ())} == set(range(200))


def test_by_default_a_delivery_has_one_note_for_what_went_well() -> None:
    """Its partition, first and last offset and count; records of retry topics count where they were first."""
    own: list[Header] = [("X-Correlation-Id", b"c-1")]

    def act(audit: Audit) -> None:
        audit.consumed(PUSHED, [taken(7), taken(8, own), taken(12)], 10, "delivered", ())
        audit.consumed(PUSHED, [taken(13, own), taken(14, own)], 10, "delivered", ())
        audit.consumed(PUSHED, [taken(15), taken(16)], 10, "skipped", [Said("HTTP 404")] * 2)

    notes, _ = audited(act, to="topic")
    about = [(n["offset"], n.get("lastOffset"), n.get("count"), n.get("correlationId"), n["group"]) for n in notes]
    assert about == [
        (7, 12, 3, None, "billing"),
        (13, 14, 2, "c-1", "billing"),
        (15, None, None, "billing:orders:2:15", "billing"),
        (16, None, None, "billing:orders:2:16", "billing"),
    ]
    assert [note.get("reason") for note in notes] == [None, None, "skipped: HTTP 404", "skipped: HTTP 404"]


def test_deliveries_that_follow_each_other_share_a_note_until_it_is_written() -> None:
    """Those of one group and partition, with one correlation id or none, that leave no gap and are no single record."""
    own: list[Header] = [("X-Correlation-Id", b"a")]
    other = PUSHED._replace(group="other")
    deliveries = [((0, 1), PUSHED, None), ((2, 3), PUSHED, None), ((2, 3), other, None), ((4, 5), PUSHED, own)]
    deliveries += [((6, 7), PUSHED, own), ((9, 10), PUSHED, own), ((11,), PUSHED, own), ((12, 13), PUSHED, None)]

    async def act() -> list[Any]:
        target = Target()
        audit = Audit(AuditConfig(to="file"), target, Metrics(), ManualClock())
        await audit.start()
        for turn in range(2):
            for offsets, who, headers in deliveries:
                audit.consumed(who, [taken(20 * turn + offset, headers) for offset in offsets], 10, "delivered", ())
            await audit.drain(Deadline(ManualClock(), 1))
        await audit.stop()
        return target.notes

    notes = asyncio.run(act())
    found = [(n["offset"], n.get("lastOffset"), n.get("count"), n["group"] == "other") for n in notes]
    once = [(0, 3, 4, False), (2, 3, 2, True), (4, 7, 4, False), (9, 10, 2, False), (11, None, None, False)]
    once.append((12, 13, 2, False))
    assert found == once + [(at + 20, last and last + 20, *more) for at, last, *more in once]


@pytest.mark.parametrize("records", ["summary", "all", "failed", "none"])
def test_a_produce_request_that_was_not_sent_has_one_note(records: str) -> None:
    """With topic, caller, id and the reason; of a stream, one for the lines of a batch, with their number."""

    def act(audit: Audit) -> None:
        caller.set("loader")
        correlation_id.set("c-1")
        audit.not_sent("orders", RecordTooLarge("too large"))
        audit.not_sent("orders", InternalError(), 7)

    notes, _ = audited(act, to="file", records=records)
    told = [(n["auditType"], n["auditStatus"], n["topic"], n["caller"], n["correlationId"]) for n in notes]
    assert told == ([] if records == "none" else [("PRODUCER", s, "orders", "loader", "c-1") for s in STATUSES])
    assert [(n.get("count"), n["stacktrace"][:8]) for n in notes] == ([] if records == "none" else REASONS)


def test_by_default_a_request_that_went_well_leaves_nothing_to_do() -> None:
    """So it costs such a request no more than the question."""
    notes, metrics = audited(lambda audit: audit.produced(RECORDS[:1], RESULTS[:1]))
    assert notes == []
    assert counted(metrics) == {}


@pytest.mark.parametrize(("keys", "shown"), [("text", "k"), ("none", None)])
def test_keys_are_shown_as_configured(keys: str, shown: str | None) -> None:
    """As they are, or not at all."""
    notes, _ = audited(produce, to="file", records="all", keys=keys)
    assert notes[0].get("key") == shown


def test_a_refused_request_has_a_note() -> None:
    """Who, what, outcome and correlation id; no topic, no offset."""

    def refuse(audit: Audit) -> None:
        caller.set("reader")
        correlation_id.set("c-9")
        audit.refused("POST /producers/orders", "127.0.0.1", AuthTokenScopeMismatch("this needs the scope kafka:w"))

    notes, _ = audited(refuse)
    assert len(notes[0].pop("id")) == 22
    assert notes == [
        {
            "serviceId": "headrace",
            "auditType": "ACCESS",
            "auditStatus": "DENIED",
            "timestamp": 1_000_000,
            "caller": "reader",
            "correlationId": "c-9",
            "action": "POST /producers/orders",
            "address": "127.0.0.1",
            "stacktrace": "ERR10005 AUTH_TOKEN_SCOPE_MISMATCH: this needs the scope kafka:w",
        }
    ]


@pytest.mark.parametrize("settings", [{}, {"to": "file", "records": "none"}])
def test_a_control_operation_has_a_note(settings: Any) -> None:
    """Who, what, to what, why and with which end, whichever records are noted."""

    def control(audit: Audit) -> None:
        caller.set("operator")
        correlation_id.set("c-9")
        audit.control("skip", "reactive orders", reason="poison, ticket 12")
        audit.control("redrive", "orders.dlq", outcome="FAILURE")

    notes, _ = audited(control, **settings)
    assert [len(note.pop("id")) for note in notes] == [22, 22]
    assert notes[0] == {
        "serviceId": "headrace",
        "auditType": "CONTROL",
        "auditStatus": "SUCCESS",
        "timestamp": 1_000_000,
        "caller": "operator",
        "correlationId": "c-9",
        "action": "skip",
        "target": "reactive orders",
        "reason": "poison, ticket 12",
    }
    assert (notes[1]["auditStatus"], notes[1]["target"]) == ("FAILURE", "orders.dlq")


def test_a_flood_of_refusals_does_not_flood_the_audit() -> None:
    """A hundred in a second are noted, the rest is counted."""

    def flood(audit: Audit) -> None:
        for _ in range(1000):
            audit.refused("GET /", "127.0.0.1", AuthTokenScopeMismatch())

    notes, metrics = audited(flood)
    assert [note["auditType"] for note in notes] == ["ACCESS"] * 100 + ["DROPPED"]
    assert notes[-1]["count"] == 900
    assert counted(metrics) == {"dropped": 900, "written": 100, "lost": 0}


async def test_a_stalled_target_costs_notes_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Above the budget notes are dropped; a note reports how many."""

    target, metrics, clock = Target(), Metrics(), ManualClock()
    audit = Audit(AuditConfig(to="file", max_pending_bytes=4000), target, metrics, clock)
    await audit.start()
    target.gate.clear()
    for _ in range(50):
        audit.produced(RECORDS[:1], RESULTS[:1])
    dropped = counted(metrics)["dropped"]
    assert dropped == 46
    assert audit.readiness() == (True, "46 notes are missing in the audit")
    target.gate.set()
    await audit.drain(Deadline(clock, 1))
    notes = [note for note in target.notes if note["auditType"] == "PRODUCER"]
    [missing] = [note for note in target.notes if note["auditType"] != "PRODUCER"]
    assert len(notes) == 50 - dropped
    assert (missing["auditType"], missing["auditStatus"], missing["count"]) == ("DROPPED", "FAILURE", dropped)
    audit.produced(RECORDS[:1], RESULTS[:1])
    await audit.drain(Deadline(clock, 1))
    assert [note["auditType"] for note in target.notes[len(notes) + 1 :]] == ["PRODUCER"]
    assert counted(metrics) == {"dropped": dropped, "lost": 0, "written": 51 - dropped}
    await audit.stop()

    assert len(caplog.records) == 1


async def test_missing_notes_are_alarmed_at_once_and_then_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """With the number so far; what is lost is told with the next notes that are not."""

    target, clock = Target(), ManualClock()
    audit = Audit(AuditConfig(to="file"), target, Metrics(), clock)
    await audit.start()
    target.loses = True
    for _ in range(130):
        audit.control("pause", "reactive orders")
        await audit.drain(Deadline(clock, 1))
        await clock.advance(1.0)
    target.loses = False
    audit.control("pause", "reactive orders")
    await audit.drain(Deadline(clock, 1))
    assert [(note["auditType"], note.get("count")) for note in target.notes] == [("CONTROL", None), ("DROPPED", 130)]
    await audit.stop()

    alarms = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split()[1] for text in alarms] == ["1", "61", "121"]


async def test_a_drain_reports_what_is_missing_also_without_further_notes() -> None:
    """And a defect of the target does not end the audit."""
    target, clock = Target(), ManualClock()
    audit = Audit(AuditConfig(to="file"), target, Metrics(), clock)
    await audit.start()
    for _ in range(101):
        audit.refused("GET /", "127.0.0.1", AuthTokenScopeMismatch())
    await asyncio.sleep(0.2)
    for _ in range(3):
        audit.refused("GET /", "127.0.0.1", AuthTokenScopeMismatch())
    await audit.drain(Deadline(clock, 1))
    assert sum(note["count"] for note in target.notes if note["auditType"] == "DROPPED") == 4
    target.write = None  # type: ignore[assignment, method-assign]
    audit.control("pause", "reactive orders")
    await audit.drain(Deadline(clock, 1))
    assert audit.death is None
    await audit.stop()


async def test_a_note_that_cannot_be_made_is_lost_and_work_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, and what comes after it is noted."""

    def fail() -> Iterator[AuditNote]:
        raise ValueError("a defect")
        yield

    target, metrics = Target(), Metrics()
    audit = Audit(AuditConfig(to="file"), target, metrics, ManualClock())
    await audit.start()
    audit.put(fail(), 3, 10)
    await audit.drain(Deadline(ManualClock(), 1))
    audit.control("pause", "reactive orders")
    await audit.drain(Deadline(ManualClock(), 1))
    assert counted(metrics) == {"written": 1, "lost": 3}
    await audit.stop()

    assert "a defect, for which 3 notes are lost" in caplog.text


async def test_the_file_is_rotated_when_it_is_full(tmp_path: Path) -> None:
    """Whole lines in each, so many old ones as configured, and only the owner may read them."""
    file = tmp_path / "log" / "audit.log"
    target = AuditFile(AuditConfig(file=file, max_file_bytes=100, old_files=2))

    await target.write(())
    assert file.read_bytes() == b"", "it is there before the first note"
    for number in range(20):
        assert await target.write([(b"c", f'{{"n":{number}}}'.encode())] * 2) == 0

    assert sorted(path.name for path in file.parent.iterdir()) == ["audit.log", "audit.log.1", "audit.log.2"]
    for path in file.parent.iterdir():
        assert path.stat().st_size <= 100
        assert path.stat().st_mode & 0o077 == 0
        assert all("n" in json.loads(line) for line in path.read_text().splitlines())
    assert json.loads(file.read_text().splitlines()[-1]) == {"n": 19}


def test_notes_that_a_file_does_not_take_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And work goes on."""
    (tmp_path / "log").write_text("a file where the folder should be")
    target = AuditFile(AuditConfig(file=tmp_path / "log" / "audit.log"))
    assert asyncio.run(target.write([(b"c", b"{}"), (b"c", b"{}")])) == 2
    assert "2 notes are lost" in caplog.text


def test_the_topic_gets_the_correlation_id_as_key(caplog: pytest.LogCaptureFixture) -> None:
    """What Kafka does not take is counted as lost, and the log says why; also when it takes nothing."""
    sent: list[OutgoingRecord] = []

    async def produce(records: Sequence[OutgoingRecord]) -> Sequence[Produced | HeadraceError]:
        sent.extend(records)
        if len(records) == 1:
            raise ProducerQueueFull("full")
        return [Produced(0, 0), KafkaTimeout("no answer")]

    target = AuditTopic("sidecar-audit", produce)
    assert asyncio.run(target.write([(b"c-1", b"{}"), (b"", b"[]")])) == 1
    assert asyncio.run(target.write([(b"c-1", b"{}")])) == 1
    assert [(record.topic, record.key, record.value) for record in sent[:2]] == [
        ("sidecar-audit", b"c-1", b"{}"),
        ("sidecar-audit", None, b"[]"),
    ]
    assert "1 notes are lost, because no answer" in caplog.text


class Said(NamedTuple):
    """What a destination said of a record."""

    error: str = ""
    details: tuple[tuple[str, str], ...] = ()


def taken(offset: int, headers: list[Header] | None = None, key: bytes | None = b"k") -> Record:
    return Record("orders", 2, offset, 5, key, b"secret value", lambda: headers)


PUSHED = Consumption("REACTIVE_CONSUMER", "billing")


def consume(*records: Record, how: str = "delivered", said: Sequence[Said] = (), who: Consumption = PUSHED) -> Any:
    """Return the notes of records that ended."""

    def act(audit: Audit) -> None:
        audit.consumed(who, records, 100, how, said)

    notes, _ = audited(act, to="file", records="all")
    assert "secret" not in json.dumps(notes)
    assert {len(note.pop("id")) for note in notes} == {22}
    return notes


def test_each_record_that_was_delivered_has_a_note() -> None:
    """Ids come from its headers; without them its correlation id is that of the delivery."""
    headers: list[Header] = [("X-Correlation-Id", b'c"1\\'), ("X-Traceability-Id", b"t-1")]
    first, second = consume(taken(7), taken(8, headers, None))
    usual = {
        "serviceId": "headrace",
        "auditType": "REACTIVE_CONSUMER",
        "auditStatus": "SUCCESS",
        "timestamp": 1_000_000,
        "group": "billing",
        "topic": "orders",
        "partition": 2,
    }
    key = "8254c329a92850f6d539dd376f4816ee"
    assert first == {**usual, "offset": 7, "key": key, "correlationId": "billing:orders:2:7"}
    assert second == {**usual, "offset": 8, "correlationId": 'c"1\\', "traceabilityId": "t-1"}


@pytest.mark.parametrize(
    ("how", "said", "shown"),
    [
        (
            "dead letter",
            Said("ValueError"),
            {"reason": "dead letter: ValueError", "correlationId": "billing:orders:2:7"},
        ),
        (
            "given up",
            Said("HTTP 409", (("correlation_id", "r-1"), ("traceability_id", "s-1"), ("result_timestamp", "77"))),
            {"reason": "given up: HTTP 409", "correlationId": "r-1", "traceabilityId": "s-1", "timestamp": 77},
        ),
        ("skipped", Said("HTTP 404"), {"reason": "skipped: HTTP 404"}),
        ("skipped by hand: ticket 12", None, {"reason": "skipped by hand: ticket 12"}),
    ],
)
def test_a_record_that_ended_otherwise_is_a_failure(how: str, said: Said | None, shown: dict[str, Any]) -> None:
    """How it ended, the class of the failure, and ids of the result where the record has none."""
    [note] = consume(taken(7), how=how, said=[said] if said else [])
    assert note["auditStatus"] == "FAILURE"
    assert {name: note.get(name) for name in shown} == shown
    assert (note["topic"], note["partition"], note["offset"]) == ("orders", 2, 7)


def test_ids_of_the_record_come_before_those_of_the_result() -> None:
    """As in the original."""
    said = Said("ValueError", (("correlation_id", "r-1"), ("traceability_id", "s-1")))
    [note] = consume(taken(7, [("X-Correlation-Id", b"c-1")]), how="dead letter", said=[said])
    assert (note["correlationId"], note["traceabilityId"]) == ("c-1", "s-1")


def test_replays_and_redriven_records_are_told_apart() -> None:
    """By the job, and by the place the record had first, which its delivery is named after."""
    redriven: list[Header] = [("headrace.redrive.of", b"orders:0:3")]
    for how in ("delivered", "dead letter"):
        [note] = consume(taken(7, redriven), how=how, who=Consumption("STREAMING_CONSUMER", "g", "job-1"))
        assert (note["replay"], note["redriveOf"], note["correlationId"]) == ("job-1", "orders:0:3", "g:orders:0:3")
        assert note["auditType"] == "STREAMING_CONSUMER"


@pytest.mark.parametrize("settings", [{}, {"to": "file", "records": "none"}])
def test_consumed_records_follow_the_switch_of_produced_ones(settings: Any) -> None:
    """By default what went well is not noted."""

    def act(audit: Audit) -> None:
        audit.consumed(PUSHED, [taken(1)], 10, "delivered", ())
        audit.consumed(PUSHED, [taken(2)], 10, "dead letter", [Said("ValueError")])

    notes, _ = audited(act, **settings)
    assert [note["offset"] for note in notes] == ([2] if not settings else [])


async def test_what_others_write_is_noted_with_its_outcome() -> None:
    """Dead letters and results of functions go through the same door."""
    target = Target()
    audit = Audit(AuditConfig(to="file"), target, Metrics(), ManualClock())
    await audit.start()

    async def write(records: Sequence[OutgoingRecord]) -> Sequence[Produced | HeadraceError]:
        return RESULTS

    assert await audit.audited(write, "STREAMING_PRODUCER")(RECORDS) == RESULTS
    await audit.drain(Deadline(ManualClock(), 1))
    await audit.stop()
    assert [(note["auditType"], note["auditStatus"]) for note in target.notes] == [
        ("STREAMING_PRODUCER", status) for status in ("SUCCESS", "FAILURE", "UNKNOWN")
    ]


HOSTILE = st.lists(st.tuples(st.sampled_from(["X-Correlation-Id", "X-Traceability-Id", "a"]), st.binary() | st.none()))
ENDS = st.sampled_from(["delivered", "dead letter", "skipped", "given up"])


@given(st.lists(st.tuples(HOSTILE, st.binary() | st.none(), ENDS), max_size=30))
def test_there_is_one_note_for_each_record_that_ended(ends: list[tuple[list[Header], bytes | None, str]]) -> None:
    """Whatever stands in its headers and key, and however it ended; each with an id of its own."""

    def act(audit: Audit) -> None:
        for offset, (headers, key, how) in enumerate(ends):
            said = [] if how == "delivered" else [Said("ValueError")]
            audit.consumed(PUSHED, [taken(offset, headers, key)], 10, how, said)

    notes, metrics = audited(act, to="file", records="all", keys="text")
    assert [note["offset"] for note in notes] == list(range(len(ends)))
    assert [note["auditStatus"] == "SUCCESS" for note in notes] == [how == "delivered" for _, _, how in ends]
    assert all(note["correlationId"] for note in notes)
    assert len({note["id"] for note in notes}) == len(ends)
    assert counted(metrics).get("written", 0) == len(ends)


async def test_notes_that_are_left_at_the_end_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """When a drain has no more time, the log has their number."""

    target = Target()
    target.gate = asyncio.Event()
    audit = Audit(AuditConfig(to="file"), target, Metrics(), ManualClock())
    target.gate.set()
    await audit.start()
    target.gate.clear()
    audit.produced(RECORDS, RESULTS)
    with pytest.raises(TimeoutError):
        await audit.drain(Deadline(ManualClock(), 0))
    await audit.stop()

    assert "3 notes were not written when the process had to end" in caplog.text
