"""Producers, consumers, readers and topics against a real broker."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from headrace import errors
from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.delivery.offset_map import SPAN_OFFSETS, encode
from headrace.kafka import Admin, Consumer, Producer, ReadPolicy, TopicDirectory, read_records
from headrace.kafka.client.properties import client_properties
from headrace.records import Committed, OutgoingRecord, Produced, TopicPartition
from headrace.runtime import Deadline, SystemClock
from headrace.testing.secured import kafka_settings
from tests.group_client import Heard
from tests.raw_server import until

CLOCK = SystemClock()


def config(kafka: Any, **settings: Any) -> KafkaConfig:
    return kafka_settings(kafka.bootstrap_servers, **{"request_timeout_seconds": 60, **settings})


def consumer_of(kafka: KafkaConfig, topic: str, policy: ReadPolicy | None = None) -> tuple[Consumer, Heard]:
    """Return a member of the group `<topic>-g`, and its listener."""
    listener = Heard()
    consumer = Consumer(
        Admin(kafka),
        name="c",
        group=f"{topic}-g",
        topics=[topic],
        listener=listener,
        flow=FlowControl(),
        clock=CLOCK,
        policy=policy or ReadPolicy(),
    )
    return consumer, listener


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
    assert {one for part in results for one in part} == {Produced(0, n) for n in range(5, 205)}
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


async def test_topics_are_created_described_and_found(kafka: Any, topic: Callable[..., str]) -> None:
    """Creating twice is harmless; the error of a missing one has the command, and the directory finds it later."""
    admin, name = Admin(config(kafka)), topic(2, retention_ms=60000)
    assert not await admin.create_topic(name, 2)
    info = await admin.describe_topic(name)
    assert ([p.partition for p in info.partitions], info.replication_factor) == ([0, 1], 1)
    assert (await admin.topic_configs(name))["retention.ms"] == "60000"
    await admin.ensure_topic_like(f"{name}.dlq", name)
    assert len((await admin.describe_topic(f"{name}.dlq")).partitions) == 2
    directory = TopicDirectory(admin, CLOCK)
    await directory.start()
    assert await directory.partitions_of(name) == 2
    with pytest.raises(errors.TopicNotFound, match=f"headrace topics create {name}-late"):
        await directory.partitions_of(f"{name}-late")
    await admin.create_topic(f"{name}-late", 4)

    async def partitions() -> int:
        try:
            return await directory.partitions_of(f"{name}-late")
        except errors.TopicNotFound:
            return 0

    await until(partitions)
    assert await partitions() == 4
    await directory.stop()


async def test_the_longest_offset_map_is_taken_by_the_broker(kafka: Any, topic: Callable[..., str]) -> None:
    """The next owner gets it on assignment."""
    where, name = config(kafka), topic()
    chance, partition = random.Random(1), TopicPartition(name, 0)
    text = encode(0, SPAN_OFFSETS, sorted(chance.sample(range(SPAN_OFFSETS - 1), SPAN_OFFSETS // 2)))
    assert len(text) > 4000
    first, listener = consumer_of(where, name)
    await first.start()
    await until(lambda: partition in listener.epochs)
    first.commit({partition: Committed(0, text)})
    await until(lambda: Admin(where).committed(f"{name}-g"))
    await first.drain(Deadline(CLOCK, 100))
    second, listener = consumer_of(where, name)
    await second.start()
    await until(lambda: listener.assigned)
    assert listener.assigned[0][1] == {partition: Committed(0, text)}
    await second.drain(Deadline(CLOCK, 100))


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
async def test_a_gap_stalls_its_partition_or_is_passed_by_policy(
    kafka: Any, topic: Callable[..., str], committed: int, missing: str
) -> None:
    """Nothing is reset silently: the reason has the exact offsets, another partition continues, the gap is counted."""
    where, name = config(kafka), topic(2)
    await fill(where, name, 10, partition=0)
    await fill(where, name, 10, partition=1)
    admin, partition = Admin(where), TopicPartition(name, 0)
    await removed_below(where, partition, 6)
    await admin.alter_group_offsets(f"{name}-g", {partition: committed})
    consumer, listener = consumer_of(where, name)
    await consumer.start()
    await until(lambda: re.search(missing, consumer.readiness().reason) is not None)
    await until(lambda: len(listener.records) == 10)
    assert {where.partition for where, _, _ in listener.records} == {1}
    await consumer.stop()
    assert ((await admin.committed(f"{name}-g"))[partition], listener.gaps) == (committed, [])
    passing, listener = consumer_of(where, name, ReadPolicy(on_gap="continue"))
    await passing.start()
    await until(lambda: len([one for one in listener.records if one[0] == partition]) == 4)
    assert listener.gaps == [(partition, 4 if committed == 2 else 990)]
    assert [offset for where, _, offset in listener.records if where == partition] == [6, 7, 8, 9]
    await passing.stop()
