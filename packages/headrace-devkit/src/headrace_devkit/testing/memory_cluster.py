"""A cluster in memory: topics, the requests of an `Admin`, and reading. For tests without a broker."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Final

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaError, PartitionNotFound, TopicNotFound
from headrace.kafka import CompactedTable, InternalTopic, PartitionInfo, TopicInfo, check_topic
from headrace.records import Offsets, OutgoingRecord, Produced, Record, TopicPartition
from headrace.runtime import Clock
from headrace_devkit.testing.memory_producer import MemoryProducer


class MemoryLog(list[Record]):
    """The records of a partition."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        super().__init__(records)
        self.start = 0
        """The first offset."""
        self.fixed_end: int | None = None
        """Where it ends, if not after its last record."""
        self.fixed_written: int | None = None
        """Its end with open transactions, if that is another one."""

    @property
    def end(self) -> int:
        """The end that a reader sees."""
        if self.fixed_end is not None:
            return self.fixed_end
        return self[-1].offset + 1 if self else self.start

    @property
    def written(self) -> int:
        """The end with open transactions."""
        return self.end if self.fixed_written is None else self.fixed_written

    def cut(self, before: int) -> None:
        """Delete the records before an offset."""
        self.start = before
        self[:] = [record for record in self if record.offset >= before]


