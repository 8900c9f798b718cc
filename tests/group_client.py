"""A consumer on its own thread, with a client that tests own instead of Kafka's."""

from __future__ import annotations

import asyncio
import queue
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.kafka import Admin
from headrace.kafka.consumer import Consumer
from headrace.kafka.positions import ReadPolicy
from headrace.records import Committed, Record, TopicPartition
from headrace.runtime import Deadline
from headrace_devkit.testing import ManualClock

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
_LIMIT_SECONDS = 10.0
_TRUNCATED = confluent_kafka.KafkaError._AUTO_OFFSET_RESET


class Message:
    """A record, or an error about a partition."""

    def __init__(
        self,
        partition: TopicPartition,
        offset: int | None,
        error: int | None = None,
        *,
        key: bytes | None = b"k",
        value: bytes = b"v",
    ) -> None:
        self._partition, self._offset, self._key, self._value = partition, offset, key, value
        self._error = None if error is None else SimpleNamespace(code=lambda: error, str=lambda: f"error {error}")

    def error(self) -> Any:
        return self._error

    def topic(self) -> str:
        return self._partition.topic

    def partition(self) -> int:
        return self._partition.partition

    def offset(self) -> int | None:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes:
        return self._value

    def headers(self) -> None:
        return None


def truncated(partition: TopicPartition) -> Message:
    """Return what the client says of a log that was cut before its position."""
    return Message(partition, None, _TRUNCATED)


class ConsumerClient:
    """Kafka's client as one consumer uses it: what is assigned and paused, and the callbacks of a rebalance."""

    def __init__(self) -> None:
        self.assigned: dict[TopicPartition, int] = {}
        """Positions."""
        self.generation = 1
        """Of the group; -1 when Kafka does not know the member any more."""
        self.paused: set[TopicPartition] = set()
        self.topics: list[str] = []
        self._callbacks: dict[str, Callable[[Any, Any], None]] = {}
        self._on_commit: Callable[[Any, Any], None] = lambda *_: None

    def consumer_group_metadata(self) -> bytes:
        return b"CGMDv2:" + self.generation.to_bytes(4, sys.byteorder, signed=True)

    def partitions(self) -> Iterable[TopicPartition]:
        """Return the partitions of the topic."""
        raise NotImplementedError

    def stored(self, partition: TopicPartition) -> tuple[Committed | None, Any]:
        """Return what the group has committed, or an error in its place."""
        raise NotImplementedError

    def subscribe(self, topics: Sequence[str], **callbacks: Callable[[Any, Any], None]) -> None:
        self.topics, self._callbacks = list(topics), callbacks

    def assignment(self) -> list[Any]:
        return [plain(partition) for partition in self.assigned]

    def incremental_assign(self, items: Sequence[Any]) -> None:
        self.assigned |= {where(item): item.offset for item in items}

    def incremental_unassign(self, items: Sequence[Any]) -> None:
        for item in items:
            del self.assigned[where(item)]

    def pause(self, items: Sequence[Any]) -> None:
        self.paused |= {where(item) for item in items}

    def resume(self, items: Sequence[Any]) -> None:
        self.paused -= {where(item) for item in items}

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        partitions = {p.partition: SimpleNamespace(leader=1) for p in self.partitions()}
        return SimpleNamespace(topics={"t": SimpleNamespace(partitions=partitions)})

    def offsets_for_times(self: Any, items: Sequence[Any], timeout: float) -> list[Any]:
        return [plain(where(item), self.get_watermark_offsets(item, timeout)[1]) for item in items]

    def committed(self, items: Sequence[Any], timeout: float) -> list[Any]:
        found = []
        for item in items:
            at, error = self.stored(where(item))
            at = at or Committed(confluent_kafka.OFFSET_INVALID)
            kept = {"offset": at.offset, "metadata": at.metadata, "error": error}
            found.append(SimpleNamespace(topic=item.topic, partition=item.partition, **kept))
        return found

    def close(self) -> None:
        if self.assigned and self._callbacks:
            self._callbacks["on_revoke"](self, [plain(p) for p in list(self.assigned)])


