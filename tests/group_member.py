"""A consumer on its own thread, whose client reads a cluster in memory."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError

from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.kafka import Admin
from headrace.kafka.client import library
from headrace.kafka.consumer import Consumer
from headrace.kafka.positions import ReadPolicy
from headrace.records import Committed, Record, TopicPartition
from headrace.runtime import Deadline
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster
from headrace_devkit.testing.memory_consumer import MemoryConsumer, where

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
_LIMIT_SECONDS = 10.0


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
    """A consumer of topic `t`, and its listener."""

    def __init__(self, cluster: MemoryCluster, listener: Any, policy: ReadPolicy, flow: FlowControl) -> None:
        self.cluster, self.listener, self.clock = cluster, listener, ManualClock()
        self.consumer = Consumer(
            Admin(KafkaConfig()),
            name="c",
            group="g",
            topics=["t"],
            listener=listener,
            flow=flow,
            clock=self.clock,
            policy=policy,
        )

    @property
    def client(self) -> MemoryConsumer:
        return self.cluster.consumers[-1]

    def assign(self, *partitions: TopicPartition) -> None:
        self.client.rebalance("on_assign", *partitions)

    async def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait for a condition while the consumer's time goes by."""
        limit = time.monotonic() + _LIMIT_SECONDS
        while not holds():
            assert self.consumer.death is None, self.consumer.death
            assert time.monotonic() < limit, f"waited in vain for {what}"
            self.clock._now += 0.05
            await asyncio.sleep(0.002)

    async def turns(self, count: int = 20) -> None:
        """Let the thread take some turns."""
        for _ in range(count):
            seen: list[None] = []
            self.client.do(lambda seen=seen: seen.append(None))  # type: ignore[misc]
            await self.until(lambda seen=seen: seen, "a turn of the thread")  # type: ignore[misc]


def refuse(client: MemoryConsumer, refused: TopicPartition, code: int) -> None:
    """Have the client's requests of committed offsets fail for one partition."""
    request = client.committed

    def committed(items: Sequence[Any], timeout: float) -> list[Any]:
        found = request(items, timeout)
        for item in found:
            if where(item) == refused:
                item.error = KafkaError(code)
        return found

    client.committed = committed  # type: ignore[method-assign]


def with_member(
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[Member], Coroutine[Any, Any, None]],
    *,
    listener: Any = None,
    policy: ReadPolicy | None = None,
    flow: FlowControl | None = None,
) -> None:
    """Run a test with a consumer that has started."""
    cluster = MemoryCluster({"t": 120})
    monkeypatch.setattr(library, "Consumer", functools.partial(MemoryConsumer, cluster))

    async def main() -> None:
        member = Member(cluster, listener or Heard(), policy or ReadPolicy(), flow or FlowControl())
        await member.consumer.start()
        try:
            await test(member)
            assert member.consumer.death is None
        finally:
            await member.consumer.stop()

    asyncio.run(main())
