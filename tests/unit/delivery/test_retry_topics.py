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
        self.letters: list[DeadLetter] = []
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

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        if self.refuses == "dead":
            raise DeadLetterFailed("no room", missing=[0])
        self.letters += letters

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        if self.away:
            raise DestinationUnavailable("away")
        self.delivered.append(delivery)
        return [self.response(record) for record in delivery.records]

    def end(self) -> int:
        return len(self.logs.get("blocked", ()))

    def topics(self, *, letters: bool = True, clock: ManualClock | None = None, **retry: Any) -> RetryTopics:
        keeps = retry.get("keep_key_order", False)
        if keeps:
            self.table = memory_table("blocked", RAW_BYTES, self.produce, self.end)
            self.blocked = BlockedKeys(self.table)
        return RetryTopics(
            "g",
            RetryConfig.model_validate({"attempts": 2, "topics": [10], **retry}),
            self.produce,
            clock or self.clock,
            dead_letters=self if letters else None,
            blocked=self.blocked if keeps else None,
        )


def record(offset: int, key: bytes | None = b"k") -> Record:
    return Record("t", 3, offset, 42, key, b"v", lambda: OWN, 2)


def letter(of: Record, attempts: int, outcome: Reply = RETRY, first: float = 5.0) -> DeadLetter:
    return DeadLetter(of, "g", attempts, outcome, first, first + 1)


def delivery(*records: Record, attempt: int = 1) -> Delivery:
    return Delivery("g.retry", records[0].topic_partition, 1, records, attempt)


async def test_a_record_goes_from_retry_topic_to_retry_topic_and_then_to_the_dead_letters() -> None:
    """Its history goes on from the origin; its own headers stay, even one that looks like ours."""
    broker = Broker()
    retry_topics = broker.topics(clock=ManualClock(100.0), topics=[10, 60])
    await retry_topics.write([letter(record(8), 2)])
    await retry_topics.write([letter(broker.logs["g.retry.10s"][0], 3)])
    (copy,) = broker.logs["g.retry.60s"]
    assert delayed_of(copy)[1:5] == (3, 5.0, 160.0, None)
    assert len(await retry_topics.write([letter(copy, 4)._replace(group="g.retry")])) == 0
    (dead,) = broker.letters
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
async def test_what_would_not_get_better_waits_in_no_retry_topic(settings: dict[str, Any], outcome: Reply) -> None:
    """Failed for good, by the destination's word or the policy's, or due after its deadline."""
    broker = Broker()
    retry_topics = broker.topics(clock=ManualClock(100.0), **settings)
    assert len(await retry_topics.write([letter(record(8), 1, outcome)])) == 0
    assert (len(broker.letters), broker.logs) == (1, {})


@pytest.mark.parametrize(("refused", "letters", "copies"), [("dead", 0, 1), ("g.retry.10s", 1, 0)])
async def test_an_outage_of_one_topic_writes_no_copies_into_the_other(refused: str, letters: int, copies: int) -> None:
    """One record of the delivery waits for the topic that is away; the other is in its topic once."""
    broker = Broker()
    retry_topics = broker.topics(attempts=1)
    pump, _ = pump_of(broker, retry_topics, max_records=2)
    broker.refuses = refused
    broker.response = lambda record: Reply("E", permanent=True) if record.offset == 1 else RETRY
    await pump.start()
    pump.on_assigned({P3: 1}, {})
    pump.on_records(P3, 1, [record(1), record(2)])
    await broker.clock.advance(3600)
    assert (len(broker.letters), len(broker.logs.get("g.retry.10s", ()))) == (letters, copies)
    assert (pump.numbers()["dead_letters"], pump.numbers()["delayed"]) == (letters, copies)
    broker.refuses = ""
    await broker.clock.advance(60)
    assert [dead.record.offset for dead in broker.letters] == [1]
    assert [delayed_of(copy).origin.offset for copy in broker.logs["g.retry.10s"]] == [2]
    assert (pump.numbers()["dead_letters"], pump.numbers()["delayed"]) == (1, 1)
    await pump.stop()


