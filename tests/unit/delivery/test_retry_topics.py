"""Retry topics and blocked keys, case by case."""

from typing import Any

import pytest

from headrace.delivery.blocked_keys import BlockedKeys, KeyOrder
from headrace.delivery.outcomes import ACK, DeadLetter, DelayedRecord, Delivery, Reply
from headrace.delivery.retry_topics import RetryTopicDestination, delayed_of
from headrace.errors import DeadLetterFailed, DestinationUnavailable, KafkaUnavailable
from headrace.kafka import RAW_BYTES
from headrace.records import Header, Record
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster
from tests.unit.delivery.retry_harness import BLOCKED, RETRY_TOPIC, SOURCE, RetryHarness

RETRY, NEVER = Reply("E", "again"), Reply("E", "never", permanent=True)
OWN: list[Header] = [("headrace.retry.due", b"mine"), ("h", None), ("h", b"\x00\xff")]


def record(offset: int, key: bytes | None = b"k") -> Record:
    return Record(*SOURCE, offset, 42, key, b"v", lambda: OWN, 2)


def dead_letter(of: Record, attempts: int = 2, outcome: Reply = RETRY, first: float = 5.0) -> DeadLetter:
    return DeadLetter(of, "g", attempts, outcome, first, first + 1)


def delivery(*records: Record, attempt: int = 1) -> Delivery:
    return Delivery("g.retry", records[0].topic_partition, 1, records, attempt)


def copies(harness: RetryHarness) -> list[Record]:
    return harness.log(RETRY_TOPIC.topic)


@pytest.mark.parametrize(
    ("settings", "outcome"), [({}, NEVER), ({}, Reply("HTTP 400", "", 400)), ({"errors": {"E": "dead_letter"}}, RETRY)]
)
async def test_a_permanent_failure_skips_the_retry_topics(settings: dict[str, Any], outcome: Reply) -> None:
    """Permanent by the destination or by the policy."""
    harness = RetryHarness(clock=ManualClock(100.0), **settings)
    assert len(await harness.topics.write([dead_letter(record(8), 1, outcome)])) == 0
    assert (len(harness.dead_letters), copies(harness)) == (1, [])


@pytest.mark.parametrize(("refused", "dead_letters", "delayed"), [("dead", 0, 1), (RETRY_TOPIC.topic, 1, 0)])
async def test_an_outage_of_one_topic_writes_no_copies_into_the_other(
    refused: str, dead_letters: int, delayed: int
) -> None:
    """One record waits for the topic that is down; the other is written once to its topic."""
    harness = RetryHarness(attempts=1, max_records=2)
    harness.refuses = refused
    harness.response = lambda record: NEVER if record.offset == 1 else RETRY
    async with harness.running():
        harness.feed(record(1), record(2))
        await harness.clock.advance(3600)
        assert (len(harness.dead_letters), len(copies(harness))) == (dead_letters, delayed)
        numbers = harness.live.numbers()
        assert (numbers["dead_letters"], numbers["delayed"]) == (dead_letters, delayed)
        harness.refuses = ""
        await harness.clock.advance(60)
        assert [dead.record.offset for dead in harness.dead_letters] == [1]
        assert [delayed_of(copy).origin.offset for copy in copies(harness)] == [2]
        assert (harness.live.numbers()["dead_letters"], harness.live.numbers()["delayed"]) == (1, 1)


@pytest.mark.parametrize("outcome", [ACK, NEVER])
async def test_a_record_whose_key_cannot_be_unblocked_yet_is_completed_once(outcome: Reply) -> None:
    """The topic of blocked keys cannot be written: only that is repeated."""
    harness = RetryHarness(ordering="key", keep_key_order=True)
    harness.response = lambda record: outcome
    await harness.topics.write([dead_letter(record(1))])
    harness.refuses = BLOCKED
    async with harness.running():
        harness.feed_retries()
        for seconds in (600, 60):
            await harness.clock.advance(seconds)
            assert (len(harness.deliveries), len(harness.dead_letters)) == (1, int(outcome is NEVER))
            harness.refuses = ""
        assert not harness.blocked.of(record(1))
        assert not harness.retries.lanes[RETRY_TOPIC].tracker.has_in_flight


async def test_without_dead_letters_the_error_of_the_last_retry_topic_names_the_fix() -> None:
    """The partition of the retry topic stalls."""
    harness = RetryHarness(dead_letters=False)
    await harness.topics.write([dead_letter(record(8))])
    with pytest.raises(DeadLetterFailed, match=r"offset 8 of t-3 failed 3 times \(E\), and dead letters are off"):
        await harness.topics.write([dead_letter(copies(harness)[0], 3)])


