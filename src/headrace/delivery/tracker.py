"""Which delivered offsets of one partition have ended, and therefore what may be committed.

Only offsets that were delivered count: compaction, aborted transactions and markers leave
holes, and a hole has ended as soon as a higher record was delivered.
"""

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import compress, islice

from headrace.delivery.offset_map import SPAN_OFFSETS, OffsetMap, decode, encode
from headrace.records import Committed

_PRUNE_RECORDS = 4096
_OPEN, _DONE = 0, 1
_IS_OPEN = bytes([1, 0]) + bytes(254)


class AckTracker:
    """Tracks one partition during one assignment epoch.

    The window is two parallel arrays, own offsets and one status byte each; the first unfinished record is found by
    a byte search, so a completion costs a bisection and no walk over what is open.
    """

    def __init__(self, epoch: int, committed: Committed | None = None, keeps: int = 0) -> None:
        """Begin at what the group has committed; `behind` may be called with at most `keeps` records."""
        self.epoch = epoch
        self.stale = 0
        """Completions of another epoch, which were ignored."""
        self._keeps = keeps
        self._start = committed.offset if committed else None
        self._offsets: list[int] = []
        self._status = bytearray()
        self._first_open = 0
        self._end = 0  # of the partition, as last reported
        self._commit = self._start
        self._earlier: OffsetMap | None = decode(committed.metadata, committed.offset) if committed else None

    @property
    def frontier(self) -> int:
        """Below this offset every delivered record has ended."""
        return self._commit or 0

    @property
    def commit_offset(self) -> int | None:
        """The frontier; None as long as nothing is known."""
        return self._commit

    @property
    def position(self) -> int | None:
        """The offset behind everything that is known; None as long as nothing is."""
        return max(self.frontier, self._end, self._offsets[-1] + 1) if self._offsets else self._commit

    @property
    def has_open(self) -> bool:
        """Whether a delivered record has not ended."""
        return self._first_open < len(self._offsets)

    def is_open(self, offset: int) -> bool:
        """Whether a record was delivered and has not ended."""
        index = bisect_left(self._offsets, offset)
        return index < len(self._offsets) and self._offsets[index] == offset and not self._status[index]

    @property
    def open_records(self) -> int:
        """Delivered records that have not ended."""
        return self._status.count(_OPEN, self._first_open)

    @property
    def commit(self) -> Committed | None:
        """What to commit: the offset, and the map of what has ended above it, empty when nothing has."""
        if self._commit is None:
            return None
        first, offsets, earlier = self._first_open, self._offsets, self._earlier
        last_done = self._status.rfind(_DONE, first)
        if earlier:
            seen = max(self._commit, offsets[-1] + 1 if offsets else 0)
            stop, end, unseen = len(offsets), earlier.end, sorted(o for o in earlier.open if o >= seen)
        elif last_done >= 0:
            stop, end, unseen = last_done, offsets[last_done] + 1, []
        else:
            return Committed(self._commit)
        if end - self._commit > SPAN_OFFSETS:  # what ended so far ahead comes again
            end = self._commit + SPAN_OFFSETS
            stop, unseen = bisect_left(offsets, end), [offset for offset in unseen if offset < end]
        return Committed(self._commit, encode(self._commit, end, self._open_before(stop) + unseen))

    def open_up_to(self, offset: int) -> list[int]:
        """Return the delivered records up to this offset that have not ended, ascending."""
        return self._open_before(bisect_right(self._offsets, offset))

    def behind(self, records: int) -> int:
        """Return the offset so many records before the frontier, or the first offset of this assignment."""
        index = self._first_open - records
        return max(self._start or 0, self._offsets[index] if index >= 0 else 0)

    def delivered(self, offsets: Sequence[int]) -> frozenset[int]:
        """Take offsets in the order of arrival; return those that had ended before this assignment, and are not open.

        Raises:
            ValueError: An offset is not above every earlier one.
        """
        if not offsets:
            return frozenset()
        before = [self._offsets[-1] if self._offsets else -1, *offsets]
        if any(map(operator.le, offsets, before)):
            first = [*map(operator.le, offsets, before)].index(True)
            raise ValueError(f"offset {offsets[first]} follows {before[first]}")
        if self._commit is None:
            self._commit = self._start = offsets[0]
        elif self._first_open == len(self._offsets):
            # Nothing was open, so no record exists between the last commit point and this one.
            self._commit = max(self._commit, offsets[0])
        self._offsets.extend(offsets)
        if self._earlier is None:
            self._status.extend(bytes(len(offsets)))
            return frozenset()
        return self._take_ended(self._earlier, offsets)

    def done(self, offsets: list[int], epoch: int) -> bool:
        """Note that records have ended for good.

        Args:
            offsets: Own offsets, ascending, each delivered before and not yet ended.
            epoch: The epoch they were delivered in; another one is counted and ignored.

        Returns:
            Whether the commit offset moved.

        Raises:
            ValueError: An offset was never delivered, or had ended already.
        """
        if epoch != self.epoch:
            self.stale += len(offsets)
            return False
        index, count = self._first_open, len(offsets)
        if offsets and index < len(self._offsets) and self._offsets[index] != offsets[0]:
            index = bisect_left(self._offsets, offsets[0])
        window = slice(index, index + count)
        if count > 1 and self._offsets[window] == offsets and self._status.find(_DONE, index, index + count) < 0:
            # Neighbours, as batches of the orders `partition` and `none` are: two slices instead of a loop.
            self._status[window] = bytes([_DONE]) * count
            return self._advance()
        for offset in offsets:
            # Completions come mostly in order, so the next slot is the first guess.
            if index >= len(self._offsets) or self._offsets[index] != offset:
                index = bisect_left(self._offsets, offset)
            if index == len(self._offsets) or self._offsets[index] != offset or self._status[index]:
                raise ValueError(f"offset {offset} is not open")
            self._status[index] = _DONE
            index += 1
        return self._advance()

    def end_reached(self, position: int) -> bool:
        """Note once that the partition ends at `position` for now; return whether the commit offset moved.

        As soon as nothing is open, the commit offset becomes the position, past markers and aborted records, so that
        lag reaches 0 on transactional topics.
        """
        if self.has_open:
            self._end = max(self._end, position)
            return False
        if self._commit is None:
            self._start = position
        elif position <= self._commit:
            return False
        self._commit = position
        self._forget_map(position)
        return True

    def _open_before(self, stop: int) -> list[int]:
        is_open = self._status[self._first_open : stop].translate(_IS_OPEN)
        return list(compress(islice(self._offsets, self._first_open, stop), is_open))

    def _take_ended(self, earlier: OffsetMap, offsets: Sequence[int]) -> frozenset[int]:
        ended = frozenset(offset for offset in offsets if earlier.has(offset))
        self._status.extend(_DONE if offset in ended else _OPEN for offset in offsets)
        self._forget_map(offsets[-1] + 1)
        self._advance()
        return ended

    def _forget_map(self, position: int) -> None:
        if self._earlier and position >= self._earlier.end:
            self._earlier = None

    def _advance(self) -> bool:
        if self._first_open < len(self._status) and self._status[self._first_open] == _OPEN:
            return False
        found = self._status.find(_OPEN, self._first_open)
        if found < 0:
            self._first_open = len(self._offsets)
            commit = max(self._offsets[-1] + 1, self._end)
            self._forget_map(commit)
        else:
            self._first_open = found
            commit = self._offsets[found]
        moved = commit != self._commit
        self._commit = commit
        if self._first_open >= _PRUNE_RECORDS + self._keeps:
            self._prune()
        return moved

    def _prune(self) -> None:
        # One finished offset stays at least, so that `delivered` still sees the last one.
        gone = self._first_open - 1 - self._keeps
        del self._offsets[:gone]
        del self._status[:gone]
        self._first_open -= gone