@pytest.mark.parametrize("keep_key_order", [False, True])
async def test_a_record_too_large_for_its_retry_topic_is_a_dead_letter_and_others_wait_once(
    keep_key_order: bool,
) -> None:
    """A retry topic may take less than a topic that is read; the partition goes on and no key stays blocked."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=keep_key_order)
    broker.too_large = b"large"
    large = Record("t", 3, 1, 42, b"large", b"v")
    assert await retry_topics.write([letter(large, 2), letter(record(2), 2)]) == [1]
    assert [dead.record.offset for dead in broker.letters] == [1]
    assert [delayed_of(copy).origin.offset for copy in broker.logs["g.retry.10s"]] == [2]
    assert not retry_topics.blocked or not retry_topics.blocked.of(large)


async def test_a_record_too_large_to_go_behind_its_key_waits_where_it_is() -> None:
    """It was never delivered, so it is no dead letter; it is delivered once its key is free."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)
    order = KeyOrder(broker, broker.blocked, retry_topics.write)
    await retry_topics.write([letter(record(1), 2)])
    broker.too_large = b"k"
    with pytest.raises(DeadLetterFailed):
        await order.deliver(delivery(record(2)))
    assert (broker.letters, broker.delivered, dict(broker.blocked.of(record(2)))) == ([], [], {1: 0})
    await broker.blocked.unblock(record(1))
    assert await order.deliver(delivery(record(2))) == [ACK]


async def test_a_policy_for_an_error_of_the_same_name_buries_no_record_that_waits_for_its_key() -> None:
    """It has not failed, so the policy has nothing to say of it."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True, errors={"Blocked": "dead_letter"})
    await broker.blocked.block([record(8)])
    await KeyOrder(broker, broker.blocked, retry_topics.write).deliver(delivery(record(9)))
    assert (len(broker.logs["g.retry.10s"]), broker.letters) == (1, [])


async def test_a_record_that_cannot_go_behind_its_key_holds_no_other() -> None:
    """The retry topic cannot be written: what is free is delivered, once, and the destination is not blamed."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)
    pump, _ = pump_of(broker, retry_topics, max_records=2)
    await retry_topics.write([letter(record(1), 2)])
    broker.refuses = "g.retry.10s"
    await pump.start()
    pump.on_assigned({P3: 1}, {})
    pump.on_records(P3, 1, [record(2), record(3, b"other")])
    await broker.clock.advance(60)
    assert [r.offset for d in broker.delivered for r in d.records] == [3]
    assert pump.breaker.status.state == "closed"
    broker.refuses = ""
    await broker.clock.advance(60)
    assert not pump.lanes[P3].tracker.has_open
    await pump.stop()


@pytest.mark.parametrize("outcome", [ACK, RETRY])
async def test_a_record_whose_key_cannot_be_unblocked_yet_is_delivered_and_buried_once(outcome: Reply) -> None:
    """The topic of blocked keys cannot be written: only that is repeated."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)
    _, pump = pump_of(broker, retry_topics)
    broker.response = lambda record: outcome
    await retry_topics.write([letter(record(1), 2)])
    broker.refuses = "blocked"
    await pump.start()
    place = TopicPartition("g.retry.10s", 0)
    pump.on_assigned({place: 1}, {})
    pump.on_records(place, 1, broker.logs["g.retry.10s"])
    await broker.clock.advance(600)
    assert (len(broker.delivered), len(broker.letters)) == (1, int(outcome is RETRY))
    broker.refuses = ""
    await broker.clock.advance(60)
    assert (len(broker.delivered), len(broker.letters)) == (1, int(outcome is RETRY))
    assert not retry_topics.blocked or not retry_topics.blocked.of(record(1))
    assert not pump.lanes[place].tracker.has_open
    await pump.stop()


async def test_without_dead_letters_the_last_retry_topic_says_what_to_do() -> None:
    """The partition of the retry topic stands still."""
    broker = Broker()
    retry_topics = broker.topics(letters=False)
    await retry_topics.write([letter(record(8), 2)])
    with pytest.raises(DeadLetterFailed, match=r"offset 8 of t-3 failed 3 times \(E\) and dead letters are off"):
        await retry_topics.write([letter(broker.logs["g.retry.10s"][0], 3)])


@pytest.mark.parametrize("headers", [[], [("headrace.retry.due", b"x")], None])
async def test_what_somebody_else_wrote_into_a_retry_topic_is_what_it_is(headers: list[Header] | None) -> None:
    """It is delivered at once, under its own name; so is one whose history cannot be read."""
    broker = Broker()
    retry_topics = broker.topics()
    await retry_topics.write([letter(record(8), 2)])
    garbled = [(name, b"?") for name, _ in broker.logs["g.retry.10s"][0].headers]
    other = Record("g.retry.10s", 0, 5, 0, None, None, lambda: garbled if headers is None else headers)
    assert delayed_of(other) == DelayedRecord(other)
    assert await RetryTopicDestination(broker, retry_topics).deliver(delivery(other)) == [ACK]
    assert broker.delivered[0].records == [other]


def pump_of(broker: Broker, retry_topics: RetryTopics, max_records: int = 1) -> tuple[Pump, Pump]:
    """Return the pump of the consumer, and that of its retry topics."""
    config = DeliveryConfig(ordering="none", batch=BatchConfig(max_records=max_records), retry=retry_topics.retry)
    live = KeyOrder(broker, retry_topics.blocked, retry_topics.write) if retry_topics.blocked else broker
    beside = Pump("p", "g", live, retry_topics, delivery=config, clock=broker.clock, chance=Random(1))
    destination = RetryTopicDestination(broker, retry_topics, beside.epoch_of)
    retries = Pump(
        "r",
        "g.retry",
        destination,
        retry_topics,
        delivery=config,
        clock=broker.clock,
        chance=Random(1),
        shares_with=beside,
        hooks=PumpHooks(delayed=retry_topics.delayed),
    )
    return beside, retries


async def test_what_comes_from_a_retry_topic_carries_the_live_epoch_of_its_origin() -> None:
    """The epochs of the retry topic's own assignment cannot be compared with it; without a live one there is none."""
    broker = Broker()
    retry_topics = broker.topics()
    await retry_topics.write([letter(record(8), 2)])
    live, _ = pump_of(broker, retry_topics)
    retries = RetryTopicDestination(broker, retry_topics, live.epoch_of)
    (copy,) = broker.logs["g.retry.10s"]
    live.on_assigned({P3: 90}, {})
    await retries.deliver(delivery(copy))
    live.on_lost([P3])
    await retries.deliver(delivery(copy))
    assert [delivered.epoch for delivered in broker.delivered] == [90, 0]


