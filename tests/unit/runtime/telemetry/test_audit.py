"""What has an event, and that callers never wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from headrace.config.audit_config import AuditConfig
from headrace.errors import KafkaTimeout, RecordTooLarge
from headrace.records import Header, OutgoingRecord, Produced, Record
from headrace.runtime import Deadline
from headrace.runtime.telemetry.audit import Audit
from headrace.runtime.telemetry.audit_events import AuditEvent, Consumption, Line
from headrace.runtime.telemetry.correlation import caller
from headrace.runtime.telemetry.metrics import Metrics, text_of
from headrace_devkit.testing import ManualClock

HEADERS = [("X-Traceability-Id", b"t-1"), ("X-Correlation-Id", b"c-1"), ("color", b"red")]
RECORDS = [OutgoingRecord("orders", b"k", b"secret value", HEADERS)] * 3
RESULTS = [Produced(2, 7), RecordTooLarge("too large"), KafkaTimeout("no response")]

STATUSES = ["FAILURE", "UNKNOWN"]
FAILED, ALL = [*STATUSES, "FAILURE"], ["SUCCESS", *STATUSES, "SUCCESS", "FAILURE"]


class Harness:
    """An audit whose target this object is: it keeps events, can be held back, and can lose what it is given."""

    def __init__(self, **settings: Any) -> None:
        self.events: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.loses = False
        self.metrics, self.clock = Metrics(), ManualClock(1000.0)
        self.audit = Audit(AuditConfig(**settings), self, self.metrics, self.clock)

    async def __aenter__(self) -> Harness:
        await self.audit.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.audit.stop()

    async def write(self, lines: Sequence[Line]) -> tuple[int, str]:
        await self.gate.wait()
        self.events += [] if self.loses else [json.loads(line) for _, line in lines]
        return (len(lines), "the disk is full") if self.loses else (0, "")

    async def drain(self, seconds: float = 1) -> None:
        await self.audit.drain(Deadline(self.clock, seconds))

    @property
    def counted(self) -> dict[str, float]:
        lines = text_of(self.metrics.snapshot()).decode().splitlines()
        found = [line for line in lines if line.startswith("headrace_audit_events_total")]
        return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def audited(act: Callable[[Audit], None], **settings: Any) -> tuple[list[Any], dict[str, float]]:
    """Return the events when something is done, and how many events are counted."""

    async def main() -> tuple[list[Any], dict[str, float]]:
        async with Harness(**settings) as harness:
            act(harness.audit)
            await harness.drain()
        return harness.events, harness.counted

    return asyncio.run(main())


def produce(audit: Audit) -> None:
    caller.set("loader")
    audit.produced(RECORDS, RESULTS)


def test_each_record_of_a_request_has_an_event_with_the_fields_of_light_4j() -> None:
    """Success, failure and unknown are told apart; a key only as its hash, a value never."""
    events, counted = audited(produce, to="file", records="all", service_id="billing")
    first, *rest = events
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
    assert [(event["auditStatus"], event["partition"], event["offset"], event["stacktrace"]) for event in rest] == [
        ("FAILURE", 0, 0, "ERR40017 RECORD_TOO_LARGE: too large"),
        ("UNKNOWN", 0, 0, "ERR40013 KAFKA_TIMEOUT: no response"),
    ]
    assert len({event["id"] for event in rest}) == 2
    assert "secret" not in json.dumps(events)
    assert counted == {"written": 3, "lost": 0}


@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({}, FAILED),
        ({"to": "file"}, ALL),
        ({"to": "file", "records": "all"}, ALL),
        ({"to": "file", "records": "failed"}, FAILED),
        ({"to": "file", "records": "none"}, []),
    ],
)
def test_which_records_have_events(settings: Any, statuses: list[str]) -> None:
    """Those that went well only once a target is in the file; before that, those that failed."""

    def act(audit: Audit) -> None:
        produce(audit)
        audit.consumed(PUSHED, [taken(1)], 10, "delivered", ())
        audit.consumed(PUSHED, [taken(2)], 10, "dead letter", [Report("ValueError")])

    events, _ = audited(act, **settings)
    assert [event["auditStatus"] for event in events] == statuses


def test_by_default_a_request_has_one_event_for_what_went_well() -> None:
    """First and last offset and count of each partition, and the correlation id if it is the same in all records.

    What failed has events of its own, without anything of those that were written.
    """
    results = [Produced(2, 8), Produced(1, 40), RecordTooLarge("too large"), Produced(2, 9), Produced(2, 7)]

    def act(audit: Audit) -> None:
        audit.produced(RECORDS[:1] * 5, results)
        audit.produced(
            [*RECORDS[:1], OutgoingRecord("orders", None, b"v", [("X-Correlation-Id", b"c-2")])], results[::3]
        )

    events, counted = audited(act, to="file")
    names = ("topic", "partition", "offset", "lastOffset", "count", "ranges", "correlationId")
    ranges = [
        {"topic": "orders", "partition": 2, "offset": 7, "lastOffset": 9, "count": 3},
        {"topic": "orders", "partition": 1, "offset": 40, "lastOffset": 40, "count": 1},
    ]
    assert [tuple(event.get(name) for name in names) for event in events] == [
        (None, None, None, None, 4, ranges, "c-1"),
        ("orders", 0, 0, None, None, None, "c-1"),
        ("orders", 2, 8, 9, 2, None, None),
    ]
    assert [event["auditStatus"] for event in events] == ["SUCCESS", "FAILURE", "SUCCESS"]
    assert counted == {"written": 3, "lost": 0}


def test_a_request_to_hundreds_of_partitions_has_events_that_each_fit_into_a_record() -> None:
    """A hundred ranges in each; the last range alone has the fields of an event for one partition."""
    events, _ = audited(
        lambda audit: audit.produced(RECORDS[:1] * 201, [Produced(n, n) for n in range(201)]), to="file"
    )
    assert [(len(event.get("ranges", ())), event["count"], event.get("partition")) for event in events] == [
        (100, 100, None),
        (100, 100, None),
        (0, 1, 200),
    ]
    assert {one["partition"] for event in events for one in event.get("ranges", ())} == set(range(200))


async def test_deliveries_that_follow_each_other_share_an_event_until_it_is_written() -> None:
    """Those of one group and partition, with one correlation id or none, that leave no gap and are no single record."""
    own: list[Header] = [("X-Correlation-Id", b"a")]
    other = PUSHED._replace(group="other")
    deliveries = [((0, 1), PUSHED, None), ((2, 3), PUSHED, None), ((2, 3), other, None), ((4, 5), PUSHED, own)]
    deliveries += [((6, 7), PUSHED, own), ((9, 10), PUSHED, own), ((11,), PUSHED, own)]

    async with Harness(to="file") as harness:
        for turn in range(2):
            for offsets, who, headers in deliveries:
                records = [taken(4 * turn + offset, headers) for offset in offsets]
                harness.audit.consumed(who, records, 10, "delivered", ())
            await harness.drain()
    found = [(n["offset"], n.get("lastOffset"), n.get("count"), n["group"] == "other") for n in harness.events]
    once = [(0, 3, 4, False), (2, 3, 2, True), (4, 7, 4, False), (9, 10, 2, False), (11, None, None, False)]
    assert found == [(at + n, last and last + n, *how) for n in (0, 4) for at, last, *how in once]


async def test_a_stalled_target_costs_events_and_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the budget events are dropped; an event reports how many. When a drain ends, the log has what is left."""
    monkeypatch.setattr(AuditConfig, "max_pending_bytes", 4000)
    async with Harness(to="file") as harness:
        harness.gate.clear()
        for _ in range(50):
            harness.audit.produced(RECORDS[:1], RESULTS[:1])
        assert harness.counted["dropped"] == 46
        assert harness.audit.readiness() == (True, "46 events are missing in the audit")
        harness.gate.set()
        await harness.drain()
        harness.audit.produced(RECORDS[:1], RESULTS[:1])
        await harness.drain()
        harness.gate.clear()
        harness.audit.produced(RECORDS[:1], RESULTS[:1])
        with pytest.raises(TimeoutError):
            await harness.drain(0)
    types = [(event["auditType"], event["auditStatus"], event.get("count")) for event in harness.events]
    assert types == [("PRODUCER", "SUCCESS", None)] * 4 + [("DROPPED", "FAILURE", 46), ("PRODUCER", "SUCCESS", None)]
    assert harness.counted == {"dropped": 46, "lost": 0, "written": 5}
    assert len(caplog.records) == 2
    assert "1 events were not written before the process stopped" in caplog.text


