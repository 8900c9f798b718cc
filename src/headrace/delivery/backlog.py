"""The backlog of a lane: its records that have not begun, and which of them may begin now.

In the orders `partition` and `none` all of them may, and nothing is done for each record. In order `key` a record is
ready, or blocked by an earlier one of its key. The cost of a step does not depend on the number of open records.

Records of slow keys are delivered in isolation, so that they delay no others. A delivery takes as long as its slowest
record, and proves nothing about the others. So keys of a slow delivery are tried with a few others, then alone; a key
that is slow alone is slow until a delivery with it is fast. The usual time is learned from fast deliveries of the same
size, or of a few records. These are tried now and then when all others are slow.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from typing import Final

from headrace.delivery.pump_context import PumpContext
from headrace.records import Record, RecordBatch, Row, TopicPartition

_KEY: Final = 2
_SIZE: Final = 5
"""Where they are in a row."""
FEW, ALONE, SLOW = 1, 2, 3
_PART = 8
_SLOWER, _NOTICED_SECONDS = 2, 0.03
_FORGETS = 1.01
_MOST_SLOW, _MOST_TRIED = 50_000, 1000
"""Keys; to try many at a time would make most deliveries small."""


class SlowKeys:
    """Learns from how long deliveries take."""

    def __init__(self, most_records: int) -> None:
        """Know nothing; `most_records` is the size of a full delivery."""
        self.marks: dict[bytes | None, int] = {}
        """Keys that are not ordinary: to be tried with a `FEW` others, to be tried `ALONE`, and `SLOW` ones."""
        self.resize(most_records)
        self._usual: dict[int, float] = {}  # by size, in powers of two: about the shortest time seen lately
        self._turn = 0
        self._slow = 0

    def resize(self, most_records: int) -> None:
        """Apply another size of a full delivery."""
        self._most = most_records
        self._few = max(1, most_records // _PART)

    def full_records(self, mark: int) -> int:
        """Return how many records with this mark go in one delivery."""
        return {FEW: self._few, ALONE: 1}.get(mark, self._most)

    def next_records(self) -> int:
        """Return how many ordinary records go in the next delivery."""
        self._turn += 1
        looks = not self._turn % _PART and self._usual.get(self._most.bit_length(), 0) > _NOTICED_SECONDS
        return self._few if looks else self._most

    def learn(self, keys: Sequence[bytes | None], seconds: float) -> None:
        """Record how long a successful delivery of these keys took."""
        count = len(keys)
        size, few = count.bit_length(), self._few.bit_length()
        usual = self._usual.get(size, seconds)
        self._usual[size] = min(seconds, usual * _FORGETS)
        if size > few and few in self._usual:
            usual = min(usual, self._usual[few] * count / self._few)
        if seconds <= usual * _SLOWER + _NOTICED_SECONDS:
            for key in keys if self.marks else ():
                if self.marks.pop(key, 0) == SLOW:
                    self._slow -= 1
        else:
            self._suspect(keys)

    def _suspect(self, keys: Sequence[bytes | None]) -> None:
        is_alone = len(keys) == 1 and self._slow < _MOST_SLOW
        for key in keys:
            mark = self.marks.get(key, 0)
            if key is None or mark == SLOW or (not mark and len(self.marks) - self._slow >= _MOST_TRIED):
                continue
            self.marks[key] = SLOW if is_alone else min(mark + 1, ALONE)
            self._slow += is_alone


class Backlog:
    """Records of one lane that have not begun, in the batches in which they were received."""

    def __init__(self, context: PumpContext) -> None:
        self.isolated = 0
        """Deliveries in flight of records that have a slow key, or one that may be."""
        self._context = context
        self._batches: deque[RecordBatch] = deque()
        self._begun = 0
        """Records of the first batch that have begun."""
        self._ready_records = 0

    @property
    def slow_mark(self) -> int:
        """The mark of slow keys whose turn it is, which are delivered in isolation; 0 for the turn of all others."""
        return 0

    @property
    def ready_records(self) -> int:
        """Records that may begin, without those of slow keys."""
        return self._ready_records

    def add(self, records: RecordBatch) -> None:
        """Append records."""
        if records:
            self._batches.append(records)
            self._ready_records += len(records)

    def take(self, slow_mark: int = 0) -> RecordBatch:
        """Return records to be delivered together, of slow keys with this mark or of others; only if some are ready.

        They are a slice of a batch, a batch, or small batches joined.
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
        """Unblock what waited for these records, which have ended."""

    def learn(self, records: RecordBatch, seconds: float) -> None:
        """Record how long a successful delivery of these records took."""

    def resize(self) -> None:
        """Apply a changed size of full deliveries."""

    def clear(self) -> None:
        """Forget everything."""
        self._batches.clear()
        self._begun = self._ready_records = 0


