"""The kafka room against a real broker."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    ResourceType,
)

from headrace import errors
from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.control.health.lag import lag_of
from headrace.delivery.offset_map import SPAN_OFFSETS, encode
from headrace.kafka import Admin, Consumer, Producer, ReadPolicy, TopicDirectory, read_records
from headrace.kafka.client.properties import client_properties
from headrace.records import Committed, OutgoingRecord, Produced, Record, TopicPartition
from headrace.runtime import Deadline, SystemClock
from headrace.testing.secured import kafka_settings
from tests.raw_server import until

CLOCK = SystemClock()


def config(kafka: Any, **settings: Any) -> KafkaConfig:
    return kafka_settings(kafka.bootstrap_servers, **{"request_timeout_seconds": 60, **settings})


class Collector:
    """A listener that ends every record at once, and commits when told."""

    def __init__(self) -> None:
        self.consumer: Consumer | None = None
        self.records: list[Record] = []
        self.assigned: dict[TopicPartition, int] = {}
        self.revoked: list[TopicPartition] = []
        self.ends: dict[TopicPartition, int] = {}
        self.committed: dict[TopicPartition, Committed] = {}
        self.gaps: dict[TopicPartition, int] = {}
        self.hold = False

    def on_gap(self, partition: TopicPartition, offsets: int) -> None:
        self.gaps[partition] = offsets

    def on_assigned(
        self, partitions: Mapping[TopicPartition, int], committed: Mapping[TopicPartition, Committed]
    ) -> None:
        self.assigned.update(partitions)
        self.committed.update(committed)

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        assert self.assigned[partition] == epoch
        self.records += records
        if self.consumer and not self.hold:
            self.consumer.release(partition, len(records), sum(r.size_bytes for r in records))

    def on_end(self, partition: TopicPartition, epoch: int, position: int) -> None:
        self.ends[partition] = position

    async def on_revoked(
        self, partitions: Sequence[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, Committed]:
        self.revoked += partitions
        offsets = {}
        for partition in partitions:
            self.assigned.pop(partition)
            own = [r.offset for r in self.records if r.topic_partition == partition]
            if own:
                offsets[partition] = Committed(max(own) + 1)
        return offsets

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        assert self.consumer, "lost"
        assert self.consumer.readiness().ready, "lost"


def consumer_of(kafka: KafkaConfig, topic: str, group: str, **options: Any) -> tuple[Consumer, Collector]:
    collector = Collector()
    options.setdefault("flow", FlowControl())
    consumer = Consumer(
        Admin(kafka), name=group, group=group, topics=[topic], listener=collector, clock=CLOCK, **options
    )
    collector.consumer = consumer
    return consumer, collector


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def fill(kafka: KafkaConfig, topic: str, count: int, **fields: Any) -> list[Any]:
    producer = Producer(kafka, ProducerConfig())
    await producer.start()
    records = [OutgoingRecord(topic, str(n).encode(), f"v{n}".encode(), **fields) for n in range(count)]
    results = await producer.produce(records)
    await producer.stop()
    assert not [result for result in results if isinstance(result, Exception)]
    return results


async def test_what_is_acknowledged_is_there(kafka: Any, topic: Callable[..., str]) -> None:
    """Results come in request order, and a reader finds each record at its offset with key, value, headers, time."""
    where, name = config(kafka), topic(3)
    results = await fill(where, name, 500, headers=[("h", b"1"), ("h", None)], timestamp_ms=1234)
    assert all(isinstance(result, Produced) for result in results)
    offsets = await Admin(where).topic_offsets(name)
    found = {}
    async for batch in read_records(
        where, {p: start for p, (start, _) in offsets.items()}, {p: end for p, (_, end) in offsets.items()}
    ):
        for record in batch:
            found[Produced(record.partition, record.offset)] = record
    assert len(found) == 500
    for n, result in enumerate(results):
        record = found[result]
        assert (record.key, record.value) == (str(n).encode(), f"v{n}".encode())
        assert (record.headers, record.timestamp_ms) == ([("h", b"1"), ("h", None)], 1234)


async def test_one_record_that_is_too_large_fails_alone(kafka: Any, topic: Callable[..., str]) -> None:
    """The neighbours are written, and the error says which limit."""
    where, name = config(kafka), topic()
    producer = Producer(where, ProducerConfig())
    await producer.start()
    big, small = OutgoingRecord(name, None, b"x" * 2_000_000), OutgoingRecord(name, None, None)
    results = await producer.produce([small, big, small])
    assert isinstance(results[1], errors.RecordTooLarge)
    assert [isinstance(results[n], Produced) for n in (0, 2)] == [True, True]
    assert producer.pending_bytes == 0
    await producer.stop()


async def test_records_that_fit_the_topic_are_written_whatever_their_batch(
    kafka: Any, topic: Callable[..., str]
) -> None:
    """Kafka holds a batch against the topic's limit: only a record that is too large itself fails."""
    where, small, usual = config(kafka), topic(1, max_message_bytes=100_000), topic()
    producer = Producer(where, ProducerConfig())
    await producer.start()
    half, tiny = OutgoingRecord(small, None, b"x" * 50_000), OutgoingRecord(small, None, b"1")
    large, other = OutgoingRecord(small, None, b"x" * 200_000), OutgoingRecord(usual, None, b"x" * 200_000)
    assert await producer.produce([half] * 3) == [Produced(0, n) for n in range(3)]
    first, refused, last, beside = await producer.produce([tiny, large, tiny, other])
    assert (first, last, beside) == (Produced(0, 3), Produced(0, 4), Produced(0, 0))
    assert isinstance(refused, errors.RecordTooLarge)
    many = [OutgoingRecord(small, None, b"%d" % n + b"x" * 9000) for n in range(200)]
    results = await asyncio.gather(*(producer.produce(many[n : n + 20]) for n in range(0, 200, 20)))
    assert [one for part in results for one in part] == [Produced(0, n) for n in range(5, 205)]
    assert producer.pending_bytes == 0
    await producer.drain(Deadline(CLOCK, 60))
    await producer.stop()