async def test_an_outage_of_the_target_has_one_beginning_and_one_end(caplog: pytest.LogCaptureFixture) -> None:
    """With the number so far in readiness; then an event has the number of lost ones."""
    async with Harness(to="file") as harness:
        for second in range(130):
            harness.loses = second % 5 != 4  # a full disk takes a small write now and then
            harness.audit.control("pause", "reactive orders")
            await harness.drain()
            await harness.clock.advance(1.0)
        assert harness.audit.readiness() == (True, "104 events are missing in the audit: the disk is full")
        await harness.clock.advance(10.0)
        harness.audit.control("pause", "reactive orders")
        await harness.drain()
        assert harness.audit.readiness() == (True, "104 events are missing in the audit")
    assert sum(event.get("count") or 0 for event in harness.events if event["auditType"] == "DROPPED") == 104
    assert caplog.messages == [
        "audit: losing events: the disk is full",
        "audit: writing events again; lost 104 in 140 s",
    ]


async def test_an_event_that_cannot_be_made_is_lost_and_work_continues(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, and the next event is written."""

    def fail() -> Iterator[AuditEvent]:
        yield harness.audit.event("CONTROL", "SUCCESS")
        raise ValueError("a defect")

    async with Harness(to="file") as harness:
        harness.audit.put(fail(), 3, 10)
        await harness.drain()
        harness.audit.control("pause", "reactive orders")
        await harness.drain()
    assert harness.counted == {"written": 1, "lost": 3}
    assert "lost 3 events because of a defect" in caplog.text


class Report(NamedTuple):
    """The report of a destination on a failed record."""

    error: str = ""
    details: tuple[tuple[str, str], ...] = ()


def taken(offset: int, headers: list[Header] | None = None, key: bytes | None = b"k") -> Record:
    return Record("orders", 2, offset, 5, key, b"secret value", lambda: headers)


PUSHED = Consumption("REACTIVE_CONSUMER", "billing")
