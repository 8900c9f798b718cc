"""A consumer on its own thread, on virtual time, whose client gets its partitions from the test."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.kafka import Admin
from headrace.kafka.consumer import Consumer
from headrace.kafka.positions import ReadPolicy
from headrace.records import Committed, Record, TopicPartition
from headrace.runtime import Deadline, SystemClock
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.world import World
from headrace_devkit.testing.memory_cluster import MemoryCluster
from tests.assigned_consumer import AssignedConsumer

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
_LIMIT_SECONDS = 100.0


class Heard:
    """A listener that only keeps what it is told."""

    def __init__(self) -> None:
        self.assigned: list[tuple[dict[TopicPartition, int], dict[TopicPartition, Committed]]] = []
        self.records: list[tuple[TopicPartition, int, int]] = []
        """Partition, epoch and offset."""
        self.lost: list[TopicPartition] = []
        self.gaps: list[tuple[TopicPartition, int]] = []

    def on_assigned(
        self, partitions: Mapping[TopicPartition, int], committed: Mapping[TopicPartition, Committed]
    ) -> None:
        self.assigned.append((dict(partitions), dict(committed)))

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        self.records += [(partition, epoch, record.offset) for record in records]

    def on_end(self, partition: TopicPartition, epoch: int, position: int) -> None:
        pass

    def on_gap(self, partition: TopicPartition, offsets: int) -> None:
        self.gaps.append((partition, offsets))

    async def on_revoked(self, partitions: Sequence[TopicPartition], deadline: Deadline) -> dict[TopicPartition, Any]:
        return {}

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.lost += partitions

    @property
    def epochs(self) -> dict[TopicPartition, int]:
        """The newest epoch of each partition."""
        return {partition: epoch for partitions, _ in self.assigned for partition, epoch in partitions.items()}


class Member:
    """A consumer of topic `t` on a machine of the simulation, and its listener."""

    def __init__(self, cluster: MemoryCluster, clients: list[AssignedConsumer], listener: Any, **more: Any) -> None:
        self.cluster, self.clients, self.listener = cluster, clients, listener
        self.clock = SystemClock()
        self.consumer = Consumer(
            Admin(KafkaConfig()), name="c", group="g", topics=["t"], listener=listener, clock=self.clock, **more
        )

    @property
    def client(self) -> AssignedConsumer:
        return self.clients[-1]

    def assign(self, *partitions: TopicPartition) -> None:
        self.client.move("assign", *partitions)

    def append(self, partition: TopicPartition, count: int = 1) -> None:
        """Append records."""
        self.cluster.log(*partition).append([UnwrittenRecord(b"k", b"v")] * count)

    async def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait for a condition."""
        limit = self.clock.monotonic() + _LIMIT_SECONDS
        while not holds():
            assert self.consumer.death is None, self.consumer.death
            assert self.clock.monotonic() < limit, f"waited in vain for {what}"
            await asyncio.sleep(0.01)

    async def turns(self) -> None:
        """Let the thread take some turns."""
        await asyncio.sleep(2)


def with_member(
    test: Callable[[Member], Coroutine[Any, Any, None]],
    *,
    listener: Any = None,
    policy: ReadPolicy | None = None,
    flow: FlowControl | None = None,
) -> None:
    """Run a test with a consumer that has started, on virtual time."""
    world, clients, ended = World(1), list[AssignedConsumer](), list[asyncio.Task[None]]()
    kafka = SimulatedKafka(world)
    kafka.clients.consumer = functools.partial(AssignedConsumer, kafka, clients)
    cluster = MemoryCluster({"t": 120}, brokers=kafka.brokers, offsets=kafka.groups.offsets)

    async def main() -> None:
        member = Member(
            cluster, clients, listener or Heard(), policy=policy or ReadPolicy(), flow=flow or FlowControl()
        )
        await member.consumer.start()
        try:
            await test(member)
            assert member.consumer.death is None
        finally:
            await member.consumer.stop()

    with kafka.installed():
        kafka.machine("m").loop.start(main(), ended.append)
        assert world.run_until(lambda: ended, 600)
    ended[0].result()
    assert not world.problems
