"""The log of one partition: what is stored, and which of it a reader may see.

A record that is removed, and a marker at the end of a transaction, leave a gap in the offsets.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Header = tuple[str, bytes | None]


class StoredRecord(NamedTuple):
    """A record as it is in a log."""

    offset: int
    timestamp_ms: int
    key: bytes | None = None
    value: bytes | None = None
    headers: Sequence[Header] = ()
    producer_id: int = -1
    """Of the transaction that it belongs to; -1 without one."""
    is_control: bool = False
    """Whether it is the end of a transaction, which no reader gets."""

    @property
    def size_bytes(self) -> int:
        return len(self.key or b"") + len(self.value or b"")


class UnwrittenRecord(NamedTuple):
    """A record to append."""

    key: bytes | None = None
    value: bytes | None = None
    headers: Sequence[Header] = ()
    timestamp_ms: int = 0


class Fetched(NamedTuple):
    """What a reader gets at an offset."""

    records: Sequence[StoredRecord]
    next_offset: int
    """Where to continue: behind records that this reader never gets, too."""
    end: int
    """How far this reader may read."""


class _Transaction(NamedTuple):
    """A range of offsets in which a producer's records were aborted."""

    producer_id: int
    first: int
    last: int


class PartitionLog:
    """The records of one partition, as its leader has them; each append is on all replicas at once."""

    def __init__(self, topic: str, partition: int, replicas: Sequence[int]) -> None:
        # Settings
        self.topic = topic
        self.partition = partition
        self.replicas = list(replicas)
        # Leadership
        self.leader: int | None = self.replicas[0]
        """None while no replica may lead."""
        self.leader_epoch = 0
        # Records
        self.start = 0
        """The first offset that is still there."""
        self.end = 0
        """One more than the last offset."""
        self._records: list[StoredRecord] = []
        # Transactions
        self._open: dict[int, int] = {}
        """First offset by the producer whose transaction is open."""
        self._aborted: list[_Transaction] = []
        self._waiting: list[Callable[[], None]] = []

    @property
    def last_stable(self) -> int:
        """Where a reader of committed records must stop: the start of the oldest open transaction."""
        return min(self._open.values(), default=self.end)

    @property
    def records(self) -> Sequence[StoredRecord]:
        """All that is stored, with control records and those of aborted transactions."""
        return self._records

    @property
    def open_transactions(self) -> dict[int, int]:
        """First offset by producer id."""
        return dict(self._open)

    def end_for(self, *, committed_only: bool) -> int:
        return self.last_stable if committed_only else self.end

    def append(self, records: Iterable[UnwrittenRecord], producer_id: int = -1) -> int:
        """Append records, of a transaction if a producer id is given; return the offset of the first one."""
        first = self.end
        if producer_id >= 0:
            self._open.setdefault(producer_id, first)
        for record in records:
            self._records.append(
                StoredRecord(self.end, record.timestamp_ms, record.key, record.value, record.headers, producer_id)
            )
            self.end += 1
        self.wake()
        return first

    def end_transaction(self, producer_id: int, *, committed: bool, timestamp_ms: int = 0) -> None:
        """Write the marker that ends a producer's transaction here. Without one open, the marker is written too."""
        first = self._open.pop(producer_id, None)
        if first is not None and not committed:
            self._aborted.append(_Transaction(producer_id, first, self.end))
        self._records.append(StoredRecord(self.end, timestamp_ms, producer_id=producer_id, is_control=True))
        self.end += 1
        self.wake()

    def fetch(self, offset: int, most_records: int, *, committed_only: bool) -> Fetched | None:
        """Return records from an offset on, or None if the offset is out of range.

        Kafka compares with the end of the log, also where the reader may only see what is committed.
        Source: Apache Kafka, `UnifiedLog.read`.
        """
        if not self.start <= offset <= self.end:
            return None
        end = self.end_for(committed_only=committed_only)
        found: list[StoredRecord] = []
        at = bisect_left(self._records, offset, key=_offset_of)
        next_offset = offset
        while at < len(self._records) and len(found) < most_records and self._records[at].offset < end:
            record = self._records[at]
            at += 1
            next_offset = record.offset + 1
            if not record.is_control and not (committed_only and self._is_aborted(record)):
                found.append(record)
        if at >= len(self._records) or self._records[at].offset >= end:
            next_offset = max(next_offset, end)  # behind what compaction has removed at the end
        return Fetched(found, max(next_offset, offset), end)

    def offset_at(self, timestamp_ms: int) -> int | None:
        """Return the first offset at or after a time."""
        return next((r.offset for r in self._records if r.timestamp_ms >= timestamp_ms and not r.is_control), None)

    def delete_before(self, offset: int) -> None:
        """Remove the records before an offset, as retention or DeleteRecords does."""
        self.start = max(self.start, min(offset, self.end))
        self._records = [record for record in self._records if record.offset >= self.start]

    def compact(self) -> None:
        """Keep the last record of each key, and no record without a value, among what is stable."""
        last = {r.key: r.offset for r in self._records if self._is_settled(r)}
        self._records = [
            r
            for r in self._records
            if not self._is_settled(r) or (last[r.key] == r.offset and r.value is not None) or r.key is None
        ]

    def truncate(self, end: int) -> None:
        """Lose the last records, as an election of a replica that was behind does."""
        self._records = [record for record in self._records if record.offset < end]
        self.end = min(self.end, end)
        self._open = {producer: first for producer, first in self._open.items() if first < end}

    def when_changed(self, call: Callable[[], None]) -> None:
        """Call once, when something is appended or a transaction ends."""
        self._waiting.append(call)

    def forget_wait(self, call: Callable[[], None]) -> None:
        if call in self._waiting:
            self._waiting.remove(call)

    def wake(self) -> None:
        """Let those that wait look again."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def _is_settled(self, record: StoredRecord) -> bool:
        return record.offset < self.last_stable and not record.is_control and not self._is_aborted(record)

    def _is_aborted(self, record: StoredRecord) -> bool:
        return record.producer_id >= 0 and any(
            one.producer_id == record.producer_id and one.first <= record.offset <= one.last for one in self._aborted
        )


def _offset_of(record: StoredRecord) -> int:
    return record.offset
