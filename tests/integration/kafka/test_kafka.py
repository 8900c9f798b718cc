"""Producers, consumers, readers and topics against a real broker."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from headrace import errors
from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.delivery.offset_map import SPAN_OFFSETS, encode
from headrace.kafka import Admin, Consumer, Producer, ReadPolicy
from headrace.records import Committed, OutgoingRecord, Produced, TopicPartition
from headrace.runtime import Deadline, SystemClock
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import kafka_settings
from tests.group_member import Heard
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


@pytest.mark.parametrize(
    ("settings", "bad"),
    [({"cleanup_policy": "compact"}, {30}), ({"message_timestamp_before_max_ms": 60_000}, {*range(0, 500, 7)})],
    ids=["one", "several"],
)
async def test_a_record_that_a_topic_refuses_fails_alone(
    kafka: Cluster, topic: MakeTopic, settings: dict[str, Any], bad: set[int]
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
    refused = {index for index, result in enumerate(results) if isinstance(result, errors.RecordRefused)}
    assert refused == bad, [results[index] for index in bad - refused][:3]
    written = [result.offset for result in results if isinstance(result, Produced)]
    assert written == sorted(written)
    assert len(written) == 500 - len(bad)
    await producer.stop()


async def test_the_longest_offset_map_is_taken_by_the_broker(kafka: Cluster, topic: MakeTopic) -> None:
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


async def test_a_group_behind_the_end_of_its_log_stalls_or_continues_by_policy(
    site: Scenario, kafka: Cluster, topic: MakeTopic
) -> None:
    """Nothing is reset silently: the reason has the exact offsets, another partition continues, the gap is counted."""
    where, name = config(kafka), topic(2)
    await fill(where, name, 10, partition=0)
    await fill(where, name, 10, partition=1)
    admin, partition = Admin(where), TopicPartition(name, 0)
    site.remove_before(name, 6)
    await admin.alter_group_offsets(f"{name}-g", {partition: 1000})
    consumer, listener = consumer_of(where, name)
    await consumer.start()
    missing = r"offsets 10 to 999 \(990\) .* the log ends"
    await until(lambda: re.search(missing, consumer.readiness().reason) is not None)
    await until(lambda: len(listener.records) == 10)
    assert {where.partition for where, _, _ in listener.records} == {1}
    await consumer.stop()
    assert ((await admin.committed(f"{name}-g"))[partition], listener.gaps) == (1000, [])
    passing, listener = consumer_of(where, name, ReadPolicy(on_gap="continue"))
    await passing.start()
    await until(lambda: len([one for one in listener.records if one[0] == partition]) == 4)
    assert listener.gaps == [(partition, 990)]
    assert [offset for where, _, offset in listener.records if where == partition] == [6, 7, 8, 9]
    await passing.stop()
