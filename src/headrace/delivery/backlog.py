"""The backlog of a lane: its records that have not begun, and which of them may begin now.

A record is ready, or blocked by an earlier one of its key. The cost of a step does not depend on the number of open
records.

Records of slow keys are delivered in isolation, so that they delay no others. A delivery takes as long as its slowest
record, and proves nothing about the others. So keys of a slow delivery are tried with a few others, then alone; a key
that is slow alone is slow until a delivery with it is fast. The usual time is learned from fast deliveries of the same
size, or of a few records. These are tried now and then when all others are slow.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Sequence

from headrace.delivery.context import PumpContext
from headrace.records import Record

_OFFSET = operator.attrgetter("offset")
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

    def learn(self, records: Sequence[Record], seconds: float) -> None:
        """Record how long a successful delivery took."""
        count = len(records)
        size, few = count.bit_length(), self._few.bit_length()
        usual = self._usual.get(size, seconds)
        self._usual[size] = min(seconds, usual * _FORGETS)
        if size > few and few in self._usual:
            usual = min(usual, self._usual[few] * count / self._few)
        if seconds <= usual * _SLOWER + _NOTICED_SECONDS:
            if self.marks:
                self._clear(records)
        else:
            self._suspect(records)

    def _clear(self, records: Sequence[Record]) -> None:
        for record in records:
            if self.marks.pop(record.key, 0) == SLOW:
                self._slow -= 1

    def _suspect(self, records: Sequence[Record]) -> None:
        is_alone = len(records) == 1 and self._slow < _MOST_SLOW
        for record in records:
            mark = self.marks.get(record.key, 0)
            if record.key is None or mark == SLOW or (not mark and len(self.marks) - self._slow >= _MOST_TRIED):
                continue
            self.marks[record.key] = SLOW if is_alone else min(mark + 1, ALONE)
            self._slow += is_alone


class Backlog:
    """Records of one lane that have not begun."""

    def __init__(self, context: PumpContext) -> None:
        self.isolated = 0
        """Deliveries in flight of records that have a slow key, or one that may be."""
        self._context = context
        self.ready: deque[Record] = deque()
        """Records of usual keys that may begin."""
        self._blocked: dict[bytes | None, deque[Record] | None] = {}  # keys in flight, and what each blocks
        self._keys = SlowKeys(context.batch.max_records)
        self._slow: dict[int, deque[Record]] = {ALONE: deque(), FEW: deque(), SLOW: deque()}  # ready, perhaps slow

    def __iter__(self) -> Iterator[Record]:
        """Iterate over every record, those that are ready first."""
        yield from self.ready
        for ready in self._slow.values():
            yield from ready
        for waiting in self._blocked.values():
            yield from waiting or ()

    @property
    def is_slow_turn(self) -> bool:
        """Whether records of slow keys may begin."""
        return bool(self._keys.marks) and self._mark > 0

    def add(self, records: Sequence[Record]) -> None:
        """Append records."""
        if self._context.ordering != "key":
            self.ready.extend(records)
            return
        ordered_nulls, blocked = self._context.ordered_null_keys, self._blocked
        for record in records:
            key = record.key
            if key is None and not ordered_nulls:
                self.ready.append(record)
            elif key not in blocked:
                blocked[key] = None
                self._ready_for(key).append(record)
            elif (waiting := blocked[key]) is None:
                blocked[key] = deque((record,))
            else:
                waiting.append(record)

    def take_slow(self) -> list[Record]:
        """Return records of slow keys to be delivered together; only if it is their turn."""
        mark = self._mark
        return self._portion(self._slow[mark], self._keys.full_records(mark))

    def take(self) -> list[Record]:
        """Return records to be delivered together; only if some are ready."""
        return self._portion(self.ready, min(self._keys.next_records(), self._context.most_records))

    def release(self, records: Sequence[Record]) -> None:
        """Unblock the keys of these records, each of which was the first of its key."""
        blocked = self._blocked
        for record in records:
            key = record.key
            if waiting := blocked.get(key):
                self._ready_for(key).append(waiting.popleft())
            else:
                blocked.pop(key, None)  # a drained lane has forgotten its keys

    def learn(self, records: Sequence[Record], seconds: float) -> None:
        """Record how long a successful delivery of these records took."""
        self._keys.learn(records, seconds)

    def resize(self) -> None:
        """Apply a changed size of full deliveries."""
        self._keys.resize(self._context.batch.max_records)

    def clear(self) -> None:
        """Forget everything."""
        self.ready.clear()
        self._blocked.clear()
        for ready in self._slow.values():
            ready.clear()

    @property
    def _mark(self) -> int:
        """Which of the slow keys may begin, if any: while others are ready, half of the slots are reserved for those.

        They fill deliveries, but for a quarter of their slots, so that they do not all wait for the slowest.
        """
        slots = self._context.breaker.limit.concurrency // (len(self._context.lanes) or 1) // (2 if self.ready else 1)
        if self.isolated >= max(1, slots):
            return 0
        for mark, ready in self._slow.items():
            if ready and (self.isolated < max(1, slots // 4) or len(ready) >= self._keys.full_records(mark)):
                return mark
        return 0

    def _portion(self, ready: deque[Record], most_records: int) -> list[Record]:
        batch = self._context.batch
        records = [ready.popleft()]
        size = records[0].size_bytes
        while ready and len(records) < most_records:
            size += ready[0].size_bytes
            if size > batch.max_bytes:
                break
            records.append(ready.popleft())
        if self._context.ordering == "key":
            # The key at the end of the queue may have the lowest offset; within a delivery offsets ascend.
            records.sort(key=_OFFSET)
        return records

    def _ready_for(self, key: bytes | None) -> deque[Record]:
        return self._slow.get(self._keys.marks.get(key, 0), self.ready)
