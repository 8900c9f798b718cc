"""Retry topics and blocked keys, case by case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.blocked_keys import BlockedKeys, KeyOrder
from headrace.delivery.outcomes import ACK, HANDED_OFF, DeadLetter, DelayedRecord, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import PumpHooks
from headrace.delivery.retry_topics import RetryTopicDestination, RetryTopics, delayed_of
from headrace.errors import DeadLetterFailed, DestinationUnavailable, KafkaUnavailable, RecordTooLarge
from headrace.kafka import RAW_BYTES, CompactedTable
from headrace.records import Header, OutgoingRecord, Produced, Record, TopicPartition
from headrace.testing import ManualClock
from tests.memory_table import memory_table

RETRY = Reply("E", "again")
P3 = TopicPartition("t", 3)
OWN: list[Header] = [("headrace.retry.due", b"mine"), ("h", None), ("h", b"\x00\xff")]


class Broker:
    """Topics in memory, a backend and a dead letter topic."""

    blocked: BlockedKeys

    def __init__(self) -> None:
        self.logs: dict[str, list[Record]] = {}
        self.dead_letters: list[DeadLetter] = []
        self.delivered: list[Delivery] = []
        self.response: Callable[[Record], Reply] = lambda record: ACK
        self.refuses = ""
        self.too_large = b""
        self.away = False
        self.clock = ManualClock()
        self.table: CompactedTable[bytes] | None = None

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Any]:
        return [self._append(record) for record in records]

    def _append(self, record: OutgoingRecord) -> Produced | KafkaUnavailable | RecordTooLarge:
        if record.topic == self.refuses:
            return KafkaUnavailable("no broker")
        if record.key == self.too_large and ".retry." in record.topic:
            return RecordTooLarge("too large")
        log = self.logs.setdefault(record.topic, [])
        headers = record.headers or []
        log.append(Record(record.topic, 0, len(log), 7, record.key, record.value, lambda: headers, 3))
        if self.table and record.topic == self.table.topic.name:
            self.table.read(log[-1:], len(log))
        return Produced(0, len(log) - 1)

    async def write(self, dead_letters: Sequence[DeadLetter]) -> None:
        if self.refuses == "dead":
            raise DeadLetterFailed("no room", missing=[0])
        self.dead_letters += dead_letters

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        if self.away:
            raise DestinationUnavailable("away")
        self.delivered.append(delivery)
        return [self.response(record) for record in delivery.records]

    def end(self) -> int:
        return len(self.logs.get("blocked", ()))

    def topics(self, *, dead_letters: bool = True, clock: ManualClock | None = None, **retry: Any) -> RetryTopics:
        keeps = retry.get("keep_key_order", False)
        if keeps:
            self.table = memory_table("blocked", RAW_BYTES, self.produce, self.end)
            self.blocked = BlockedKeys(self.table)
        return RetryTopics(
            "g",
            RetryConfig.model_validate({"attempts": 2, "topics": [10], **retry}),
            self.produce,
            clock or self.clock,
            dead_letters=self if dead_letters else None,
            blocked=self.blocked if keeps else None,
        )


def record(offset: int, key: bytes | None = b"k") -> Record:
    return Record("t", 3, offset, 42, key, b"v", lambda: OWN, 2)


def dead_letter(of: Record, attempts: int, outcome: Reply = RETRY, first: float = 5.0) -> DeadLetter:
    return DeadLetter(of, "g", attempts, outcome, first, first + 1)


def delivery(*records: Record, attempt: int = 1) -> Delivery:
    return Delivery("g.retry", records[0].topic_partition, 1, records, attempt)


async def test_a_record_goes_from_retry_topic_to_retry_topic_and_then_to_the_dead_letters() -> None:
    """It keeps its history, and its own headers, even one that looks like a header of Headrace."""
    broker = Broker()
    retry_topics = broker.topics(clock=ManualClock(100.0), topics=[10, 60])
    await retry_topics.write([dead_letter(record(8), 2)])
    await retry_topics.write([dead_letter(broker.logs["g.retry.10s"][0], 3)])
    (copy,) = broker.logs["g.retry.60s"]
    assert delayed_of(copy)[1:5] == (3, 5.0, 160.0, None)
    assert len(await retry_topics.write([dead_letter(copy, 4)._replace(group="g.retry")])) == 0
    (dead,) = broker.dead_letters
    assert (dead.record.topic_partition, dead.record.offset, dead.record.headers) == (P3, 8, OWN)
    assert (dead.group, dead.attempts, dead.first_failed_at) == ("g", 4, 5.0)


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ({}, Reply("E", "never", permanent=True)),
        ({}, Reply("HTTP 400", "", 400)),
        ({"errors": {"E": "dead_letter"}}, RETRY),
        ({"deadline_seconds": 104.0}, RETRY),
    ],
)
async def test_a_permanent_failure_skips_the_retry_topics(settings: dict[str, Any], outcome: Reply) -> None:
    """Permanent by the destination or by the policy, or due after the deadline."""
    broker = Broker()
    retry_topics = broker.topics(clock=ManualClock(100.0), **settings)
    assert len(await retry_topics.write([dead_letter(record(8), 1, outcome)])) == 0
    assert (len(broker.dead_letters), broker.logs) == (1, {})


@pytest.mark.parametrize(("refused", "dead_letters", "copies"), [("dead", 0, 1), ("g.retry.10s", 1, 0)])
async def test_an_outage_of_one_topic_writes_no_copies_into_the_other(
    refused: str, dead_letters: int, copies: int
) -> None:
    """One record waits for the topic that is down; the other is written once to its topic."""
    broker = Broker()
    retry_topics = broker.topics(attempts=1)
    pump, _ = pump_of(broker, retry_topics, max_records=2)
    broker.refuses = refused
    broker.response = lambda record: Reply("E", permanent=True) if record.offset == 1 else RETRY
    await pump.start()
    pump.on_assigned({P3: 1}, {})
    pump.on_records(P3, 1, [record(1), record(2)])
    await broker.clock.advance(3600)
    assert (len(broker.dead_letters), len(broker.logs.get("g.retry.10s", ()))) == (dead_letters, copies)
    assert (pump.numbers()["dead_letters"], pump.numbers()["delayed"]) == (dead_letters, copies)
    broker.refuses = ""
    await broker.clock.advance(60)
    assert [dead.record.offset for dead in broker.dead_letters] == [1]
    assert [delayed_of(copy).origin.offset for copy in broker.logs["g.retry.10s"]] == [2]
    assert (pump.numbers()["dead_letters"], pump.numbers()["delayed"]) == (1, 1)
    await pump.stop()


async def test_a_record_too_large_to_follow_its_key_waits_in_its_partition() -> None:
    """It was never delivered, so it does not become a dead letter; it is delivered once its key is unblocked."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)
    order = KeyOrder(broker, broker.blocked, retry_topics.write)
    await retry_topics.write([dead_letter(record(1), 2)])
    broker.too_large = b"k"
    with pytest.raises(DeadLetterFailed):
        await order.deliver(delivery(record(2)))
    assert (broker.dead_letters, broker.delivered, dict(broker.blocked.of(record(2)))) == ([], [], {1: 0})
    await broker.blocked.unblock(record(1))
    assert await order.deliver(delivery(record(2))) == [ACK]


