"""The records of one lane that have not begun, and which of them may begin together."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from typing import Final

from headrace.delivery.pump_context import PumpContext
from headrace.records import Record, RecordBatch, RecordRow, Row, TopicPartition

_KEY: Final = 2
_SIZE: Final = 5
"""Their indexes in a row of a batch."""


class Backlog:
    """Records of one lane that have not begun, in the batches in which they were received."""

    def __init__(self, context: PumpContext) -> None:
        self.begun_records = 0
        """Records that were taken and are not completed."""
        self._context = context
        self._batches: deque[RecordBatch] = deque()
        self._begun = 0
        """Records of the first batch that have begun."""
        self.ready_records = 0
        """Records that may begin."""

    @property
    def most_of_key(self) -> int:
        """How many records of the most frequent key are not completed; 0 if records do not wait for their key."""
        return 0

    def add(self, records: RecordBatch) -> None:
        """Append records."""
        if records:
            self._batches.append(records)
            self.ready_records += len(records)

    def take(self) -> RecordBatch:
        """Return records to deliver together; call it only if some are ready.

        The result is a slice of a batch, a batch, or small batches joined.
        """
        records = self._context.most_records
        if records == 1:
            return self._take_one()
        size_bytes = self._context.batch.max_bytes
        parts: list[RecordBatch] = []
        while records and self._batches:
            first, begun = self._batches[0], self._begun
            waiting = len(first) - begun
            part = first if not begun and waiting <= records else first[begun : begun + records]
            if part.size_bytes > size_bytes:
                fitting = bisect_right([*accumulate(part.sizes)], size_bytes)
                part = part[: fitting if parts else max(1, fitting)]
            count = len(part)
            if not count:
                break
            parts.append(part)
            records, size_bytes = records - count, size_bytes - part.size_bytes
            self.ready_records -= count
            self.begun_records += count
            if count < waiting:
                self._begun += count
                break
            self._batches.popleft()
            self._begun = 0
        return RecordBatch.join(parts)

    def _take_one(self) -> RecordBatch:
        first, begun = self._batches[0], self._begun
        self.ready_records -= 1
        self.begun_records += 1
        self._begun = begun + 1
        if self._begun == len(first):
            self._batches.popleft()
            self._begun = 0
        return RecordRow(first.topic_partition, first.row_at(begun))

    def following(self, delivered: RecordBatch) -> RecordBatch | None:
        """Take records after others that were delivered, and unblock what waited for those; None if nothing may."""
        if not self.ready_records:
            return None
        self.begun_records -= len(delivered)
        return self.take()

    def find(self, offset: int) -> Record | None:
        """Return a record, or None if it is not here."""
        begun = chain((self._begun,), repeat(0))
        every = (batch.find(offset, first) for batch, first in zip(self._batches, begun, strict=False))
        return next(filter(None, every), None)

    def release(self, keys: Sequence[bytes | None]) -> bool:
        """Unblock what waited for records of these keys, which were delivered; return whether something did."""
        self.begun_records -= len(keys)
        return False

    def clear(self) -> None:
        """Forget everything."""
        self._batches.clear()
        self._begun = self.ready_records = 0


class KeyBacklog(Backlog):
    """Records of one lane that have not begun, of which only the first of each key may begin."""

    def __init__(self, context: PumpContext, partition: TopicPartition) -> None:
        super().__init__(context)
        self._partition = partition
        self._ready: deque[Row] = deque()
        self._blocked: dict[bytes | None, deque[Row] | None] = {}  # keys in flight, and the records that each blocks

    @property
    def most_of_key(self) -> int:
        return 1 + max((len(waiting) for waiting in self._blocked.values() if waiting), default=0)

    def add(self, records: RecordBatch) -> None:
        blocked = self._blocked
        for row in records.rows():
            key = row[_KEY]
            if key is None:
                self._ready.append(row)
            elif key not in blocked:
                blocked[key] = None
                self._ready.append(row)
            elif (waiting := blocked[key]) is None:
                blocked[key] = deque((row,))
            else:
                waiting.append(row)
        self.ready_records = len(self._ready)

    def take(self) -> RecordBatch:
        ready, most_records = self._ready, self._context.most_records
        rows = [ready.popleft()]
        size, most_bytes = rows[0][_SIZE], self._context.batch.max_bytes
        while ready and len(rows) < most_records:
            size += ready[0][_SIZE]
            if size > most_bytes:
                break
            rows.append(ready.popleft())
        # The key at the end of the queue may have the lowest offset; within a delivery offsets ascend.
        rows.sort()
        self.begun_records += len(rows)
        self.ready_records -= len(rows)
        return RecordBatch.from_rows(self._partition, rows)

    def following(self, delivered: RecordBatch) -> RecordBatch | None:
        keys = (delivered.row[_KEY],) if isinstance(delivered, RecordRow) else delivered.keys
        if not (self.ready_records or any(map(self._blocked.get, keys))):
            return None
        self.release(keys)
        return self.take()

    def find(self, offset: int) -> Record | None:
        waiting = [self._ready, *filter(None, self._blocked.values())]
        found = [row for rows in waiting for row in rows if row[0] == offset]
        return RecordBatch.from_rows(self._partition, found)[0] if found else None

    def release(self, keys: Sequence[bytes | None]) -> bool:
        self.begun_records -= len(keys)
        blocked, ready = self._blocked, self.ready_records
        for key in keys:
            if waiting := blocked.get(key):
                self._ready.append(waiting.popleft())
            else:
                blocked.pop(key, None)  # a drained lane has forgotten its keys
        self.ready_records = len(self._ready)
        return self.ready_records > ready

    def clear(self) -> None:
        super().clear()
        self._blocked.clear()
        self._ready.clear()
