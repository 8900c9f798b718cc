"""Explicit acknowledgements of one partition: records that were delivered, and end when their handler allows it."""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from headrace.delivery.tracker import AckTracker
from headrace.records import Committed


class AckRules(NamedTuple):
    """How commits and revokes wait for acknowledgements."""

    window: int = 0
    """Records by which the committed offset stays behind what has ended."""
    wait_seconds: float = 0.0
    """The longest wait for explicit acknowledgements before partitions are given up."""


class ExplicitAcks:
    """The explicit acknowledgements of one partition during one assignment epoch.

    It holds nothing where the end of a delivery ends its records.
    """

    def __init__(self, tracker: AckTracker, window: int = 0) -> None:
        """Begin; `to_commit` stays `window` records behind what has ended."""
        self.held: set[int] = set()
        """Open records that were delivered and wait for their explicit acknowledgement."""
        self._tracker = tracker
        self._window = window
        self._acked: dict[int, bool] = {}
        """Acknowledged before their delivery has ended; whether by their own offset."""
        self._acked_to = 0
        """Behind the last record that was acknowledged explicitly, for which there is no window."""

    @property
    def to_commit(self) -> Committed | None:
        """What to commit: all that has ended, or without a map as many records before it as the window has."""
        end = self._tracker.commit_offset
        if not self._window or end is None:
            return self._tracker.commit
        offset = max(self._tracker.behind(self._window), min(end, self._acked_to))
        return self._tracker.commit if offset == end else Committed(offset)

    def hold(self, offsets: Sequence[int]) -> bool:
        """Keep delivered records open until they are acknowledged, and end those that are; return as `done` does."""
        early = [offset for offset in offsets if offset in self._acked] if self._acked else []
        self.held.update(offsets)
        return self.done(early)

    def done(self, offsets: list[int]) -> bool:
        """End records for good, acknowledged or not; return whether the commit offset moved.

        Raises:
            ValueError: An offset was never delivered, or had ended already.
        """
        if self.held or self._acked:
            self.held.difference_update(offsets)
            for offset in self._acked.keys() & set(offsets):
                del self._acked[offset]
        return self._tracker.done(offsets, self._tracker.epoch)

    def acknowledge(self, offset: int, *, up_to: bool, in_flight: Iterable[int] = ()) -> bool:
        """Take the explicit acknowledgement of a record that has begun or ended; return whether the commit moved.

        With `up_to` it counts for the delivered records before it, too. Those `in_flight` end with their delivery.
        """
        ends = [offset] if offset in self.held else []
        if up_to:
            ends = [each for each in self._tracker.open_up_to(offset) if each in self.held]
            self._acked = dict.fromkeys(in_flight, False) | self._acked
        if offset not in self.held and self._tracker.is_open(offset):
            self._acked[offset] = True
        self._acked_to = max(self._acked_to, offset + 1)
        return bool(ends) and self.done(ends)

    def failed(self, offsets: Set[int]) -> None:
        """Take back acknowledgements of later records: the next call of a record that failed comes after them."""
        self._acked = {offset: own for offset, own in self._acked.items() if own or offset not in offsets}

    def end_acked(self) -> None:
        """End what was acknowledged by its own offset although its delivery has not ended."""
        if ends := sorted(offset for offset, own in self._acked.items() if own and self._tracker.is_open(offset)):
            self.done(ends)
