"""What is noted, that noting never waits, and where notes go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.config.audit import AuditConfig
from headrace.errors import AuthTokenScopeMismatch, HeadraceError, KafkaTimeout, RecordTooLarge
from headrace.lifecycle import Deadline, ManualClock
from headrace.records import OutgoingRecord, Produced
from headrace.telemetry.audit import Audit
from headrace.telemetry.audit_targets import AuditFile, AuditTopic
from headrace.telemetry.correlation import caller, correlation_id
from headrace.telemetry.metrics import Metrics

HEADERS = [("X-Traceability-Id", b"t-1"), ("X-Correlation-Id", b"c-1"), ("color", b"red")]
RECORDS = [OutgoingRecord("orders", key, b"secret value", HEADERS, partition) for key, partition in ((b"k", None),) * 3]
RESULTS = [Produced(2, 7), RecordTooLarge("too large"), KafkaTimeout("no answer")]


class Target:
    """Keeps notes; can be held back."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def write(self, notes: Sequence[tuple[str, bytes]]) -> int:
        await self.gate.wait()
        self.notes += [json.loads(line) for _, line in notes]
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
    audit.produced(RECORDS, RESULTS, 1)


def counted(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("headrace_audit_notes_total")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_each_record_of_a_request_has_a_note_with_the_fields_of_the_original() -> None:
    """Success, failure and unknown are told apart; a key only as its hash, a value never."""
    notes, metrics = audited(produce, to="file", service_id="billing")
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
        ({"to": "file", "records": "failed"}, ["FAILURE", "UNKNOWN"]),
        ({"to": "file", "records": "none"}, []),
    ],
)
def test_which_records_are_noted(settings: Any, statuses: list[str]) -> None:
    """All once a target is written in the file; before that, what failed."""
    notes, _ = audited(produce, **settings)
    assert [note["auditStatus"] for note in notes] == statuses


def test_by_default_a_request_that_went_well_leaves_nothing_to_do() -> None:
    """So it costs such a request no more than the question."""
    notes, metrics = audited(lambda audit: audit.produced(RECORDS[:1], RESULTS[:1], 1))
    assert notes == []
    assert counted(metrics) == {}


@pytest.mark.parametrize(("keys", "shown"), [("text", "k"), ("none", None)])
def test_keys_are_noted_as_configured(keys: str, shown: str | None) -> None:
    """As they are, or not at all."""
    notes, _ = audited(produce, to="file", keys=keys)
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
    assert len(notes) == 100
    assert counted(metrics) == {"dropped": 900, "written": 100, "lost": 0}


def test_a_target_that_stands_still_costs_notes_and_nothing_else() -> None:
    """Above the budget notes are dropped and counted; memory stays bounded; it goes on when the target does."""

    async def main() -> None:
        target, metrics = Target(), Metrics()
        audit = Audit(AuditConfig(to="file", max_pending_bytes=200), target, metrics, ManualClock())
        await audit.start()
        target.gate.clear()
        for _ in range(50):
            audit.produced(RECORDS[:1], RESULTS[:1], 1)
            await asyncio.sleep(0)
        dropped = counted(metrics)["dropped"]
        assert audit._pending_bytes <= 200
        assert 0 < dropped < 50
        target.gate.set()
        await audit.drain(Deadline(ManualClock(), 1))
        assert len(target.notes) == 50 - dropped
        audit.produced(RECORDS[:1], RESULTS[:1], 1)
        await audit.drain(Deadline(ManualClock(), 1))
        assert len(target.notes) == 51 - dropped
        await audit.stop()

    asyncio.run(main())


def test_the_file_is_put_aside_when_it_is_full(tmp_path: Path) -> None:
    """Whole lines in each, so many old ones as asked for, and nobody else may read them."""
    file = tmp_path / "log" / "audit.log"
    target = AuditFile(AuditConfig(file=file, max_file_bytes=100, old_files=2))

    async def main() -> None:
        for number in range(20):
            assert await target.write([("c", f'{{"n":{number}}}'.encode())] * 2) == 0

    asyncio.run(main())
    assert sorted(path.name for path in file.parent.iterdir()) == ["audit.log", "audit.log.1", "audit.log.2"]
    for path in file.parent.iterdir():
        assert path.stat().st_size <= 100
        assert path.stat().st_mode & 0o077 == 0
        assert all("n" in json.loads(line) for line in path.read_text().splitlines())
    assert json.loads(file.read_text().splitlines()[-1]) == {"n": 19}


def test_a_file_that_cannot_be_written_is_said_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And work goes on."""
    (tmp_path / "log").write_text("a file where the folder should be")
    target = AuditFile(AuditConfig(file=tmp_path / "log" / "audit.log"))
    assert asyncio.run(target.write([("c", b"{}"), ("c", b"{}")])) == 2
    assert "2 notes are lost" in caplog.text


def test_the_topic_gets_the_correlation_id_as_key(caplog: pytest.LogCaptureFixture) -> None:
    """What Kafka does not take is counted as lost."""
    written: list[OutgoingRecord] = []

    async def take(records: Sequence[OutgoingRecord]) -> list[Produced | HeadraceError]:
        written.extend(records)
        return [Produced(0, 0) if record.key == b"c-1" else KafkaTimeout("no answer") for record in records]

    async def refuse(records: Sequence[OutgoingRecord]) -> list[Produced | HeadraceError]:
        raise RecordTooLarge("no room")

    notes = [("c-1", b"{}"), ("", b"[]")]
    assert asyncio.run(AuditTopic("sidecar-audit", take).write(notes)) == 1
    assert [(r.topic, r.key, r.value, r.headers) for r in written] == [
        ("sidecar-audit", b"c-1", b"{}", None),
        ("sidecar-audit", None, b"[]", None),
    ]
    assert asyncio.run(AuditTopic("sidecar-audit", refuse).write(notes)) == 2
    assert "1 notes are lost, because no answer" in caplog.text