class MemoryCluster:
    """Stands for an `Admin`, a `TopicDirectory` and the readers of one cluster; `producer` writes to it.

    Calls answer at once. What they have in common with those of a broker is in `tests/kafka_contract.py`.
    """

    servers: Final = "memory"
    reachability: ClassVar[Any] = SimpleNamespace(
        outage=None, failed=bool, answered=lambda: None, check=lambda *_: None
    )

    def __init__(self, topics: Mapping[str, int] | None = None, config: KafkaConfig | None = None) -> None:
        """Make topics with this many partitions."""
        self.config = config or KafkaConfig()
        self.partitions: dict[str, int] = dict(topics or {})
        self.ids: dict[str, str] = {}
        """Ids of topics, where they are not their names."""
        self.logs: dict[TopicPartition, MemoryLog] = {}
        self.committed_offsets: defaultdict[str, dict[TopicPartition, Any]] = defaultdict(dict)
        """By group, a `Committed` of each partition, or the client's error in its stead."""
        self.failure: Exception | None = None
        """Raised by every request while it is set."""
        self.producer = MemoryProducer(self)
        self.consumers: list[Any] = []
        """Open clients of its consumers, the newest last."""
        self.tables: list[CompactedTable[Any]] = []
        """Compacted tables that have each record of their topic at once."""
        self._known = dict(self.partitions)

    def log(self, topic: str, partition: int = 0) -> MemoryLog:
        """Return the log of a partition."""
        key = TopicPartition(topic, partition)
        if key not in self.logs:
            self.logs[key] = MemoryLog()
        return self.logs[key]

    def append(self, record: Record) -> None:
        """Append a record; its offset may leave a gap."""
        self.log(*record.topic_partition).append(record)
        for table in self.tables:
            if table.topic.name == record.topic:
                table.read([record], record.offset + 1)

    def write(self, record: OutgoingRecord, timestamp_ms: int = 0) -> Produced:
        """Write a record to its partition, or to that of its key."""
        count = self.partitions.get(record.topic, 1)
        chosen = confluent_kafka.murmur2(record.key, count) if record.key else 0
        partition = TopicPartition(record.topic, chosen if record.partition is None else record.partition)
        offset, headers = self.log(*partition).end, list(record.headers or ())
        size = len(record.key or b"") + len(record.value or b"")
        at_ms = timestamp_ms or record.timestamp_ms
        self.append(Record(*partition, offset, at_ms, record.key, record.value, headers.copy, size))
        return Produced(partition.partition, offset)

    def table(self, topic: str, values: Any, clock: Clock, optional: str = "") -> CompactedTable[Any]:
        """Return a table of a topic that reads nothing until `follow`."""
        made: Any = CompactedTable(self, InternalTopic(topic), values, self.producer.produce, clock, optional=optional)  # type: ignore[arg-type]
        made._follow = asyncio.Event().wait
        return made  # type: ignore[no-any-return]

    def follow(self, table: CompactedTable[Any], start: int = 0) -> None:
        """Let a table read its topic from here to the end, and then each record at once."""
        log = self.log(table.topic.name)
        table.read([record for record in log if record.offset >= start], log.end)
        table.loaded(log.end)
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
        return [self._info(name) for name in sorted(self.partitions)]

    async def has_topic(self, name: str) -> bool:
        self._answer()
        return name in self.partitions

    async def describe_topic(self, name: str, right: str = "") -> TopicInfo:
        self._answer()
        if check_topic(name) not in self.partitions:
            raise TopicNotFound(f"topic {name} does not exist", topic=name)
        return self._info(name)

    async def topic_ids(self, names: Iterable[str], right: str = "") -> dict[str, str]:
        self._answer()
        return {name: self.ids.get(name, name) for name in names if name in self.partitions}

    async def ensure_topic_like(
        self, name: str, source: str, partitions: int = 0, configs: Any = None, fits: Any = ()
    ) -> None:
        self._answer()
        self.partitions.setdefault(name, partitions or (self.partitions[source] if source else 1))

    def known(self, topic: str) -> int | None:
        """Return how many partitions a topic has, if it was there at the start or was looked up."""
        return self._known.get(topic)

    async def partitions_of(self, topic: str) -> int:
        self._known[topic] = len((await self.describe_topic(topic)).partitions)
        return self._known[topic]

    # Offsets ---------------------------------------------------------------------------------------------------------

    async def topic_offsets(self, name: str, right: str = "") -> dict[TopicPartition, tuple[int, int]]:
        found = [TopicPartition(name, info.partition) for info in (await self.describe_topic(name)).partitions]
        return {partition: (self.log(*partition).start, self.log(*partition).end) for partition in found}

    async def start_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {partition: self.log(*partition).start for partition in self._all_there(partitions)}

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {partition: self.log(*partition).end for partition in self._all_there(partitions)}

    async def known_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return await self.end_offsets([partition for partition in partitions if self._has(partition)])

    async def written_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {partition: self.log(*partition).written for partition in self._all_there(partitions)}

    async def offsets_since(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        there = self._all_there(partitions)
        found = {p: [r.offset for r in self.log(*p) if r.timestamp_ms >= timestamp_ms] for p in there}
        return {partition: offsets[0] for partition, offsets in found.items() if offsets}

    async def time_bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        times = {p: [record.timestamp_ms for record in self.log(*p)] for p in self._all_there(partitions)}
        return {partition: (found[0], max(found)) for partition, found in times.items() if found}

    # Groups ----------------------------------------------------------------------------------------------------------

    async def list_groups(self) -> list[Any]:
        self._answer()
        return []

    async def group_members(self, group: str, right: str = "") -> list[Any]:
        """Return no member: nothing joins."""
        self._answer()
        return []

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        self._answer()
        return {partition: at.offset for partition, at in self.committed_offsets[group].items()}

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
                if not log.start <= at <= log.end:
                    raise KafkaError(f"offset {at} of {partition} is out of range")
                before = ends[partition] if ends else log.end
                if found := [record for record in log if at <= record.offset < before]:
                    rest[partition] = found[-1].offset + 1
                if found or not ends:
                    yield found
                if ends and log.end >= before:
                    del rest[partition]
            await asyncio.sleep(0)

    def read_window(self, kafka: KafkaConfig, starts: Offsets, ends: Offsets) -> AsyncGenerator[list[Record], None]:
        """Yield the records of a window, as the function of this name does."""
        return self.read_records(kafka, starts, ends)

    def _answer(self) -> None:
        if self.failure:
            raise self.failure

    def _has(self, partition: TopicPartition) -> bool:
        return partition.partition < self.partitions.get(partition.topic, 0)

    def _all_there(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        self._answer()
        found = list(partitions)
        for one in found:
            if not self._has(one):
                raise (PartitionNotFound if one.topic in self.partitions else TopicNotFound)(f"{one} does not exist")
        return found

    def _info(self, name: str) -> TopicInfo:
        return TopicInfo(name, [PartitionInfo(number, 1, [1], [1]) for number in range(self.partitions[name])])
