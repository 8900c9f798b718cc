"""The simulated cluster without time: the requests of an `Admin`, and reading. For tests without a broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Final, TypeVar

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaError, PartitionNotFound, TopicNotFound
from headrace.kafka import CompactedTable, InternalTopic, PartitionInfo, TopicInfo, check_topic
from headrace.records import Committed, Offsets, OutgoingRecord, Produced, Record, TopicPartition
from headrace.runtime import Clock
from headrace_devkit.simulation.cluster_topics import ClusterTopics
from headrace_devkit.simulation.offsets import CommittedOffset, OffsetsOfGroups
from headrace_devkit.simulation.partition_log import PartitionLog, StoredRecord, UnwrittenRecord
from headrace_devkit.testing.memory_producer import MemoryProducer

T = TypeVar("T")


class MemoryCluster:
    """Stands for an `Admin`, a `TopicDirectory` and the readers of one cluster; `producer` writes to it.

    Calls answer at once, from the topics, logs and offsets that the clients of a simulation use too. What they have in
    common with those of a broker is in `tests/kafka_contract.py`.
    """

    servers: Final = "memory"
    reachability: ClassVar[Any] = SimpleNamespace(
        outage=None, failed=bool, answered=lambda: None, check=lambda *_: None
    )

    def __init__(
        self,
        topics: Mapping[str, int] | None = None,
        config: KafkaConfig | None = None,
        *,
        brokers: ClusterTopics | None = None,
        offsets: OffsetsOfGroups | None = None,
    ) -> None:
        """Make topics with this many partitions; `brokers` and `offsets` are those of a simulation, if it is part."""
        self.config = config or KafkaConfig()
        self.brokers = brokers or ClusterTopics()
        self.offsets = offsets or OffsetsOfGroups()
        """What groups have committed."""
        self.failure: Exception | None = None
        """Raised by every request while it is set."""
        self.producer = MemoryProducer(self)
        self.tables: list[CompactedTable[Any]] = []
        """Compacted tables that have each record of their topic at once."""
        self._known = dict(topics or {})
        for name, count in self._known.items():
            self.brokers.create_topic(name, count)

    def log(self, topic: str, partition: int = 0) -> PartitionLog:
        """Return the log of a partition that exists."""
        found = self.brokers.log(topic, partition)
        assert found is not None, f"{topic}-{partition} does not exist"
        return found

    def records(self, topic: str, partition: int = 0) -> list[Record]:
        """Return what a reader gets of a partition."""
        log = self.log(topic, partition)
        found = log.fetch(log.start, len(log.records), committed_only=True)
        return _records_of(log, found.records if found else ())

    def empty(self) -> None:
        """Create all topics again, without records."""
        for name, topic in list(self.brokers.topics.items()):
            self.brokers.delete_topic(name)
            self.brokers.create_topic(name, len(topic.partitions), topic.configs)

    def append(self, record: Record) -> None:
        """Append a record; its offset may leave a gap."""
        log = self.log(*record.topic_partition)
        log.end = record.offset
        log.append([UnwrittenRecord(record.key, record.value, record.headers, record.timestamp_ms)])
        for table in self.tables:
            if table.topic.name == record.topic:
                table.read([record], log.end)

    def write(self, record: OutgoingRecord, timestamp_ms: int = 0) -> Produced:
        """Write a record to its partition, or to that of its key."""
        count = len(self.brokers.topics[record.topic].partitions)
        chosen = confluent_kafka.murmur2(record.key, count) if record.key else 0
        partition = TopicPartition(record.topic, chosen if record.partition is None else record.partition)
        offset, headers = self.log(*partition).end, list(record.headers or ())
        size = len(record.key or b"") + len(record.value or b"")
        at_ms = timestamp_ms or record.timestamp_ms
        self.append(Record(*partition, offset, at_ms, record.key, record.value, headers.copy, size))
        return Produced(partition.partition, offset)

    def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit offsets of a group, without being a member."""
        self.offsets.commit(group, {partition: CommittedOffset(*at) for partition, at in offsets.items()})

    def table(self, topic: str, values: Any, clock: Clock, optional: str = "") -> CompactedTable[Any]:
        """Return a table of a topic that reads nothing until `follow`."""
        made: Any = CompactedTable(self, InternalTopic(topic), values, self.producer.produce, clock, optional=optional)  # type: ignore[arg-type]
        made._follow = asyncio.Event().wait
        return made  # type: ignore[no-any-return]

    def follow(self, table: CompactedTable[Any], start: int = 0) -> None:
        """Let a table read its topic from here to the end, and then each record at once."""
        end = self.log(table.topic.name).end
        table.read([record for record in self.records(table.topic.name) if record.offset >= start], end)
        table.loaded(end)
        self.tables.append(table)

    def read_by(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Let modules read from this cluster."""
        for module in modules:
            for name in ("read_records", "read_window"):
                if hasattr(module, name):
                    patch.setattr(module, name, getattr(self, name))

    # Topics ----------------------------------------------------------------------------------------------------------

    async def list_topics(self, limit_seconds: float | None = None) -> list[TopicInfo]:
        self._answer()
        return [self._info(name) for name in sorted(self.brokers.topics) if not name.startswith("__")]

    async def has_topic(self, name: str) -> bool:
        self._answer()
        return name in self.brokers.topics

    async def describe_topic(self, name: str, right: str = "") -> TopicInfo:
        self._answer()
        if check_topic(name) not in self.brokers.topics:
            raise TopicNotFound(f"topic {name} does not exist", topic=name)
        return self._info(name)

    async def topic_ids(self, names: Iterable[str], right: str = "") -> dict[str, str]:
        self._answer()
        return {name: self.brokers.topics[name].id for name in names if name in self.brokers.topics}

    async def ensure_topic_like(
        self, name: str, source: str, partitions: int = 0, configs: Any = None, fits: Any = ()
    ) -> None:
        self._answer()
        if name not in self.brokers.topics:
            count = len(self.brokers.topics[source].partitions) if source else 1
            self.brokers.create_topic(name, partitions or count, configs)

    def known(self, topic: str) -> int | None:
        """Return how many partitions a topic has, if it was there at the start or was looked up."""
        return self._known.get(topic)

    async def partitions_of(self, topic: str) -> int:
        self._known[topic] = len((await self.describe_topic(topic)).partitions)
        return self._known[topic]

    # Offsets ---------------------------------------------------------------------------------------------------------

    async def topic_offsets(self, name: str, right: str = "") -> dict[TopicPartition, tuple[int, int]]:
        found = [TopicPartition(name, info.partition) for info in (await self.describe_topic(name)).partitions]
        return self._of_logs(found, lambda log: (log.start, log.last_stable))

    async def start_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._of_logs(partitions, lambda log: log.start)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._of_logs(partitions, lambda log: log.last_stable)

    async def known_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return await self.end_offsets([partition for partition in partitions if self.brokers.log(*partition)])

    async def written_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._of_logs(partitions, lambda log: log.end)

    async def offsets_since(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        found = self._of_logs(partitions, lambda log: log.offset_at(timestamp_ms))
        return {partition: offset for partition, offset in found.items() if offset is not None}

    async def time_bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        times = self._of_logs(partitions, lambda log: [one.timestamp_ms for one in log.records if not one.is_control])
        return {partition: (found[0], max(found)) for partition, found in times.items() if found}

    # Groups ----------------------------------------------------------------------------------------------------------

    async def list_groups(self) -> list[Any]:
        self._answer()
        return []

    async def group_members(self, group: str, right: str = "") -> list[Any]:
        """Return no member: nothing joins."""
        self._answer()
        return []

    async def members_of(self, groups: Iterable[str], right: str = "") -> dict[str, list[Any]]:
        return {group: await self.group_members(group, right) for group in groups}

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        self._answer()
        return {TopicPartition(*key): at.offset for key, at in self.offsets.committed(group).items()}

    # Reading ---------------------------------------------------------------------------------------------------------

    async def read_records(
        self, kafka: KafkaConfig, starts: Offsets, ends: Offsets | None = None, properties: Any = None
    ) -> AsyncGenerator[list[Record], None]:
        """Yield records as the function of this name does: without ends, an empty list when none has arrived."""
        self._answer()
        rest = {partition: at for partition, at in starts.items() if not ends or at < ends[partition]}
        while rest:
            for partition, at in list(rest.items()):
                log = self.log(*partition)
                if (found := log.fetch(at, len(log.records), committed_only=True)) is None:
                    raise KafkaError(f"offset {at} of {partition} is out of range")
                before = ends[partition] if ends else found.end
                rest[partition] = found.next_offset
                records = _records_of(log, [record for record in found.records if record.offset < before])
                if records or not ends:
                    yield records
                if ends and found.next_offset >= before:
                    del rest[partition]
            await asyncio.sleep(0)

    def read_window(self, kafka: KafkaConfig, starts: Offsets, ends: Offsets) -> AsyncGenerator[list[Record], None]:
        """Yield the records of a window, as the function of this name does."""
        return self.read_records(kafka, starts, ends)

    def _answer(self) -> None:
        if self.failure:
            raise self.failure

    def _of_logs(
        self, partitions: Iterable[TopicPartition], of: Callable[[PartitionLog], T]
    ) -> dict[TopicPartition, T]:
        self._answer()
        found: dict[TopicPartition, T] = {}
        for one in partitions:
            if (log := self.brokers.log(*one)) is None:
                kind = PartitionNotFound if one.topic in self.brokers.topics else TopicNotFound
                raise kind(f"{one} does not exist")
            found[one] = of(log)
        return found

    def _info(self, name: str) -> TopicInfo:
        logs = self.brokers.topics[name].partitions
        return TopicInfo(
            name, [PartitionInfo(log.partition, log.leader or -1, log.replicas, log.replicas) for log in logs]
        )


def _records_of(log: PartitionLog, stored: Iterable[StoredRecord]) -> list[Record]:
    return [
        Record(
            log.topic,
            log.partition,
            one.offset,
            one.timestamp_ms,
            one.key,
            one.value,
            [*one.headers].copy,
            one.size_bytes,
        )
        for one in stored
    ]