async def test_a_policy_for_an_error_named_blocked_does_not_apply_to_blocked_records() -> None:
    """It has not failed."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True, errors={"Blocked": "dead_letter"})
    await broker.blocked.block([record(8)])
    await KeyOrder(broker, broker.blocked, retry_topics.write).deliver(delivery(record(9)))
    assert (len(broker.logs["g.retry.10s"]), broker.dead_letters) == (1, [])


async def test_a_record_that_cannot_follow_its_key_delays_no_other() -> None:
    """The retry topic cannot be written: other records are delivered once, and the destination is not blamed."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)
    pump, _ = pump_of(broker, retry_topics, max_records=2)
    await retry_topics.write([dead_letter(record(1), 2)])
    broker.refuses = "g.retry.10s"
    await pump.start()
    pump.on_assigned({P3: 1}, {})
    pump.on_records(P3, 1, [record(2), record(3, b"other")])
    await broker.clock.advance(60)
    assert [r.offset for d in broker.delivered for r in d.records] == [3]
    assert pump.breaker.status.state == "closed"
    broker.refuses = ""
    await broker.clock.advance(60)
    assert not pump.lanes[P3].tracker.has_in_flight
    await pump.stop()


@pytest.mark.parametrize("outcome", [ACK, RETRY])
async def test_a_record_whose_key_cannot_be_unblocked_yet_is_completed_once(outcome: Reply) -> None:
    """The topic of blocked keys cannot be written: only that is repeated."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)
    _, pump = pump_of(broker, retry_topics)
    broker.response = lambda record: outcome
    await retry_topics.write([dead_letter(record(1), 2)])
    broker.refuses = "blocked"
    await pump.start()
    partition = TopicPartition("g.retry.10s", 0)
    pump.on_assigned({partition: 1}, {})
    pump.on_records(partition, 1, broker.logs["g.retry.10s"])
    await broker.clock.advance(600)
    assert (len(broker.delivered), len(broker.dead_letters)) == (1, int(outcome is RETRY))
    broker.refuses = ""
    await broker.clock.advance(60)
    assert (len(broker.delivered), len(broker.dead_letters)) == (1, int(outcome is RETRY))
    assert not retry_topics.blocked or not retry_topics.blocked.of(record(1))
    assert not pump.lanes[partition].tracker.has_in_flight
    await pump.stop()


async def test_without_dead_letters_the_error_of_the_last_retry_topic_names_the_fix() -> None:
    """The partition of the retry topic stalls."""
    broker = Broker()
    retry_topics = broker.topics(dead_letters=False)
    await retry_topics.write([dead_letter(record(8), 2)])
    with pytest.raises(DeadLetterFailed, match=r"offset 8 of t-3 failed 3 times \(E\), and dead letters are off"):
        await retry_topics.write([dead_letter(broker.logs["g.retry.10s"][0], 3)])


@pytest.mark.parametrize("headers", [[], [("headrace.retry.due", b"x")], None])
async def test_a_foreign_record_in_a_retry_topic_is_delivered_unchanged(headers: list[Header] | None) -> None:
    """It is delivered at once, as a record of the retry topic; so is one whose history cannot be read."""
    broker = Broker()
    retry_topics = broker.topics()
    await retry_topics.write([dead_letter(record(8), 2)])
    garbled = [(name, b"?") for name, _ in broker.logs["g.retry.10s"][0].headers]
    other = Record("g.retry.10s", 0, 5, 0, None, None, lambda: garbled if headers is None else headers)
    assert delayed_of(other) == DelayedRecord(other)
    assert await RetryTopicDestination(broker, retry_topics).deliver(delivery(other)) == [ACK]
    assert broker.delivered[0].records == [other]


def pump_of(broker: Broker, retry_topics: RetryTopics, max_records: int = 1) -> tuple[Pump, Pump]:
    """Return the pump of the consumer, and that of its retry topics."""
    config = DeliveryConfig(ordering="none", batch=BatchConfig(max_records=max_records), retry=retry_topics.retry)
    live = KeyOrder(broker, retry_topics.blocked, retry_topics.write) if retry_topics.blocked else broker
    live = Pump("p", "g", live, retry_topics, delivery=config, clock=broker.clock, chance=Random(1))
    destination = RetryTopicDestination(broker, retry_topics, live.epoch_of)
    retries = Pump(
        "r",
        "g.retry",
        destination,
        retry_topics,
        delivery=config,
        clock=broker.clock,
        chance=Random(1),
        shares_with=live,
        hooks=PumpHooks(delayed=retry_topics.delayed),
    )
    return live, retries


async def test_a_delivery_of_a_retry_topic_has_the_live_epoch_of_its_origin() -> None:
    """Epochs of the retry topic's own assignment are not comparable; without a live assignment it is 0."""
    broker = Broker()
    retry_topics = broker.topics()
    await retry_topics.write([dead_letter(record(8), 2)])
    live, _ = pump_of(broker, retry_topics)
    retries = RetryTopicDestination(broker, retry_topics, live.epoch_of)
    (copy,) = broker.logs["g.retry.10s"]
    live.on_assigned({P3: 90}, {})
    await retries.deliver(delivery(copy))
    live.on_lost([P3])
    await retries.deliver(delivery(copy))
    assert [delivered.epoch for delivered in broker.delivered] == [90, 0]


