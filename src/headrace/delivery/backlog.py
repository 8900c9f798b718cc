"""The backlog of a lane: its records that have not begun, and which of them may begin now.

In the orders `partition` and `none` all of them may, and there is no work per record. In order `key` a record is ready,
or blocked by an earlier record of its key. The cost of a step does not depend on the number of records in flight.
"""

from bisect import bisect_right
from collections import deque
from itertools import accumulate, chain, repeat
from typing import Final

from headrace.delivery.pump_context import PumpContext
from headrace.records import Record, RecordBatch, Row, TopicPartition

_KEY: Final = 2
_SIZE: Final = 5
"""Their indexes in a row."""


class Backlog:
    """Records of one lane that have not begun, in the batches in which they were received."""

    def __init__(self, context: PumpContext) -> None:
        self.begun_records = 0
        """Records that were taken and are not completed."""
        self._context = context
        self._batches: deque[RecordBatch] = deque()
        self._begun = 0
        """Records of the first batch that have begun."""
        self._ready_records = 0

    @property
    def ready_records(self) -> int:
        """Records that may begin."""
        return self._ready_records

    def add(self, records: RecordBatch) -> None:
        """Append records."""
        if records:
            self._batches.append(records)
            self._ready_records += len(records)

    def take(self) -> RecordBatch:
        """Return records to deliver together; call it only if some are ready.

        The result is a slice of a batch, a batch, or small batches joined.
        """
        parts: list[RecordBatch] = []
        records, size_bytes = self._context.most_records, self._context.batch.max_bytes
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
            self._ready_records -= count
            self.begun_records += count
            if count < waiting:
                self._begun += count
                break
            self._batches.popleft()
            self._begun = 0
        return RecordBatch.join(parts)

    def find(self, offset: int) -> Record | None:
        """Return a record, or None if it is not here."""
        begun = chain((self._begun,), repeat(0))
        every = (batch.find(offset, first) for batch, first in zip(self._batches, begun, strict=False))
        return next(filter(None, every), None)

    def release(self, records: RecordBatch) -> None:
        """Unblock the records that waited for these, which are completed."""
        self.begun_records -= len(records)

    def clear(self) -> None:
        """Forget everything."""
        self._batches.clear()
        self._begun = self._ready_records = 0


class KeyBacklog(Backlog):
    """Records of one lane that have not begun, of which only the first of each key may begin."""

    def __init__(self, context: PumpContext, partition: TopicPartition) -> None:
        super().__init__(context)
        self._partition = partition
        self._ready: deque[Row] = deque()
        self._blocked: dict[bytes | None, deque[Row] | None] = {}  # keys in flight, and the records that each blocks

    @property
    def ready_records(self) -> int:
        return len(self._ready)

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

    def take(self) -> RecordBatch:
        ready, most_records, most_bytes = self._ready, self._context.most_records, self._context.batch.max_bytes
        rows = [ready.popleft()]
        size = rows[0][_SIZE]
        while ready and len(rows) < most_records:
            size += ready[0][_SIZE]
            if size > most_bytes:
                break
            rows.append(ready.popleft())
        # The key at the end of the queue may have the lowest offset; within a delivery offsets ascend.
        rows.sort()
        self.begun_records += len(rows)
        return RecordBatch.from_rows(self._partition, rows)

    def find(self, offset: int) -> Record | None:
        waiting = [self._ready, *filter(None, self._blocked.values())]
        found = [row for rows in waiting for row in rows if row[0] == offset]
        return RecordBatch.from_rows(self._partition, found)[0] if found else None

    def release(self, records: RecordBatch) -> None:
        super().release(records)
        blocked = self._blocked
        for key in records.keys:
            if waiting := blocked.get(key):
                self._ready.append(waiting.popleft())
            else:
                blocked.pop(key, None)  # a drained lane has forgotten its keys

    def clear(self) -> None:
        self._blocked.clear()
        self._ready.clear()
