"""The values that travel between packages: frozen, cheap, free of any client library."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Final, NamedTuple, overload

import msgspec

Header = tuple[str, bytes | None]
"""One record header: a name that may repeat, and bytes or null."""

_RESERVED = "headrace."


def is_reserved(name: str) -> bool:
    """Return whether a header is Headrace's own: such headers of clients are left out as they may be forged."""
    return name[: len(_RESERVED)].lower() == _RESERVED


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def _no_headers() -> list[Header] | None:
    return None


class Committed(NamedTuple):
    """The committed position of a group in a partition."""

    offset: int
    """The next to read."""
    metadata: str = ""
    """The text that is committed with the offset."""


Offsets = Mapping[TopicPartition, int]
"""An offset of each partition."""
Epochs = Mapping[TopicPartition, int]
"""The assignment epoch of each partition."""
CommitOffsets = Mapping[TopicPartition, Committed]
"""What is committed, or will be committed, of each partition."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record as Kafka stores it.

    `offset` is the record's own offset. `timestamp_ms` is milliseconds since the epoch, -1 when the record has none.
    Most records have no headers, so they are read only when they are needed.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    read_headers: Callable[[], list[Header] | None] = _no_headers
    size_bytes: int = 0
    """Bytes of key and value, counted once, when the record was read from Kafka."""

    @property
    def headers(self) -> list[Header]:
        """The headers in their order, duplicates kept; empty when there are none."""
        return self.read_headers() or []

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


Row = tuple[int, int, bytes | None, bytes | None, list[Header] | None, int]
"""One record of a batch: offset, timestamp, key, value, headers if it has any, and size."""


class RecordBatch(Sequence[Record]):
    """Records of one partition, in the order of their offsets, as columns. Neither it nor a column is ever changed.

    A `Record` is made only by an index access or an iteration. A slice has its own columns, so that it keeps no other
    records in memory.
    """

    __slots__ = ("headers", "keys", "offsets", "size_bytes", "sizes", "timestamps_ms", "topic_partition", "values")

    def __init__(
        self,
        topic_partition: TopicPartition,
        offsets: list[int],
        timestamps_ms: list[int],
        keys: list[bytes | None],
        values: list[bytes | None],
        headers: list[list[Header] | None] | None,
        sizes: list[int],
    ) -> None:
        """Take columns of the same length; `headers` is None if no record has any."""
        self.topic_partition = topic_partition
        self.offsets = offsets
        self.timestamps_ms = timestamps_ms
        self.keys = keys
        self.values = values
        self.headers = headers
        self.sizes = sizes
        """Bytes of key and value of each record."""
        self.size_bytes = sum(sizes)

    @staticmethod
    def of(records: Sequence[Record]) -> RecordBatch:
        """Return records of one partition as columns; a batch as it is."""
        if isinstance(records, RecordBatch):
            return records
        return RecordBatch.from_rows(
            records[0].topic_partition if records else TopicPartition("", -1),
            [(r.offset, r.timestamp_ms, r.key, r.value, r.read_headers() or None, r.size_bytes) for r in records],
        )

    @staticmethod
    def from_rows(topic_partition: TopicPartition, rows: Sequence[Row]) -> RecordBatch:
        """Return records of one partition as columns."""
        if len(rows) == 1:
            return RecordRow(topic_partition, rows[0])
        columns: list[Any] = [*map(list, zip(*rows, strict=True))] or [[] for _ in range(6)]
        offsets, timestamps_ms, keys, values, headers, sizes = columns
        headers = headers if any(headers) else None
        return RecordBatch(topic_partition, offsets, timestamps_ms, keys, values, headers, sizes)

    @staticmethod
    def join(parts: Sequence[RecordBatch]) -> RecordBatch:
        """Return batches of the same partition that follow each other as one."""
        if len(parts) == 1:
            return parts[0]
        if all(isinstance(part, RecordRow) for part in parts):
            return RecordBatch.from_rows(parts[0].topic_partition, [part.row for part in parts])
        whole = parts[0][:]  # a slice has its own columns
        for part in parts[1:]:
            whole.offsets += part.offsets
            whole.timestamps_ms += part.timestamps_ms
            whole.keys += part.keys
            whole.values += part.values
            whole.sizes += part.sizes
            whole.size_bytes += part.size_bytes
        if any(part.headers for part in parts):
            whole.headers = [*chain.from_iterable([part.headers or repeat(None, len(part)) for part in parts])]
        return whole

    @property
    def row(self) -> Row:
        """The first record."""
        return self.row_at(0)

    def row_at(self, index: int) -> Row:
        """Return the record at an index as a row."""
        return (
            self.offsets[index],
            self.timestamps_ms[index],
            self.keys[index],
            self.values[index],
            self.headers[index] if self.headers else None,
            self.sizes[index],
        )

    def select(self, indexes: Iterable[int]) -> RecordBatch:
        """Return the records at these indexes, in the order of the indexes."""
        rows = [*self.rows()]
        return RecordBatch.from_rows(self.topic_partition, [rows[index] for index in indexes])

    def rows(self) -> Iterator[Row]:
        """Iterate over the records as rows, which is cheaper than a `Record` for each."""
        columns = self.offsets, self.timestamps_ms, self.keys, self.values, self.headers or repeat(None), self.sizes
        return zip(*columns, strict=False)

    def find(self, offset: int, start: int = 0) -> Record | None:
        """Return the record with an offset, from an index on; None if it is not here."""
        index = bisect_left(self.offsets, offset, start)
        return self[index] if index < len(self) and self.offsets[index] == offset else None

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Record]:
        headers = self.headers
        readers: Iterable[Callable[[], list[Header] | None]] = repeat(list)
        if headers:
            readers = [each.copy if each else list for each in headers]
        partition, columns = self.topic_partition, (self.offsets, self.timestamps_ms, self.keys, self.values)
        return map(Record, repeat(partition.topic), repeat(partition.partition), *columns, readers, self.sizes)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> RecordBatch: ...

    def __getitem__(self, index: int | slice) -> Record | RecordBatch:
        if isinstance(index, slice):
            part = RecordBatch.__new__(RecordBatch)  # small deliveries are slices, and `__init__` is half of the cost
            part.topic_partition = self.topic_partition
            part.offsets = self.offsets[index]
            part.timestamps_ms = self.timestamps_ms[index]
            part.keys = self.keys[index]
            part.values = self.values[index]
            part.headers = self.headers and self.headers[index]
            part.sizes = self.sizes[index]
            part.size_bytes = sum(part.sizes)
            return part
        headers = self.headers[index] if self.headers else None
        return Record(
            *self.topic_partition,
            self.offsets[index],
            self.timestamps_ms[index],
            self.keys[index],
            self.values[index],
            headers.copy if headers else list,
            self.sizes[index],
        )


class RecordRow(RecordBatch):
    """A batch of one record, which gets columns when they are first read: they would cost more than its delivery."""

    __slots__ = ("row",)
    row: Row

    def __init__(self, topic_partition: TopicPartition, row: Row) -> None:
        self.topic_partition = topic_partition
        self.row = row

    def __len__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        offset, timestamp_ms, key, value, own, size = self.row
        headers: list[list[Header] | None] | None = [own] if own else None
        super().__init__(self.topic_partition, [offset], [timestamp_ms], [key], [value], headers, [size])
        return object.__getattribute__(self, name)


class OutgoingRecord(msgspec.Struct, frozen=True, gc=False):
    """One record to write to Kafka, bytes ready.

    `partition` None leaves the choice to the partitioner (murmur2 of the key, as Java's client);
    `timestamp_ms` 0 means now.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[Header] | None = None
    partition: int | None = None
    timestamp_ms: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of key, value and headers."""
        size = len(self.key or b"") + len(self.value or b"")
        for name, value in self.headers or ():
            size += len(name) + len(value or b"")
        return size


NO_OFFSET = -1
"""Instead of an offset where no broker returns one (`acks: 0`), as in Kafka's Java client."""


class Produced(msgspec.Struct, frozen=True, gc=False):
    """The partition and offset of a written record, which is on all in-sync replicas."""

    partition: int
    offset: int


_decode_produced = msgspec.json.Decoder(list[Produced]).decode


class WrittenRecords(Sequence[Produced]):
    """Where the records of a request were written, if all of them were; objects are made where someone looks."""

    def __init__(self, count: int, entries: bytes) -> None:
        """Take the JSON of each `Produced`, joined by commas, as a response needs it."""
        self.entries = entries
        self._count = count
        self._made: list[Produced] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Produced: ...
    @overload
    def __getitem__(self, index: slice) -> list[Produced]: ...
    def __getitem__(self, index: int | slice) -> Produced | list[Produced]:
        if self._made is None:
            self._made = _decode_produced(b"[%b]" % self.entries)
        return self._made[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == other[:]

    def __repr__(self) -> str:
        return repr(self[:])


class OwningProcess(msgspec.Struct, frozen=True):
    """The process that has what no other process has, as an instance of an active consumer."""

    process: str
    url: str
    principal: str
    """Who created it; empty without authentication."""
    gone_at: float | None = None
    """When the process ended, in seconds since the epoch; None while it has it."""


CORRELATION_ID: Final = "X-Correlation-Id"
TRACEABILITY_ID: Final = "X-Traceability-Id"
"""Headers of records: the request, and the unit of work, that they belong to."""
Produce = Callable[[Sequence[OutgoingRecord]], Awaitable[Sequence[Any]]]
"""Writes records and returns one result per record, in their order: `Produced`, or the error of one that failed."""