@pytest.mark.parametrize("bad", [{30}, {*range(0, 500, 7)}], ids=len)
@pytest.mark.parametrize("settings", [{"cleanup_policy": "compact"}, {"message_timestamp_before_max_ms": 60_000}])
async def test_a_record_that_a_topic_refuses_fails_alone(
    kafka: Any, topic: Callable[..., str], settings: dict[str, Any], bad: set[int]
) -> None:
    """Whatever the client says of its batch, and though a later batch is taken: the others stand in their order."""
    name, producer = topic(1, **settings), Producer(config(kafka), ProducerConfig())
    await producer.start()
    is_old = "cleanup_policy" not in settings
    records = [
        OutgoingRecord(name, None if n in bad and not is_old else b"k", b"v", None, 0, int(n in bad and is_old))
        for n in range(500)
    ]
    results = await producer.produce(records, in_order=True)
    assert {index for index, result in enumerate(results) if isinstance(result, errors.RecordRefused)} == bad
    written = [result.offset for result in results if isinstance(result, Produced)]
    assert written == sorted(written)
    assert len(written) == 500 - len(bad)
    await producer.stop()


async def test_a_limit_that_is_lowered_later_costs_nobody_anything(kafka: Any, topic: Callable[..., str]) -> None:
    """A batch that is too large now is written record by record."""
    where, name = config(kafka), topic()
    producer = Producer(where, ProducerConfig())
    await producer.start()
    records = [OutgoingRecord(name, None, b"x" * 50_000)] * 5
    resource = ConfigResource(ResourceType.TOPIC, name)
    resource.add_incremental_config(
        ConfigEntry("max.message.bytes", "100000", incremental_operation=AlterConfigOpType.SET)
    )
    client = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    assert await producer.produce(records) == [Produced(0, n) for n in range(5)]
    client.incremental_alter_configs([resource])[resource].result(60)
    end, first = time.monotonic() + 120, 5
    while producer._alone is None:  # brokers take a changed limit up a moment later
        assert time.monotonic() < end
        assert await producer.produce(records) == [Produced(0, first + n) for n in range(5)]
        first += 5
    await producer.stop()