class GroupClient(ConsumerClient):
    """Does on the polling thread what tests want, one thing per poll."""

    def __init__(self) -> None:
        super().__init__()
        self.committed_offsets: dict[TopicPartition, int] = {}
        self.commits: list[tuple[TopicPartition, int]] = []
        self.marks: dict[TopicPartition, tuple[int, int]] = {}
        """Start and end of each log."""
        self.silent: set[TopicPartition] = set()
        """Partitions whose leader does not answer."""
        self.refused: dict[TopicPartition, Any] = {}
        """Errors in the place of committed offsets."""
        self.refusals: list[int] = []
        """Errors of the next commits."""
        self.commits_fail = False
        self.log: list[str] = []
        self.asked: list[TopicPartition] = []
        """Partitions whose marks were asked for."""
        self._todo: queue.Queue[Callable[[], Message | None]] = queue.Queue()
        self._reports: list[list[Any]] = []

    # What tests say --------------------------------------------------------------------------------------------------

    def assign(self, *partitions: TopicPartition) -> None:
        self._todo.put(lambda: self._callbacks["on_assign"](self, [plain(p) for p in partitions]))  # type: ignore[func-returns-value]

    def revoke(self, *partitions: TopicPartition) -> None:
        self._todo.put(lambda: self._callbacks["on_revoke"](self, [plain(p) for p in partitions]))  # type: ignore[func-returns-value]

    def give(self, *messages: Message) -> None:
        for message in messages:
            self._todo.put(lambda message=message: message)  # type: ignore[misc]

    # The client ------------------------------------------------------------------------------------------------------

    def opened(self, settings: Mapping[str, Any]) -> GroupClient:
        self._on_commit = settings["on_commit"]
        return self

    def unsubscribe(self) -> None:
        self._callbacks = {}

    def poll(self, seconds: float) -> Message | None:
        while self._reports:
            self._on_commit(None, self._reports.pop(0))
        try:
            return self._todo.get(timeout=0.002)()
        except queue.Empty:
            return None

    def consume(self, most: int, seconds: float) -> list[Message]:
        return []

    def partitions(self) -> Iterable[TopicPartition]:
        return self.marks

    def stored(self, partition: TopicPartition) -> tuple[Committed | None, Any]:
        offset = self.committed_offsets.get(partition)
        return None if offset is None else Committed(offset), self.refused.get(partition)

    def get_watermark_offsets(self, item: Any, timeout: float) -> tuple[int, int]:
        self.asked.append(where(item))
        if where(item) in self.silent:
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._TIMED_OUT))
        return self.marks[where(item)]

    def commit(self, offsets: Sequence[Any], asynchronous: bool) -> None:
        if self.refusals and not asynchronous:
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(self.refusals.pop()))
        self.commits += [(where(item), item.offset) for item in offsets]
        self.log += [f"commit {where(item)} {item.offset}" for item in offsets]
        if asynchronous and not self.commits_fail:
            self._reports.append([plain(where(item), item.offset) for item in offsets])

    def close(self) -> None:
        self.log.append("close")
        super().close()


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
    """A consumer that runs with such a client."""

    def __init__(self, client: GroupClient, listener: Any, policy: ReadPolicy, flow: FlowControl) -> None:
        self.client, self.listener, self.clock = client, listener, ManualClock()
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
            self.client._todo.put(lambda seen=seen: seen.append(None))  # type: ignore[misc]
            await self.until(lambda seen=seen: seen, "a turn of the thread")  # type: ignore[misc]


def with_member(
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[Member], Coroutine[Any, Any, None]],
    *,
    listener: Any = None,
    policy: ReadPolicy | None = None,
    flow: FlowControl | None = None,
) -> None:
    """Run a test with a consumer that has started."""
    client = GroupClient()
    monkeypatch.setattr(confluent_kafka, "Consumer", client.opened)

    async def main() -> None:
        member = Member(client, listener or Heard(), policy or ReadPolicy(), flow or FlowControl())
        await member.consumer.start()
        try:
            await test(member)
            assert member.consumer.death is None
        finally:
            await member.consumer.stop()

    asyncio.run(main())


def where(item: Any) -> TopicPartition:
    """Return the partition of the client's object."""
    return TopicPartition(item.topic, item.partition)


def plain(partition: TopicPartition, offset: int = confluent_kafka.OFFSET_INVALID) -> Any:
    """Return the client's object of a partition."""
    return confluent_kafka.TopicPartition(partition.topic, partition.partition, offset)