async def test_a_writer_whose_clock_is_ahead_holds_nobody_longer_than_the_delay() -> None:
    """What it wrote, and what lies behind that, is delivered one delay after this process saw it."""
    broker = Broker()
    retry_topics, ahead = broker.topics(), broker.topics(clock=ManualClock(1_003_600.0))
    _, pump = pump_of(broker, retry_topics)
    await pump.start()
    place = TopicPartition("g.retry.10s", 0)
    pump.on_assigned({place: 1}, {})
    await ahead.write([letter(record(1), 2)])
    await retry_topics.write([letter(record(2), 2)])
    await ahead.write([letter(record(3), 2)])
    pump.on_records(place, 1, broker.logs["g.retry.10s"])
    await broker.clock.advance(9.9)
    assert broker.delivered == []
    assert pump.lanes[place].condition.reason == "offset 0 is due at 1970-01-12 13:46:50 UTC"
    await broker.clock.advance(0.2)
    assert [(d.group, d.attempt, d.records[0].offset) for d in broker.delivered] == [("g", 3, o) for o in (1, 2, 3)]
    await pump.stop()


async def test_keys_wait_in_memory_up_to_a_bound_and_the_others_wait_where_they_are() -> None:
    """Every process keeps every blocked key, so more of them are not written."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)
    broker.blocked._most_records = 2
    await retry_topics.write([letter(record(1), 2), letter(record(2), 2)])
    with pytest.raises(DeadLetterFailed, match="2 records wait in the retry topic with blocked keys, and that"):
        await retry_topics.write([letter(record(3), 2)])
    await retry_topics.write([letter(record(2), 2)])
    await retry_topics.end(broker.logs["g.retry.10s"][0])
    assert await retry_topics.write([letter(record(3), 2)]) == [0]


async def test_nothing_but_bad_records_in_a_retry_topic_end_as_dead_letters() -> None:
    """They were doubted where they failed first; a retry topic without a success would otherwise hold them for ever."""
    broker = Broker()
    retry_topics = broker.topics()
    _, pump = pump_of(broker, retry_topics)
    broker.response = lambda record: RETRY
    await pump.start()
    place = TopicPartition("g.retry.10s", 0)
    pump.on_assigned({place: 1}, {})
    await retry_topics.write([letter(record(offset), 2) for offset in range(50)])
    pump.on_records(place, 1, broker.logs["g.retry.10s"])
    await broker.clock.advance(30)
    assert (len(broker.letters), pump.numbers()["dead_letters"]) == (50, 50)
    await pump.stop()


async def test_a_destination_that_is_doubted_gets_nothing_from_the_retry_topics() -> None:
    """Consumer and retry topics share a breaker, so a bad deploy does not empty them into dead letters."""
    broker = Broker()
    retry_topics = broker.topics()
    beside, pump = pump_of(broker, retry_topics)
    broker.response = lambda record: RETRY
    for each, place in ((beside, TopicPartition("t", 3)), (pump, TopicPartition("g.retry.10s", 0))):
        await each.start()
        each.on_assigned({place: 1}, {})
    beside.on_records(TopicPartition("t", 3), 1, [record(offset) for offset in range(50)])
    await broker.clock.advance(10)
    await retry_topics.write([letter(record(offset), 2) for offset in range(100, 150)])
    pump.on_records(TopicPartition("g.retry.10s", 0), 1, broker.logs["g.retry.10s"])
    await broker.clock.advance(60)
    assert broker.letters == []
    broker.response = lambda record: ACK
    await broker.clock.advance(60)
    assert pump.numbers()["delivered"] >= 50
    assert broker.letters == []
    await beside.stop()
    await pump.stop()


async def test_a_key_is_free_once_its_record_is_skipped_by_policy_and_a_copy_is_known_as_one() -> None:
    """A second copy in the retry topic is not delivered."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True, statuses={"409": "skip"})
    skipped = Reply("HTTP 409", "", 409)
    broker.response = lambda record: skipped
    await retry_topics.write([letter(record(1), 2)])
    await retry_topics.write([letter(record(1), 2)])
    destination = RetryTopicDestination(broker, retry_topics)
    first, second = broker.logs["g.retry.10s"]
    assert await destination.deliver(delivery(first)) == [skipped]
    assert not broker.blocked.of(record(1))
    assert await destination.deliver(delivery(second)) == [HANDED_OFF]
    assert len(broker.delivered) == 1