async def test_the_byte_budget_refuses_at_once_and_recovers(kafka: Any, topic: Callable[..., str]) -> None:
    """A second request over the budget is refused whole; after the first ended it passes."""
    where, name = config(kafka), topic()
    producer = Producer(where, ProducerConfig(max_pending_bytes=10_000, properties={"linger.ms": 50}))
    await producer.start()
    record = OutgoingRecord(name, None, b"x" * 8000)
    first = asyncio.ensure_future(producer.produce([record]))
    await asyncio.sleep(0)
    with pytest.raises(errors.ProducerQueueFull, match="max_pending_bytes"):
        await producer.produce([record])
    assert isinstance((await first)[0], Produced)
    assert isinstance((await producer.produce([record]))[0], Produced)
    await producer.stop()


async def test_without_a_broker_the_outcome_is_unknown_after_the_delivery_timeout() -> None:
    """No call waits for ever, and nothing claims to have failed for certain."""
    nowhere = KafkaConfig(bootstrap_servers="127.0.0.1:1", request_timeout_seconds=0.5)
    producer = Producer(nowhere, ProducerConfig(properties={"delivery.timeout.ms": 500}))
    await producer.start()
    results = await asyncio.wait_for(producer.produce([OutgoingRecord("t", None, b"v")]), 120)
    assert isinstance(results[0], errors.KafkaTimeout | errors.KafkaUnavailable)
    with pytest.raises(errors.KafkaUnavailable, match="headrace dev up"):
        await Admin(nowhere).list_topics()
    await producer.stop()


async def test_topics_are_created_described_and_missing_ones_named(kafka: Any, topic: Callable[..., str]) -> None:
    """Creating twice is harmless; a topic that is not there says how to make it."""
    admin, name = Admin(config(kafka)), topic(2, retention_ms=60000)
    assert not await admin.create_topic(name, 2)
    info = await admin.describe_topic(name)
    assert ([p.partition for p in info.partitions], info.replication_factor) == ([0, 1], 1)
    assert (await admin.topic_configs(name))["retention.ms"] == "60000"
    await admin.ensure_topic_like(f"{name}.dlq", name)
    assert len((await admin.describe_topic(f"{name}.dlq")).partitions) == 2
    with pytest.raises(errors.TopicNotFound, match=f"headrace topics create {name}-x"):
        await admin.describe_topic(f"{name}-x")


async def test_the_directory_finds_new_topics_and_refuses_missing_ones_fast(
    kafka: Any, topic: Callable[..., str]
) -> None:
    """A topic that does not exist is refused, and found once it does."""
    admin, name = Admin(config(kafka)), topic()
    directory = TopicDirectory(admin, CLOCK)
    await directory.start()
    assert await directory.partitions_of(name) == 1
    with pytest.raises(errors.TopicNotFound):
        await directory.partitions_of(f"{name}-late")
    await admin.create_topic(f"{name}-late", 4)
    found = []

    async def look() -> None:
        while not found:
            try:
                found.append(await directory.partitions_of(f"{name}-late"))
            except errors.TopicNotFound:
                await asyncio.sleep(0.05)

    await asyncio.wait_for(look(), 120)
    assert found == [4]
    await until(lambda: directory.readiness().ready)
    await directory.stop()


async def test_a_group_takes_up_where_it_committed(kafka: Any, topic: Callable[..., str]) -> None:
    """A second member life gets only what was not committed; lag is exact."""
    where, name = config(kafka), topic(2)
    await fill(where, name, 100)
    consumer, collector = consumer_of(where, name, f"{name}-g")
    await consumer.start()
    await until(lambda: len(collector.records) == 100 and len(collector.ends) == 2)
    await consumer.drain(Deadline(CLOCK, 100))
    await consumer.stop()
    assert sorted(collector.revoked) == [TopicPartition(name, 0), TopicPartition(name, 1)]
    assert [lag.lag for lag in await lag_of(Admin(where), f"{name}-g")] == [0, 0]
    await fill(where, name, 10)
    again, second = consumer_of(where, name, f"{name}-g")
    await again.start()
    await until(lambda: len(second.records) == 10)
    await again.stop()