class KeyBacklog(Backlog):
    """Records of one lane that have not begun, of which only the first of each key may."""

    def __init__(self, context: PumpContext, partition: TopicPartition) -> None:
        super().__init__(context)
        self._partition = partition
        self._ready: deque[Row] = deque()
        """Records of usual keys that may begin."""
        self._blocked: dict[bytes | None, deque[Row] | None] = {}  # keys in flight, and what each blocks
        self._keys = SlowKeys(context.batch.max_records)
        self._slow: dict[int, deque[Row]] = {ALONE: deque(), FEW: deque(), SLOW: deque()}  # ready, perhaps slow

    @property
    def ready_records(self) -> int:
        return len(self._ready)

    @property
    def slow_mark(self) -> int:
        """While others are ready, half of the slots are reserved for those.

        Slow keys fill deliveries, but for a quarter of their slots, so that they do not all wait for the slowest.
        """
        if not self._keys.marks:
            return 0
        slots = self._context.breaker.limit.concurrency // (len(self._context.lanes) or 1) // (2 if self._ready else 1)
        if self.isolated >= max(1, slots):
            return 0
        for mark, ready in self._slow.items():
            if ready and (self.isolated < max(1, slots // 4) or len(ready) >= self._keys.full_records(mark)):
                return mark
        return 0

    def add(self, records: RecordBatch) -> None:
        ordered_nulls, blocked = self._context.ordered_null_keys, self._blocked
        for row in records.rows():
            key = row[_KEY]
            if key is None and not ordered_nulls:
                self._ready.append(row)
            elif key not in blocked:
                blocked[key] = None
                self._ready_for(key).append(row)
            elif (waiting := blocked[key]) is None:
                blocked[key] = deque((row,))
            else:
                waiting.append(row)

    def take(self, slow_mark: int = 0) -> RecordBatch:
        if slow_mark:
            return self._portion(self._slow[slow_mark], self._keys.full_records(slow_mark))
        return self._portion(self._ready, min(self._keys.next_records(), self._context.most_records))

    def find(self, offset: int) -> Record | None:
        waiting = [self._ready, *self._slow.values(), *filter(None, self._blocked.values())]
        found = [row for rows in waiting for row in rows if row[0] == offset]
        return RecordBatch.from_rows(self._partition, found)[0] if found else None

    def release(self, records: RecordBatch) -> None:
        blocked = self._blocked
        for key in records.keys:
            if waiting := blocked.get(key):
                self._ready_for(key).append(waiting.popleft())
            else:
                blocked.pop(key, None)  # a drained lane has forgotten its keys

    def learn(self, records: RecordBatch, seconds: float) -> None:
        self._keys.learn(records.keys, seconds)

    def resize(self) -> None:
        self._keys.resize(self._context.batch.max_records)

    def clear(self) -> None:
        self._blocked.clear()
        for ready in (self._ready, *self._slow.values()):
            ready.clear()

    def _portion(self, ready: deque[Row], most_records: int) -> RecordBatch:
        batch = self._context.batch
        rows = [ready.popleft()]
        size = rows[0][_SIZE]
        while ready and len(rows) < most_records:
            size += ready[0][_SIZE]
            if size > batch.max_bytes:
                break
            rows.append(ready.popleft())
        # The key at the end of the queue may have the lowest offset; within a delivery offsets ascend.
        rows.sort()
        return RecordBatch.from_rows(self._partition, rows)

    def _ready_for(self, key: bytes | None) -> deque[Row]:
        return self._slow.get(self._keys.marks.get(key, 0), self._ready)