async def test_parked_keys_that_cannot_be_read_or_written_hold_the_delivery() -> None:
    """Nothing is delivered on a guess, and nothing ends."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)

    def unavailable() -> int:
        raise KafkaUnavailable("no broker")

    table = memory_table("blocked", RAW_BYTES, broker.produce, unavailable)
    blind = BlockedKeys(table)
    table.read([Record("blocked", 0, 0, 0, b'{"of":"another version"}', b"waits")], 1)
    assert [*blind.entries()] == [], "it ends no process"
    with pytest.raises(DestinationUnavailable, match="the table of blocked keys is not read: no broker"):
        await KeyOrder(broker, blind, retry_topics.write).deliver(delivery(record(1)))
    broker.refuses = "blocked"
    with pytest.raises(DeadLetterFailed, match="blocked keys are not written: no broker"):
        await retry_topics.write([letter(record(1), 2)])
    assert (broker.delivered, broker.logs) == ([], {})


async def test_blocked_keys_are_read_to_their_end_once_in_each_assignment() -> None:
    """Another process may have had the partition meanwhile."""
    asked: list[int] = []

    def end() -> int:
        asked.append(0)
        return 0

    blocked = BlockedKeys(memory_table("blocked", RAW_BYTES, Broker().produce, end))
    for epoch in (1, 1, 2):
        await blocked.catch_up(delivery(record(1))._replace(epoch=epoch))
    assert len(asked) == 2


async def test_a_record_below_one_that_waits_has_ended_unless_it_waits_itself() -> None:
    """After a crash it comes again; delivered now, it would come after the one that waits."""
    broker = Broker()
    retry_topics = broker.topics(keep_key_order=True)
    order = KeyOrder(broker, broker.blocked, retry_topics.write)
    await retry_topics.write([letter(record(1), 2)])
    await order.deliver(delivery(record(2)))
    await broker.blocked.unblock(record(1))
    assert await order.deliver(delivery(record(1))) == [HANDED_OFF]
    assert await order.deliver(delivery(record(2))) == [HANDED_OFF]
    assert broker.delivered == []
    assert [delayed_of(entry).origin.offset for entry in broker.logs["g.retry.10s"]] == [1, 2, 2]
    assert [delayed_of(entry).entry for entry in broker.logs["g.retry.10s"]] == [0, 1, 1]


@pytest.mark.parametrize("later", [0, 3])
async def test_what_waits_is_delivered_though_the_topic_of_blocked_keys_was_created_again(later: int) -> None:
    """Its entry is gone; the new topic may have grown past its offset or not."""
    broker = Broker()
    for topic_id in ("first", "second"):
        retry_topics = broker.topics(keep_key_order=True)
        assert broker.table
        broker.table._position.topic_id = topic_id
        if topic_id == "first":
            await retry_topics.write([letter(record(1), 2)])
            (copy,) = broker.logs["g.retry.10s"]
            broker.logs["blocked"].clear()
    await broker.blocked.block([record(offset, b"other") for offset in range(7, 7 + later)])
    assert await RetryTopicDestination(broker, retry_topics).deliver(delivery(copy)) == [ACK]
    assert len(broker.blocked._keys) == min(later, 1)
