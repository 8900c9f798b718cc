"""Which offsets of one partition are completed, and therefore what may be committed.

Only offsets of received records count. Compaction, aborted transactions and markers leave holes, and a hole counts as
completed as soon as a higher record was received.
"""

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import compress, islice

from headrace.delivery.offset_map import SPAN_OFFSETS, OffsetMap, Tries, decode, encode
from headrace.records import Committed

_PRUNE_RECORDS = 4096
_IN_FLIGHT, _COMPLETED = 0, 1
_IS_IN_FLIGHT = bytes([1, 0]) + bytes(254)


class AckTracker:
    """Tracks one partition during one assignment epoch.

    The window is two parallel arrays: offsets, and one status byte each. A byte search finds the first record in
    flight, so a completion costs a bisection and no walk over the records in flight.
    """

    def __init__(self, epoch: int, committed: Committed | None = None, keeps: int = 0) -> None:
        """Begin at what the group has committed; `behind` may be called with at most `keeps` records."""
        self.epoch = epoch
        self.stale = 0
        """Ignored completions of another epoch."""
        self._keeps = keeps
        self._start = committed.offset if committed else None
        self._offsets: list[int] = []
        self._status = bytearray()
        self._first_in_flight = 0
        self._end = 0  # of the partition, as last reported
        self._commit = self._start
        found = decode(committed.metadata, committed.offset) if committed else None
        self.tries = found.tries if found else None
        """Those of the record at the offset where this assignment begins, from before it."""
        self._earlier = found if found and found.end > found.base else None

    @property
    def frontier(self) -> int:
        """Below this offset every delivered record is completed."""
        return self._commit or 0

    @property
    def commit_offset(self) -> int | None:
        """The frontier; None until an offset is known."""
        return self._commit

    @property
    def position(self) -> int | None:
        """The offset after everything that is known; None until an offset is known."""
        return max(self.frontier, self._end, self._offsets[-1] + 1) if self._offsets else self._commit

    @property
    def has_in_flight(self) -> bool:
        """Whether a delivered record is not completed."""
        return self._first_in_flight < len(self._offsets)

    def is_in_flight(self, offset: int) -> bool:
        """Whether a record was delivered and is not completed."""
        index = bisect_left(self._offsets, offset)
        return index < len(self._offsets) and self._offsets[index] == offset and not self._status[index]

    @property
    def in_flight_records(self) -> int:
        """Number of delivered records that are not completed."""
        return self._status.count(_IN_FLIGHT, self._first_in_flight)

    @property
    def commit(self) -> Committed | None:
        """What to commit: the offset, and the map of what is completed above it; empty if nothing is."""
        return self.commit_with(None)

    def commit_with(self, tries: Tries | None) -> Committed | None:
        """Return what to commit, with the attempts of the first record that is not completed."""
        if self._commit is None:
            return None
        first, offsets, earlier = self._first_in_flight, self._offsets, self._earlier
        last_done = self._status.rfind(_COMPLETED, first)
        if earlier:
            seen = max(self._commit, offsets[-1] + 1 if offsets else 0)
            stop, end, unseen = len(offsets), earlier.end, sorted(o for o in earlier.in_flight if o >= seen)
        elif last_done >= 0:
            stop, end, unseen = last_done, offsets[last_done] + 1, []
        else:
            return Committed(self._commit, encode(self._commit, self._commit, [], tries) if tries else "")
        if end - self._commit > SPAN_OFFSETS:  # what is completed beyond the span will be delivered again
            end = self._commit + SPAN_OFFSETS
            stop, unseen = bisect_left(offsets, end), [offset for offset in unseen if offset < end]
        return Committed(self._commit, encode(self._commit, end, self._in_flight_before(stop) + unseen, tries))

    def in_flight_up_to(self, offset: int) -> list[int]:
        """Return the delivered records up to this offset that are not completed, ascending."""
        return self._in_flight_before(bisect_right(self._offsets, offset))

    def behind(self, records: int) -> int:
        """Return the offset this many records before the frontier, or the first offset of this assignment."""
        index = self._first_in_flight - records
        return max(self._start or 0, self._offsets[index] if index >= 0 else 0)

    def delivered(self, offsets: Sequence[int]) -> frozenset[int]:
        """Take offsets in the order of arrival; return those that were completed before this assignment.

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
        elif self._first_in_flight == len(self._offsets):
            # Nothing was in flight, so no record exists between the last commit point and this one.
            self._commit = max(self._commit, offsets[0])
        self._offsets.extend(offsets)
        if self._earlier is None:
            self._status.extend(bytes(len(offsets)))
            return frozenset()
        return self._take_completed(self._earlier, offsets)

    def done(self, offsets: list[int], epoch: int) -> bool:
        """Complete records.

        Args:
            offsets: Offsets in ascending order, each delivered before and not completed.
            epoch: The epoch they were delivered in; completions of another epoch are counted and ignored.

        Returns:
            Whether the commit offset moved.

        Raises:
            ValueError: An offset was never delivered, or is already completed.
        """
        if epoch != self.epoch:
            self.stale += len(offsets)
            return False
        index, count = self._first_in_flight, len(offsets)
        if offsets and index < len(self._offsets) and self._offsets[index] != offsets[0]:
            index = bisect_left(self._offsets, offsets[0])
        window = slice(index, index + count)
        if count > 1 and self._offsets[window] == offsets and self._status.find(_COMPLETED, index, index + count) < 0:
            # Neighbours, as batches of the orders `partition` and `none` are: two slices instead of a loop.
            self._status[window] = bytes([_COMPLETED]) * count
            return self._advance()
        for offset in offsets:
            # Completions are mostly in order, so the next slot is the first guess.
            if index >= len(self._offsets) or self._offsets[index] != offset:
                index = bisect_left(self._offsets, offset)
            if index == len(self._offsets) or self._offsets[index] != offset or self._status[index]:
                raise ValueError(f"offset {offset} is not in flight")
            self._status[index] = _COMPLETED
            index += 1
        return self._advance()

    def end_reached(self, position: int) -> bool:
        """Record that the partition currently ends at `position`; return whether the commit offset moved.

        As soon as nothing is in flight, the commit offset becomes the position, past markers and aborted records. So
        lag reaches 0 on transactional topics.
        """
        if self.has_in_flight:
            self._end = max(self._end, position)
            return False
        if self._commit is None:
            self._start = position
        elif position <= self._commit:
            return False
        self._commit = position
        self._forget_map(position)
        return True

    def _in_flight_before(self, stop: int) -> list[int]:
        is_in_flight = self._status[self._first_in_flight : stop].translate(_IS_IN_FLIGHT)
        return list(compress(islice(self._offsets, self._first_in_flight, stop), is_in_flight))

    def _take_completed(self, earlier: OffsetMap, offsets: Sequence[int]) -> frozenset[int]:
        completed = frozenset(offset for offset in offsets if earlier.has(offset))
        self._status.extend(_COMPLETED if offset in completed else _IN_FLIGHT for offset in offsets)
        self._forget_map(offsets[-1] + 1)
        self._advance()
        return completed

    def _forget_map(self, position: int) -> None:
        if self._earlier and position >= self._earlier.end:
            self._earlier = None

    def _advance(self) -> bool:
        if self._first_in_flight < len(self._status) and self._status[self._first_in_flight] == _IN_FLIGHT:
            return False
        found = self._status.find(_IN_FLIGHT, self._first_in_flight)
        if found < 0:
            self._first_in_flight = len(self._offsets)
            commit = max(self._offsets[-1] + 1, self._end)
            self._forget_map(commit)
        else:
            self._first_in_flight = found
            commit = self._offsets[found]
        moved = commit != self._commit
        self._commit = commit
        if self._first_in_flight >= _PRUNE_RECORDS + self._keeps:
            self._prune()
        return moved

    def _prune(self) -> None:
        # Keep at least one completed offset, so that `delivered` still sees the last one.
        gone = self._first_in_flight - 1 - self._keeps
        del self._offsets[:gone]
        del self._status[:gone]
        self._first_in_flight -= gone