async def test_a_writer_whose_clock_is_ahead_delays_no_record_beyond_the_delay() -> None:
    """Its records, and those behind them, are delivered one delay after this process received them."""
    broker = Broker()
    retry_topics, ahead = broker.topics(), broker.topics(clock=ManualClock(1_003_600.0))
    _, pump = pump_of(broker, retry_topics)
    await pump.start()
    partition = TopicPartition("g.retry.10s", 0)
    pump.on_assigned({partition: 1}, {})
    await ahead.write([dead_letter(record(1), 2)])
    await retry_topics.write([dead_letter(record(2), 2)])
    await ahead.write([dead_letter(record(3), 2)])
    pump.on_records(partition, 1, broker.logs["g.retry.10s"])
    await broker.clock.advance(9.9)
    assert broker.delivered == []
    assert pump.lanes[partition].condition.reason == "offset 0 is due at 1970-01-12 13:46:50 UTC"
    await broker.clock.advance(0.2)
    assert [(d.group, d.attempt, d.records[0].offset) for d in broker.delivered] == [("g", 3, o) for o in (1, 2, 3)]
    await pump.stop()


async def test_beyond_the_limit_of_blocked_keys_records_wait_in_their_partition() -> None:
    """Every process keeps every blocked key in memory."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)
    broker.blocked._most_records = 2
    await retry_topics.write([dead_letter(record(1), 2), dead_letter(record(2), 2)])
    with pytest.raises(DeadLetterFailed, match="limit reached: 2 records with blocked keys wait in the retry topic"):
        await retry_topics.write([dead_letter(record(3), 2)])
    await retry_topics.write([dead_letter(record(2), 2)])
    await retry_topics.complete(broker.logs["g.retry.10s"][0])
    assert await retry_topics.write([dead_letter(record(3), 2)]) == [0]


async def test_bad_records_of_a_retry_topic_are_dead_letters_without_any_success() -> None:
    """They counted against the destination at their first failure; otherwise they would wait forever."""
    broker = Broker()
    retry_topics = broker.topics()
    _, pump = pump_of(broker, retry_topics)
    broker.response = lambda record: RETRY
    await pump.start()
    partition = TopicPartition("g.retry.10s", 0)
    pump.on_assigned({partition: 1}, {})
    await retry_topics.write([dead_letter(record(offset), 2) for offset in range(50)])
    pump.on_records(partition, 1, broker.logs["g.retry.10s"])
    await broker.clock.advance(30)
    assert (len(broker.dead_letters), pump.numbers()["dead_letters"]) == (50, 50)
    await pump.stop()


async def test_a_failing_destination_gets_nothing_from_the_retry_topics() -> None:
    """Consumer and retry topics share a breaker, so a bad deploy does not empty them into dead letters."""
    broker = Broker()
    retry_topics = broker.topics()
    live, pump = pump_of(broker, retry_topics)
    broker.response = lambda record: RETRY
    for each, partition in ((live, TopicPartition("t", 3)), (pump, TopicPartition("g.retry.10s", 0))):
        await each.start()
        each.on_assigned({partition: 1}, {})
    live.on_records(TopicPartition("t", 3), 1, [record(offset) for offset in range(50)])
    await broker.clock.advance(10)
    await retry_topics.write([dead_letter(record(offset), 2) for offset in range(100, 150)])
    pump.on_records(TopicPartition("g.retry.10s", 0), 1, broker.logs["g.retry.10s"])
    await broker.clock.advance(60)
    assert broker.dead_letters == []
    broker.response = lambda record: ACK
    await broker.clock.advance(60)
    assert pump.numbers()["delivered"] >= 50
    assert broker.dead_letters == []
    await live.stop()
    await pump.stop()


async def test_a_skip_by_policy_unblocks_the_key_and_a_second_copy_is_not_delivered() -> None:
    """A second copy in the retry topic is not delivered."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True, statuses={"409": "skip"})
    skipped = Reply("HTTP 409", "", 409)
    broker.response = lambda record: skipped
    await retry_topics.write([dead_letter(record(1), 2)])
    await retry_topics.write([dead_letter(record(1), 2)])
    destination = RetryTopicDestination(broker, retry_topics)
    first, second = broker.logs["g.retry.10s"]
    assert await destination.deliver(delivery(first)) == [skipped]
    assert not broker.blocked.of(record(1))
    assert await destination.deliver(delivery(second)) == [HANDED_OFF]
    assert len(broker.delivered) == 1


