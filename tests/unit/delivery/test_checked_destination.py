"""What checks before a destination do: only the other records are delivered, and each has its reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from headrace.delivery.checked_destination import CheckedDestination, younger_than
from headrace.delivery.outcomes import ACK, FILTERED, NOT_BEGUN, Delivery, Reply
from headrace.records import Record, RecordBatch, TopicPartition
from headrace_devkit.testing import ManualClock
from tests.unit.delivery.retry_harness import RETRY_TOPIC, RetryHarness

PARTITION = TopicPartition("t", 3)


def record(offset: int, timestamp_ms: int = -1) -> Record:
    return Record("t", 3, offset, timestamp_ms, b"k", b"v", size_bytes=2)


async def replies_of(*records: Record, replay: str = "") -> tuple[list[str], list[int]]:
    """Return the errors by record behind a check of odd offsets, and then of their age; and what was delivered."""
    delivered: list[int] = []

    async def deliver(delivery: Delivery) -> Sequence[Reply]:
        delivered.extend(RecordBatch.of(delivery.records).offsets)
        return [ACK, *[NOT_BEGUN] * (len(delivery.records) - 1)]

    def odd(_: Delivery, batch: RecordBatch) -> Mapping[int, Reply]:
        return {index: FILTERED for index, offset in enumerate(batch.offsets) if offset % 2}

    checks = [odd, younger_than(10, ManualClock(100.0))]
    delivery = Delivery("g", PARTITION, 1, RecordBatch.of(records), 1, replay)
    found = await CheckedDestination(SimpleNamespace(deliver=deliver), checks).deliver(delivery)
    return [reply.error or ("filtered" if reply == FILTERED else "ok") for reply in found], delivered


async def test_each_record_has_its_own_reply() -> None:
    """The condition counts before the age, and a record without a time has none."""
    found = await replies_of(record(0), record(1, 1), record(2, 89_999), record(4, 90_000), record(5))
    assert found == (["ok", "filtered", "RecordExpired", "not begun", "filtered"], [0, 4])
    assert await replies_of(record(1), record(2, 0)) == (["filtered", "RecordExpired"], [])
    assert await replies_of(record(2, 0), replay="job") == (["ok"], [2])


async def test_the_age_counts_at_each_attempt_of_a_delayed_record() -> None:
    """By the time of the record, not of its copy in the retry topic: then it is a dead letter at once."""
    harness = RetryHarness(clock=ManualClock(100.0), attempts=1)
    harness.response = lambda _: Reply("ValueError")
    taken = harness.deliver
    checks = [younger_than(8, harness.clock)]
    harness.path._inner = CheckedDestination(SimpleNamespace(deliver=taken), checks)
    harness.live._deliverer._destination = harness.path._inner
    harness.retries = harness.path.pump(harness.live)
    harness.retries.connect(harness, harness)  # type: ignore[arg-type]
    async with harness.running():
        harness.feed(record(1, 99_000), record(2, 1_000))
        await harness.clock.advance(1)
        assert (harness.delivered, len(harness.log(RETRY_TOPIC.topic))) == ([1], 1)
        harness.feed_retries()
        await harness.clock.advance(60)
    assert harness.delivered == [1]
    assert [(one.record.offset, one.reply.error) for one in harness.dead_letters] == [
        (2, "RecordExpired"),
        (1, "RecordExpired"),
    ]
