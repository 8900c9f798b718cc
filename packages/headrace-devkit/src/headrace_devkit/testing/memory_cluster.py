"""A cluster in memory: topics, the requests of an `Admin`, reading and writing. For tests without a broker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.config.kafka import KafkaConfig
from headrace.errors import HeadraceError, TopicNotFound
from headrace.kafka import PartitionInfo, TopicInfo
from headrace.records import OutgoingRecord, Produced, Record, TopicPartition


class MemoryCluster:
    """Stands for an `Admin`, a `Producer` and `read_window` of one cluster. Every call answers at once."""

    servers = "memory"

    def __init__(self, topics: Mapping[str, int] | None = None) -> None:
        """Make topics with this many partitions, each with its name as id."""
        self.partitions: dict[str, int] = dict(topics or {})
        self.ids: dict[str, str] = {name: name for name in self.partitions}
        self.logs: dict[TopicPartition, list[Record]] = {}
        self.first: dict[TopicPartition, int] = {}
        """First offsets, where they are not 0."""
        self.ends: dict[TopicPartition, int] = {}
        """End offsets, where the log does not end after its last record."""
        self.written: dict[TopicPartition, int] = {}
        """Ends that include open transactions, where they differ."""
        self.committed_offsets: dict[str, dict[TopicPartition, int]] = {}
        self.failure: HeadraceError | None = None
        """Raised by every request while it is set."""

    def append(self, record: Record) -> None:
        """Append a record; its offset may leave a gap."""
        self.logs.setdefault(record.topic_partition, []).append(record)

    def write(self, record: OutgoingRecord, timestamp_ms: int = 0) -> Produced:
        """Write a record to its partition, or to 0 if it names none."""
        partition = TopicPartition(record.topic, record.partition or 0)
        offset = self._end(partition)
        headers = list(record.headers or ())
        self.append(Record(*partition, offset, timestamp_ms, record.key, record.value, headers.copy, 4))
        return Produced(partition.partition, offset)

    async def has_topic(self, topic: str) -> bool:
        self._answer()
        return topic in self.partitions

    async def group_members(self, group: str, right: str = "") -> list[Any]:
        """Return no member: nothing joins."""
        return []

    async def list_groups(self) -> list[Any]:
        self._answer()
        return []

    async def describe_topic(self, topic: str, right: str = "") -> TopicInfo:
        self._answer()
        if topic not in self.partitions:
            raise TopicNotFound(f"topic {topic} does not exist")
        return TopicInfo(topic, [PartitionInfo(number, 1, [1], [1]) for number in range(self.partitions[topic])])

    async def topic_ids(self, names: Iterable[str], right: str = "") -> dict[str, str]:
        self._answer()
        return {name: self.ids[name] for name in names if name in self.ids}

    async def topic_offsets(self, topic: str, right: str = "") -> dict[TopicPartition, tuple[int, int]]:
        info = await self.describe_topic(topic)
        found = [TopicPartition(topic, partition.partition) for partition in info.partitions]
        return {partition: (self.first.get(partition, 0), self._end(partition)) for partition in found}

    async def start_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._answer()
        return {partition: self.first.get(partition, 0) for partition in partitions}

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._answer()
        return {partition: self._end(partition) for partition in partitions}

    async def written_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._answer()
        return {partition: self.written.get(partition, self._end(partition)) for partition in partitions}

    async def offsets_since(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        self._answer()
        found = {p: [r.offset for r in self.logs.get(p, ()) if r.timestamp_ms >= timestamp_ms] for p in partitions}
        return {partition: offsets[0] for partition, offsets in found.items() if offsets}

    async def time_bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        self._answer()
        times = {p: [record.timestamp_ms for record in self.logs.get(p, ())] for p in partitions}
        return {partition: (min(found), max(found)) for partition, found in times.items() if found}

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        self._answer()
        return self.committed_offsets.get(group, {})

    async def ensure_topic_like(self, name: str, source: str, partitions: int = 0, configs: Any = None) -> None:
        self._answer()
        self.partitions.setdefault(name, partitions or self.partitions[source])

    def send(self, records: Sequence[OutgoingRecord], done: Callable[[list[Any]], None]) -> None:
        """Write records, then call `done` with a result for each."""
        done([self.write(record) for record in records])

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Any]:
        self._answer()
        return [self.write(record) for record in records]

    async def read(
        self, kafka: KafkaConfig, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[list[Record], None]:
        """Yield the records of a window, as `read_window` does: a batch per partition."""
        self._answer()
        for partition, start in starts.items():
            if records := [
                record for record in self.logs.get(partition, ()) if start <= record.offset < ends[partition]
            ]:
                yield records

    def _answer(self) -> None:
        if self.failure:
            raise self.failure

    def _end(self, partition: TopicPartition) -> int:
        log = self.logs.get(partition)
        return self.ends.get(partition, log[-1].offset + 1 if log else self.first.get(partition, 0))