async def test_nothing_is_delivered_while_blocked_keys_cannot_be_read_or_written() -> None:
    """Nothing is completed either."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)

    def unavailable() -> int:
        raise KafkaUnavailable("no broker")

    table = memory_table("blocked", RAW_BYTES, broker.produce, unavailable)
    blind = BlockedKeys(table)
    table.read([Record("blocked", 0, 0, 0, b'{"of":"another version"}', b"waits")], 1)
    assert [*blind.entries()] == [], "it ends no process"
    with pytest.raises(DestinationUnavailable, match="failed to read the table of blocked keys: no broker"):
        await KeyOrder(broker, blind, retry_topics.write).deliver(delivery(record(1)))
    broker.refuses = "blocked"
    with pytest.raises(DeadLetterFailed, match="failed to write blocked keys: no broker"):
        await retry_topics.write([dead_letter(record(1), 2)])
    assert (broker.delivered, broker.logs) == ([], {})


@pytest.mark.parametrize("later", [0, 3])
async def test_what_waits_is_delivered_though_the_topic_of_blocked_keys_was_created_again(later: int) -> None:
    """Its entry is gone; the new topic may already be longer than its offset."""
    broker = Broker()
    for topic_id in ("first", "second"):
        retry_topics = broker.topics(keep_key_order=True)
        assert broker.table
        broker.table._position.topic_id = topic_id
        if topic_id == "first":
            await retry_topics.write([dead_letter(record(1), 2)])
            (copy,) = broker.logs["g.retry.10s"]
            broker.logs["blocked"].clear()
    await broker.blocked.block([record(offset, b"other") for offset in range(7, 7 + later)])
    assert await RetryTopicDestination(broker, retry_topics).deliver(delivery(copy)) == [ACK]
    assert len(broker.blocked._keys) == min(later, 1)
