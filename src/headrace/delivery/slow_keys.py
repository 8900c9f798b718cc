"""Which keys of a partition take long, so that they go in deliveries of their own and hold nobody else.

A delivery takes as long as its slowest record, and says nothing of the others. So keys that were in a slow one are
tried with a few others, then alone; one that is slow alone is slow until a delivery with it is fast. What is slow is
told by fast deliveries of that size, or of a few records, which are looked at now and then when all others take long.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.records import Record

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
        """Take note of another size of a full delivery."""
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
        """Note how long a delivery took that ended well."""
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
