"""Explicit acknowledgements of one partition: delivered records are completed when their handler acknowledges them."""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from headrace.delivery.tracker import AckTracker
from headrace.records import Committed


class AckRules(NamedTuple):
    """How commits and revokes wait for acknowledgements."""

    window: int = 0
    """Records by which the committed offset stays behind what is completed."""
    wait_seconds: float = 0.0
    """The longest wait for explicit acknowledgements before partitions are released."""


class ExplicitAcks:
    """The explicit acknowledgements of one partition during one assignment epoch.

    It is empty where records are completed by their delivery.
    """

    def __init__(self, tracker: AckTracker, window: int = 0) -> None:
        """Begin; `to_commit` stays `window` records behind what is completed."""
        self.awaiting_ack: set[int] = set()
        """Records that were delivered and wait for their explicit acknowledgement."""
        self._tracker = tracker
        self._window = window
        self._acked: dict[int, bool] = {}
        """Acknowledged before the end of their delivery; the value is whether by their own offset."""
        self._acked_to = 0
        """The offset after the last explicitly acknowledged record; the window does not apply below it."""

    @property
    def to_commit(self) -> Committed | None:
        """What to commit: all that is completed; with a window, an offset `window` records lower, without a map."""
        end = self._tracker.commit_offset
        if not self._window or end is None:
            return self._tracker.commit
        offset = max(self._tracker.behind(self._window), min(end, self._acked_to))
        return self._tracker.commit if offset == end else Committed(offset)

    def await_ack(self, offsets: Sequence[int]) -> bool:
        """Wait for acknowledgements of delivered records, and complete those that have one; return as `done` does."""
        early = [offset for offset in offsets if offset in self._acked] if self._acked else []
        self.awaiting_ack.update(offsets)
        return self.done(early)

    def done(self, offsets: list[int]) -> bool:
        """Complete records, acknowledged or not; return whether the commit offset moved.

        Raises:
            ValueError: An offset was never delivered, or is already completed.
        """
        if self.awaiting_ack or self._acked:
            self.awaiting_ack.difference_update(offsets)
            for offset in self._acked.keys() & set(offsets):
                del self._acked[offset]
        return self._tracker.done(offsets, self._tracker.epoch)

    def acknowledge(self, offset: int, *, up_to: bool, in_flight: Iterable[int] = ()) -> bool:
        """Take the explicit acknowledgement of a record that has begun; return whether the commit offset moved.

        With `up_to` it also acknowledges the delivered records before it; records `in_flight` are completed at the end
        of their delivery.
        """
        ends = [offset] if offset in self.awaiting_ack else []
        if up_to:
            ends = [each for each in self._tracker.in_flight_up_to(offset) if each in self.awaiting_ack]
            self._acked = dict.fromkeys(in_flight, False) | self._acked
        if offset not in self.awaiting_ack and self._tracker.is_in_flight(offset):
            self._acked[offset] = True
        self._acked_to = max(self._acked_to, offset + 1)
        return bool(ends) and self.done(ends)

    def failed(self, offsets: Set[int]) -> None:
        """Drop what acknowledgements of later records said of these, which failed and will be called after them."""
        self._acked = {offset: own for offset, own in self._acked.items() if own or offset not in offsets}

    def complete_acked(self) -> None:
        """Complete the records that were acknowledged by their own offset and are still being delivered."""
        if ends := sorted(offset for offset, own in self._acked.items() if own and self._tracker.is_in_flight(offset)):
            self.done(ends)