@pytest.mark.parametrize("headers", [[], [("headrace.retry.due", b"x")], None])
async def test_a_foreign_record_in_a_retry_topic_is_delivered_unchanged(headers: list[Header] | None) -> None:
    """It is delivered at once, as a record of the retry topic; so is one whose history cannot be read."""
    harness = RetryHarness()
    await harness.topics.write([dead_letter(record(8))])
    garbled = [(name, b"?") for name, _ in copies(harness)[0].headers]
    other = Record(*RETRY_TOPIC, 5, 0, None, None, lambda: garbled if headers is None else headers)
    assert delayed_of(other) == DelayedRecord(other)
    assert await RetryTopicDestination(harness, harness.topics).deliver(delivery(other)) == [ACK]
    assert harness.deliveries[0].records == [other]


async def test_a_delivery_of_a_retry_topic_has_the_live_epoch_of_its_origin() -> None:
    """Epochs of the retry topic's own assignment are not comparable; without a live assignment it is 0."""
    harness = RetryHarness()
    await harness.topics.write([dead_letter(record(8))])
    retries = RetryTopicDestination(harness, harness.topics, harness.live.epoch_of)
    harness.live.on_assigned({SOURCE: 90}, {})
    await retries.deliver(delivery(*copies(harness)))
    harness.live.on_lost([SOURCE])
    await retries.deliver(delivery(*copies(harness)))
    assert [delivered.epoch for delivered in harness.deliveries] == [90, 0]


async def test_a_writer_whose_clock_is_ahead_delays_no_record_beyond_the_delay() -> None:
    """Its records, and those behind them, are delivered one delay after this process received them."""
    harness = RetryHarness()
    ahead = RetryHarness(clock=ManualClock(1_003_600.0), cluster=harness.cluster)
    await ahead.topics.write([dead_letter(record(1))])
    await harness.topics.write([dead_letter(record(2))])
    await ahead.topics.write([dead_letter(record(3))])
    async with harness.running():
        harness.feed_retries()
        await harness.clock.advance(9.9)
        assert harness.delivered == []
        assert harness.retries.lanes[RETRY_TOPIC].condition.reason == "offset 0 is due at 1970-01-12 13:46:50 UTC"
        await harness.clock.advance(0.2)
        assert harness.delivered == [1, 2, 3]
        assert {(each.group, each.attempt) for each in harness.deliveries} == {("g", 3)}


async def test_beyond_the_limit_of_blocked_keys_records_wait_in_their_partition() -> None:
    """Every process keeps every blocked key in memory."""
    harness = RetryHarness(ordering="key", keep_key_order=True)
    harness.blocked._most_records = 2
    await harness.topics.write([dead_letter(record(1)), dead_letter(record(2))])
    with pytest.raises(DeadLetterFailed, match="limit reached: 2 records with blocked keys wait in the retry topic"):
        await harness.topics.write([dead_letter(record(3))])
    await harness.topics.write([dead_letter(record(2))])
    await harness.topics.complete(copies(harness)[0])
    assert await harness.topics.write([dead_letter(record(3))]) == [0]


async def test_nothing_is_delivered_while_blocked_keys_cannot_be_read_or_written() -> None:
    """Nothing is completed either."""
    harness = RetryHarness(ordering="key", keep_key_order=True)
    away = MemoryCluster({BLOCKED: 1})
    table = away.table(BLOCKED, RAW_BYTES, harness.clock)
    away.follow(table)
    away.failure = KafkaUnavailable("no broker")
    blind = BlockedKeys(table)
    table.read([Record(BLOCKED, 0, 0, 0, b'{"of":"another version"}', b"waits")], 1)
    assert [*blind.entries()] == [], "it ends no process"
    with pytest.raises(DestinationUnavailable, match="failed to read the table of blocked keys: no broker"):
        await KeyOrder(harness, blind, harness.topics.write).deliver(delivery(record(1)))
    harness.refuses = BLOCKED
    with pytest.raises(DeadLetterFailed, match="failed to write blocked keys: no broker"):
        await harness.topics.write([dead_letter(record(1))])
    assert (harness.delivered, copies(harness)) == ([], [])


@pytest.mark.parametrize("later", [0, 3])
async def test_a_waiting_record_is_delivered_though_the_topic_of_blocked_keys_was_created_again(later: int) -> None:
    """Its entry is gone; the new topic may already be longer than its offset."""
    first, second = (RetryHarness(ordering="key", keep_key_order=True) for _ in range(2))
    for harness, topic_id in ((first, "first"), (second, "second")):
        assert harness.table
        harness.table._position.topic_id = topic_id
    await first.topics.write([dead_letter(record(1))])
    await second.blocked.block([record(offset, b"other") for offset in range(7, 7 + later)])
    assert await RetryTopicDestination(second, second.topics).deliver(delivery(*copies(first))) == [ACK]
    assert len(second.blocked._keys) == min(later, 1)