async def test_what_lies_beside_a_committed_offset_comes_back(kafka: Any, topic: Callable[..., str]) -> None:
    """The longest offset map that there can be is taken by the broker, and the next owner gets it on assignment."""
    where, name = config(kafka), topic()
    chance, place = random.Random(1), TopicPartition(name, 0)
    text = encode(0, SPAN_OFFSETS, sorted(chance.sample(range(SPAN_OFFSETS - 1), SPAN_OFFSETS // 2)))
    assert len(text) > 4000
    first, collector = consumer_of(where, name, f"{name}-g")
    await first.start()
    await until(lambda: place in collector.assigned)
    first.commit({place: Committed(0, text)})
    admin = Admin(where)
    await until(lambda: admin.committed(f"{name}-g"))
    await first.drain(Deadline(CLOCK, 100))
    second, after = consumer_of(where, name, f"{name}-g")
    await second.start()
    await until(lambda: place in after.assigned)
    assert after.committed == {place: Committed(0, text)}
    await second.drain(Deadline(CLOCK, 100))


async def test_flow_control_bounds_what_is_held(kafka: Any, topic: Callable[..., str]) -> None:
    """A listener that ends nothing gets no more than the budget and one poll; releasing lets the rest come."""
    where, name = config(kafka), topic()
    await fill(where, name, 5000)
    consumer, collector = consumer_of(where, name, f"{name}-g", flow=FlowControl(max_records=1000))
    collector.hold = True
    await consumer.start()
    await until(lambda: len(collector.records) >= 1000)
    held = len(collector.records)
    assert held <= 2000
    collector.hold = False
    consumer.release(TopicPartition(name, 0), held, sum(r.size_bytes for r in collector.records))
    await until(lambda: len(collector.records) == 5000)
    assert [r.offset for r in collector.records] == list(range(5000))
    await consumer.stop()


async def test_two_members_share_and_hand_over(kafka: Any, topic: Callable[..., str]) -> None:
    """A second member takes over some partitions without stopping the first; each record goes to one of them."""
    where, name = config(kafka), topic(4)
    first, one = consumer_of(where, name, f"{name}-g")
    await first.start()
    await until(lambda: len(one.assigned) == 4)
    second, two = consumer_of(where, name, f"{name}-g")
    await second.start()
    await until(lambda: len(one.assigned) == 2 and len(two.assigned) == 2)
    assert len(one.revoked) == 2
    await fill(where, name, 200)
    await until(lambda: len(one.records) + len(two.records) == 200)
    assert not {r.topic_partition for r in one.records} & {r.topic_partition for r in two.records}
    await first.stop()
    await until(lambda: len(two.assigned) == 4)
    await second.stop()


async def removed_below(kafka: KafkaConfig, place: TopicPartition, offset: int) -> None:
    """Let the log start at an offset, as retention does."""
    admin = AdminClient(client_properties(kafka, "test"))
    wanted = confluent_kafka.TopicPartition(*place, offset)
    for future in admin.delete_records([wanted]).values():
        await asyncio.to_thread(future.result)


@pytest.mark.parametrize(
    ("committed", "missing"),
    [
        (2, r"offsets 2 to 5 \(4\) are no longer in the log: removed"),
        (1000, r"offsets 10 to 999 \(990\) .* the log ends"),
    ],
)
async def test_a_gap_stands_still_and_says_exactly_what_is_missing(
    kafka: Any, topic: Callable[..., str], committed: int, missing: str
) -> None:
    """Nothing is reset silently; another partition goes on."""
    where, name = config(kafka), topic(2)
    await fill(where, name, 10, partition=0)
    await fill(where, name, 10, partition=1)
    admin, place = Admin(where), TopicPartition(name, 0)
    await removed_below(where, place, 6)
    await admin.alter_group_offsets(f"{name}-g", {place: committed})
    consumer, collector = consumer_of(where, name, f"{name}-g")
    await consumer.start()
    await until(lambda: re.search(missing, consumer.readiness().reason) is not None)
    await until(lambda: len(collector.records) == 10)
    assert {r.partition for r in collector.records} == {1}
    await consumer.stop()
    assert (await admin.committed(f"{name}-g"))[place] == committed
    assert collector.gaps == {}


@pytest.mark.parametrize(("committed", "count"), [(2, 4), (1000, 990)])
def test_a_gap_is_passed_when_the_policy_says_so(
    kafka: Any, topic: Callable[..., str], caplog: pytest.LogCaptureFixture, committed: int, count: int
) -> None:
    """It goes on at the start of the log, counts what is missing and writes it in the log."""

    async def test() -> None:
        where, name = config(kafka), topic()
        await fill(where, name, 10)
        admin, place = Admin(where), TopicPartition(name, 0)
        await removed_below(where, place, 6)
        await admin.alter_group_offsets(f"{name}-g", {place: committed})
        consumer, collector = consumer_of(where, name, f"{name}-g", policy=ReadPolicy(on_gap="continue"))
        await consumer.start()
        await until(lambda: len(collector.records) == 4)
        assert collector.gaps == {place: count}
        assert [r.offset for r in collector.records] == [6, 7, 8, 9]
        await consumer.drain(Deadline(CLOCK, 100))
        assert await admin.committed(f"{name}-g") == {place: 10}

    run(test)
    assert f"({count}) are no longer in the log" in caplog.text


async def test_a_group_that_begins_at_the_end_skips_nothing_after_its_first_moment(
    kafka: Any, topic: Callable[..., str]
) -> None:
    """The end is written down when it is chosen, and partitions that are added begin at their start (row B9)."""
    where, name = config(kafka, properties={"topic.metadata.refresh.interval.ms": 500}), topic()
    await fill(where, name, 5)
    admin, latest = Admin(where), ReadPolicy(reset="latest")
    consumer, _ = consumer_of(where, name, f"{name}-g", policy=latest)
    await consumer.start()
    await until(lambda: admin.committed(f"{name}-g"))
    await consumer.stop()
    assert await admin.committed(f"{name}-g") == {TopicPartition(name, 0): 5}
    await asyncio.to_thread(add_partitions, where, name, 2)

    async def added() -> bool:
        return len((await admin.describe_topic(name)).partitions) == 2

    await until(added)
    await fill(where, name, 3, partition=0)
    await fill(where, name, 4, partition=1)
    again, collector = consumer_of(where, name, f"{name}-g", policy=latest)
    await again.start()
    await until(lambda: len(collector.records) == 7)
    await again.stop()


def add_partitions(kafka: KafkaConfig, topic: str, count: int) -> None:
    admin = AdminClient(client_properties(kafka, "test"))
    for future in admin.create_partitions([NewPartitions(topic, count)]).values():
        future.result()


async def test_a_listener_that_fails_ends_its_consumer_and_nothing_more_is_believed(
    kafka: Any, topic: Callable[..., str]
) -> None:
    """What the listener missed must not be passed by what comes after it: the consumer is dead and commits nothing."""
    where, name = config(kafka), topic()
    await fill(where, name, 10)
    consumer, collector = consumer_of(where, name, f"{name}-g")
    handed: list[int] = []

    def fail(partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        handed.extend(r.offset for r in records)
        raise ZeroDivisionError

    collector.on_records = fail  # type: ignore[method-assign]
    await consumer.start()
    await until(lambda: isinstance(consumer.death, ZeroDivisionError))
    await fill(where, name, 10)
    await consumer.stop()
    assert handed == list(range(len(handed)))
    assert len(handed) <= 10
    assert await Admin(where).committed(f"{name}-g") == {}
