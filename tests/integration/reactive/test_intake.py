"""How a group's members read on the real broker: patterns, topics that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from headrace.config.consumers import FlowControl
from headrace.config.membership import ConsumerConfig
from headrace.config.producer_config import ProducerConfig
from headrace.config.section import fits_any
from headrace.kafka import Admin, Consumer, Producer, ReadPolicy, Subscription
from headrace.records import Committed, OutgoingRecord, Record, TopicPartition
from headrace.runtime import Deadline, SystemClock
from headrace_devkit.testing import MakeTopic
from headrace_devkit.testing.secured import kafka_settings
from tests.group_member import Heard
from tests.raw_server import until
from tests.staged import staged

CLOCK = SystemClock()
PATIENCE_SECONDS = 120.0
QUICK = {"topic.metadata.refresh.interval.ms": 1000, "session.timeout.ms": 3000}


class Reader(Heard):
    """Completes every record at once if `ends` is set, and records what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = True
        self.finished = asyncio.Event()
        """Set while a revoke need not wait."""
        self.finished.set()
        self.last: dict[TopicPartition, Committed] = {}
        """What is committed on revoke."""
        self.source: Any = None
        self.revoked: list[TopicPartition] = []

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        assert self.epochs[partition] == epoch
        super().on_records(partition, epoch, records)
        if self.ends:
            self.source.release(partition, len(records), sum(record.size_bytes for record in records))
            self.source.commit({partition: Committed(records[-1].offset + 1)})

    async def on_revoked(
        self, partitions: Sequence[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, Committed]:
        self.revoked += partitions
        await self.finished.wait()
        return {p: self.last[p] for p in partitions if p in self.last}

    def read(self, topic: str, partition: int = 0) -> list[int]:
        """Return the offsets that came of a partition."""
        return [offset for place, _, offset in self.records if place == TopicPartition(topic, partition)]


class IntakeHarness:
    """One broker's topics, and members that read them."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.servers = bootstrap_servers
        self.kafka = kafka_settings(bootstrap_servers, properties=QUICK, request_timeout_seconds=60)
        self.admin = Admin(self.kafka)
        self._client = AdminClient({"bootstrap.servers": bootstrap_servers})
        self._services: list[Any] = []

    async def member(
        self, group: str, topics: Sequence[str], flow: FlowControl | None = None, ends: bool = True, **policy: Any
    ) -> Reader:
        reader = Reader()
        reader.ends = ends
        reader.source = Consumer(
            self.admin,
            name=group,
            group=group,
            topics=topics,
            listener=reader,
            flow=flow or FlowControl(),
            clock=CLOCK,
            policy=ReadPolicy(**policy),
        )
        await self.start(reader.source)
        return reader

    async def watch(self, reader: Reader, topics: Sequence[str], *patterns: str) -> None:
        """Begin to look at the topics; the first look is over."""
        fits = fits_any(patterns) if patterns else None
        service = Subscription("topics", reader.source, self.admin, CLOCK, topics=topics, fits=fits)
        await service._look()
        await self.start(service)

    async def start(self, service: Any) -> None:
        self._services.append(service)
        await service.start()

    async def write(self, topic: str, count: int, partition: int = 0) -> None:
        producer = Producer(self.kafka, ProducerConfig())
        await producer.start()
        records = [OutgoingRecord(topic, None, b"%d" % n, partition=partition) for n in range(count)]
        results = await producer.produce(records)
        await producer.stop()
        assert not [result for result in results if isinstance(result, Exception)]

    async def create(self, topic: str) -> None:
        """Create a topic, again as long as one of that name is being deleted."""
        await until(lambda: self.admin.create_topic(topic), "the topic to be created")

    async def delete(self, topic: str) -> None:
        await asyncio.to_thread(lambda: self._client.delete_topics([topic])[topic].result())

    async def until_committed(self, group: str, place: TopicPartition, offset: int) -> None:
        async def is_committed() -> bool:
            return await self.committed(group, place) == offset

        await until(is_committed, f"{place} to be committed at {offset}")

    async def is_preparing(self, group: str) -> bool:
        """Return whether the coordinator of a group waits for its members to join."""
        described = await asyncio.to_thread(lambda: self._client.describe_consumer_groups([group])[group].result())
        return str(described.state.name) == "PREPARING_REBALANCING"

    async def committed(self, group: str, place: TopicPartition) -> int | None:
        return (await self.admin.committed(group)).get(place)

    async def leave(self) -> None:
        for service in reversed(self._services):
            await service.drain(Deadline(CLOCK, PATIENCE_SECONDS))
            await service.stop()


def run_harness(kafka: Any, test: Callable[[IntakeHarness], Coroutine[Any, Any, None]]) -> None:
    """Run a test with members and topics, and stop everything it has started."""

    async def main() -> None:
        harness = IntakeHarness(kafka.bootstrap_servers)
        try:
            await test(harness)
        finally:
            await harness.leave()

    asyncio.run(main())


with_harness = staged(run_harness, fixtures=("kafka",))


@with_harness
async def test_a_pattern_takes_topics_that_come_later_from_their_first_record_and_stops_no_lane(
    harness: IntakeHarness, /, topic: MakeTopic
) -> None:
    """Only names reach the client; `latest` skips nothing of a topic that is created while it runs."""
    base = topic()
    first, late, other = f"{base}.a", f"{base}.b", f"{base}x"
    for name in (first, other):
        await harness.admin.create_topic(name)
    await harness.write(first, 3)
    reader = await harness.member(f"{base}-g", [], reset="latest", as_one=True)
    await harness.watch(reader, [], rf"{base.replace('-', '[-]')}\..*")
    await until(lambda: reader.epochs, "the first topic")
    await harness.write(first, 2)
    await until(lambda: reader.read(first) == [3, 4], "what is new")
    await harness.admin.create_topic(late)
    await harness.write(late, 5)
    await until(lambda: reader.read(late) == [0, 1, 2, 3, 4], "the topic that came later")
    await harness.delete(late)
    await until(lambda: reader.revoked or reader.lost, "the topic to be dropped")
    await harness.write(first, 1)
    await until(lambda: reader.read(first) == [3, 4, 5], "the first topic going on")
    assert set(reader.revoked) | set(reader.lost) == {TopicPartition(late, 0)}
    assert sum(TopicPartition(first, 0) in partitions for partitions, _ in reader.assigned) == 1
    assert reader.read(other) == []


@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.long)])
@with_harness
async def test_a_topic_that_is_created_anew_is_read_from_its_start_and_that_is_said(
    harness: IntakeHarness, /, topic: MakeTopic, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    """Its offsets have passed the group's position by then, so only the topic's id shows it."""
    name = topic()
    await harness.write(name, 5)
    reader = await harness.member(f"{name}-g", [name], member=ConsumerConfig(properties={"group.protocol": protocol}))
    await harness.watch(reader, [name])
    await until(lambda: reader.read(name) == [0, 1, 2, 3, 4], "the old records")
    known = await harness.admin.topic_ids([name])
    await harness.delete(name)
    await harness.create(name)
    await harness.write(name, 9)
    assert await harness.admin.topic_ids([name]) != known
    await until(lambda: "was deleted and created again" in caplog.text, "the word of it")
    await until(lambda: set(reader.read(name)[5:]) == set(range(9)), "every record of the new topic")
    await harness.until_committed(f"{name}-g", TopicPartition(name, 0), 9)


@with_harness
async def test_a_topic_that_is_created_anew_while_its_partition_is_paused_is_read(
    harness: IntakeHarness, /, topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of the old topic ends any more, so nothing else would resume it."""
    name = topic()
    await harness.write(name, 50)
    reader = await harness.member(f"{name}-g", [name], FlowControl(max_records=10), ends=False)
    await harness.watch(reader, [name])
    await until(lambda: reader.source.pause_reason(TopicPartition(name, 0)), "the pause of the full partition")
    held = len(reader.records)
    await harness.delete(name)
    await harness.create(name)
    await harness.write(name, 9)
    reader.ends = True
    await until(lambda: len(reader.records) >= held + 9, "every record of the new topic")
    assert [offset for _, _, offset in reader.records[held:]] == list(range(9))
    assert "was deleted and created again" in caplog.text
    await harness.until_committed(f"{name}-g", TopicPartition(name, 0), 9)


@with_harness
async def test_what_has_ended_is_committed_by_a_member_that_leaves_while_another_joins(
    harness: IntakeHarness, /, topic: MakeTopic
) -> None:
    """The generation changes while the last records end; a member that had closed by then would commit in the old."""
    name = topic(2)
    group = f"{name}-g"
    for number in range(2):
        await harness.write(name, 4, number)
    reader = await harness.member(group, [name], ends=False)
    await until(lambda: len(reader.records) == 8, "the records")
    # It joins and does not poll, which delays the next generation; the reader has already requested that.
    slow = confluent_kafka.Consumer(
        {
            "bootstrap.servers": harness.servers,
            "group.id": group,
            "partition.assignment.strategy": "cooperative-sticky",
            "enable.auto.commit": False,
        }
    )
    try:
        slow.subscribe([name])
        await until(lambda: reader.revoked, "the partition that moves")
        kept = next(place for place in reader.epochs if place not in reader.revoked)
        await until(lambda: harness.is_preparing(group), "a rebalance")
        reader.finished.clear()
        reader.last = {kept: Committed(4)}
        leaving = asyncio.create_task(reader.source.drain(Deadline(CLOCK, 60)))
        await until(lambda: kept in reader.revoked, "the drain")
        while await harness.is_preparing(group):
            await asyncio.to_thread(slow.poll, 0.05)
        reader.finished.set()
        await leaving
        assert await harness.committed(group, kept) == 4
    finally:
        await asyncio.to_thread(slow.close)
