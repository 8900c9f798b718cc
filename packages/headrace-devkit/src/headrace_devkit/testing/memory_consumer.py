"""Kafka's client of one consumer, on a cluster in memory."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from headrace.records import Committed, Header, TopicPartition
from headrace_devkit.simulation.partition_log import StoredRecord
from headrace_devkit.testing.memory_cluster import MemoryCluster

_NO_COMMIT = Committed(confluent_kafka.OFFSET_INVALID)


class Message:
    """What the client returns for a record, or an error about a partition."""

    def __init__(
        self,
        partition: TopicPartition,
        offset: int | None,
        error: int | None = None,
        *,
        key: bytes | None = b"k",
        value: bytes | None = b"v",
        timestamp_ms: int = 1000,
        headers: list[Header] | None = None,
    ) -> None:
        self._partition, self._offset, self._key, self._value = partition, offset, key, value
        self._timestamp_ms, self._headers = timestamp_ms, headers
        self._error: Any = None
        if error is not None:
            self._error = SimpleNamespace(code=lambda: error, str=lambda: f"error {error}")

    @staticmethod
    def of(partition: TopicPartition, record: StoredRecord) -> Message:
        """Return a record as the client does."""
        values = {"key": record.key, "value": record.value, "headers": list(record.headers) or None}
        return Message(partition, record.offset, timestamp_ms=record.timestamp_ms, **values)  # type: ignore[arg-type]

    def error(self) -> Any:
        return self._error

    def topic(self) -> str:
        return self._partition.topic

    def partition(self) -> int:
        return self._partition.partition

    def offset(self) -> int | None:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return 1, self._timestamp_ms

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[Header] | None:
        return self._headers


class MemoryConsumer:
    """Reads the logs of a cluster. A test says which partitions it has, and what else happens in its polls."""

    idle_seconds: ClassVar = 0.002
    """How long a poll waits that finds nothing."""

    def __init__(self, cluster: MemoryCluster, settings: Mapping[str, Any]) -> None:
        # The member
        self.cluster, self.settings = cluster, settings
        self.assigned: dict[TopicPartition, int] = {}
        """Positions."""
        self.paused: set[TopicPartition] = set()
        self.topics: list[str] = []
        self.generation = 1
        """Of the group; -1 when Kafka does not know the member any more."""
        self.member_id = "member-1"
        self._callbacks: dict[str, Callable[[Any, Any], None]] = {}
        # Its commits
        self.commits: list[tuple[TopicPartition, int]] = []
        self.async_commits: Literal["acknowledged", "lost", "unanswered"] = "acknowledged"
        """How they end."""
        self._reports: deque[tuple[KafkaError | None, list[Any]]] = deque()
        # Its next polls
        self._turns: deque[Callable[[], Message | None]] = deque()
        cluster.consumers.append(self)

    # What a test says ------------------------------------------------------------------------------------------------

    def rebalance(self, event: str, *partitions: TopicPartition) -> None:
        """Let partitions be assigned (`on_assign`), revoked (`on_revoke`) or lost (`on_lost`) in the next poll."""
        self.do(lambda: self._callbacks[event](self, [plain(partition) for partition in partitions]))

    def give(self, *messages: Message) -> None:
        """Return these from the next polls, before what is in the logs."""
        for message in messages:
            self._turns.append(lambda message=message: message)  # type: ignore[misc]

    def do(self, work: Callable[[], object]) -> None:
        """Do something in a poll of its own."""

        def turn() -> None:
            work()

        self._turns.append(turn)

    @property
    def has_turns(self) -> bool:
        """Whether something waits for the next poll."""
        return bool(self._turns)

    # The client ------------------------------------------------------------------------------------------------------

    def memberid(self) -> str:
        return self.member_id

    def consumer_group_metadata(self) -> bytes:
        return b"CGMDv2:" + self.generation.to_bytes(4, sys.byteorder, signed=True)

    def subscribe(self, topics: Sequence[str], **callbacks: Callable[[Any, Any], None]) -> None:
        self.topics, self._callbacks = list(topics), callbacks

    def unsubscribe(self) -> None:
        self.topics = []
        if self.assigned:
            self.rebalance("on_revoke", *self.assigned)

    def assignment(self) -> list[Any]:
        return [plain(partition) for partition in self.assigned]

    def incremental_assign(self, items: Sequence[Any]) -> None:
        for item in items:
            partition = where(item)
            log = self.cluster.log(*partition)
            if item.offset < 0 and item.offset not in (confluent_kafka.OFFSET_BEGINNING, confluent_kafka.OFFSET_END):
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG))
            marks = {confluent_kafka.OFFSET_BEGINNING: log.start, confluent_kafka.OFFSET_END: log.end}
            self.assigned[partition] = marks.get(item.offset, item.offset)

    def incremental_unassign(self, items: Sequence[Any]) -> None:
        for item in items:
            del self.assigned[where(item)]

    def pause(self, items: Sequence[Any]) -> None:
        self.paused |= {where(item) for item in items}

    def resume(self, items: Sequence[Any]) -> None:
        self.paused -= {where(item) for item in items}

    def poll(self, seconds: float) -> Message | None:
        while self._reports:
            self.settings["on_commit"](*self._reports.popleft())
        if self._turns:
            return self._turns.popleft()()
        if found := self.consume(1, 0):
            return found[0]
        if self.idle_seconds:
            time.sleep(self.idle_seconds)
        return None

    def consume(self, most: int, seconds: float) -> list[Message]:
        found: list[Message] = []
        for partition, position in self.assigned.items():
            if partition in self.paused or position == confluent_kafka.OFFSET_INVALID or len(found) == most:
                continue
            if (
                fetched := self.cluster.log(*partition).fetch(position, most - len(found), committed_only=True)
            ) is None:
                self.assigned[partition] = confluent_kafka.OFFSET_INVALID  # until it is assigned again
                found.append(Message(partition, None, KafkaError._AUTO_OFFSET_RESET))
                continue
            found += [Message.of(partition, record) for record in fetched.records]
            self.assigned[partition] = fetched.next_offset
        return found

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        found = {
            name: SimpleNamespace(error=None, partitions={number: SimpleNamespace(leader=1) for number in range(count)})
            for name, count in ((name, len(topic.partitions)) for name, topic in self.cluster.brokers.topics.items())
        }
        return SimpleNamespace(topics=found)

    def get_watermark_offsets(self, item: Any, timeout: float) -> tuple[int, int]:
        log = self.cluster.log(*where(item))
        return log.start, log.end

    def offsets_for_times(self, items: Sequence[Any], timeout: float) -> list[Any]:
        return [plain(where(item), self.get_watermark_offsets(item, timeout)[1]) for item in items]

    def committed(self, items: Sequence[Any], timeout: float) -> list[Any]:
        if self.cluster.failure:
            raise _no_answer()
        committed = self.cluster.offsets.committed(self.settings["group.id"])
        found = []
        for item in items:
            at = committed.get(where(item), _NO_COMMIT)
            facts = {"offset": at.offset, "metadata": at.metadata, "error": None}
            found.append(SimpleNamespace(topic=item.topic, partition=item.partition, **facts))
        return found

    def commit(self, offsets: Sequence[Any], asynchronous: bool) -> None:
        if self.cluster.failure:
            raise _no_answer()
        outcome = self.async_commits if asynchronous else "acknowledged"
        for item in offsets:
            partition, at = where(item), Committed(item.offset, item.metadata or "")
            assert partition in self.assigned, f"a commit of {partition}, which is not assigned"
            self.commits.append((partition, at.offset))
            if outcome == "acknowledged":
                self.cluster.commit(self.settings["group.id"], {partition: at})
        if asynchronous and outcome != "unanswered":
            failure = KafkaError(KafkaError.NOT_COORDINATOR) if outcome == "lost" else None
            self._reports.append((failure, [plain(where(item), item.offset) for item in offsets]))

    def close(self) -> None:
        if self.assigned and self._callbacks:
            self._callbacks["on_revoke"](self, [plain(partition) for partition in list(self.assigned)])
        self.cluster.consumers.remove(self)


def where(item: Any) -> TopicPartition:
    """Return the partition of the client's object."""
    return TopicPartition(item.topic, item.partition)


def plain(partition: TopicPartition, offset: int = confluent_kafka.OFFSET_INVALID) -> Any:
    """Return the client's object of a partition."""
    return confluent_kafka.TopicPartition(partition.topic, partition.partition, offset)


def _no_answer() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT))
