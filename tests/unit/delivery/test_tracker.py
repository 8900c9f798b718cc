"""The ack tracker: only what has ended is passed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.delivery.tracker import AckTracker
from headrace.records import Committed

SEEDS = st.integers(0, 2**32)


def offset_of(tracker: AckTracker) -> int:
    assert tracker.commit
    return tracker.commit.offset


def test_another_epoch_is_ignored_and_counted() -> None:
    """A completion from before a rebalance moves nothing."""
    tracker = AckTracker(2)
    tracker.delivered([1])
    assert not tracker.done([1], 1)
    assert (offset_of(tracker), tracker.stale) == (1, 1)


def test_a_source_that_goes_backwards_and_a_second_completion_are_defects() -> None:
    """Nor can a record be completed that was never received."""
    tracker = AckTracker(1)
    tracker.delivered([2, 3])
    tracker.done([2], 1)
    for offsets in ([2], [7], [2, 3]):
        with pytest.raises(ValueError, match="not in flight"):
            tracker.done(offsets, 1)
    with pytest.raises(ValueError, match="follows"):
        tracker.delivered([3])


def test_an_end_that_is_said_while_a_record_is_open_is_committed_when_it_has_ended() -> None:
    """The client reports the end once, even while the last record of a transaction is in flight."""
    tracker = AckTracker(1)
    tracker.delivered([0, 1])
    assert not tracker.end_reached(3)
    tracker.done([1], 1)
    assert (offset_of(tracker), tracker.position) == (0, 3)
    assert tracker.done([0], 1)
    assert tracker.commit == Committed(3)
    tracker.delivered([3, 4])
    tracker.done([3], 1)
    assert offset_of(tracker) == 4


class TrackerMachine(RuleBasedStateMachine):
    """Compares the tracker with a simple model: a set of offsets in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = AckTracker(7)
        self.log: list[int] = []
        self.open: set[int] = set()
        self.done: set[int] = set()
        self.next = 0
        self.known = False
        self.end = 0

    @rule(count=st.integers(1, 40), seed=SEEDS)
    def deliver(self, count: int, seed: int) -> None:
        chance = Random(seed)
        offsets = []
        for _ in range(count):
            offsets.append(self.next + chance.choice((0, 0, 0, 1, 3)))
            self.next = offsets[-1] + 1
        assert self.tracker.delivered(offsets) == set()
        self.log += offsets
        self.open.update(offsets)
        self.known = True

    @precondition(lambda self: self.open)
    @rule(seed=SEEDS, share=st.sampled_from([0.1, 0.5, 0.9]))
    def finish_some(self, seed: int, share: float) -> None:
        chance = Random(seed)
        chosen = {offset for offset in sorted(self.open) if chance.random() < share}
        self.tracker.done(sorted(chosen), 7)
        self.open -= chosen
        self.done |= chosen

    @precondition(lambda self: self.open)
    @rule(count=st.integers(1, 30))
    def finish_in_order(self, count: int) -> None:
        chosen = sorted(self.open)[:count]
        self.tracker.done(chosen, 7)
        self.open -= set(chosen)
        self.done |= set(chosen)

    @precondition(lambda self: self.known)
    @rule(part=st.floats(0, 1), twice=st.booleans())
    def restart(self, part: float, twice: bool) -> None:
        """Another owner resumes at the commit and receives the records again, up to any of them."""
        committed = self.tracker.commit
        assert committed is not None
        self.end = min(self.end, committed.offset)  # what was not committed of it is said again
        again = [offset for offset in self.log if offset >= committed.offset]
        seen = round(part * len(again))
        self.tracker = AckTracker(7, committed)
        assert self.tracker.delivered(again[:seen]) == self.done & set(again[:seen])
        # What follows from here on is news to this owner; all of it is seen before the test goes on.
        once_more = self.tracker.commit
        assert once_more is not None
        rest = again[seen:]
        if twice:
            self.tracker = AckTracker(7, once_more)
            rest = [offset for offset in self.log if offset >= once_more.offset]
        assert self.tracker.delivered(rest) == self.done & set(rest)

    @rule(beyond=st.integers(0, 3))
    def reach_end(self, beyond: int) -> None:
        self.next += beyond
        self.end = self.next
        self.known = True
        self.tracker.end_reached(self.next)

    @invariant()
    def nothing_unfinished_is_passed(self) -> None:
        if not self.known:
            assert self.tracker.commit is None
            return
        commit = offset_of(self.tracker)
        if self.open:
            assert commit == min(self.open)
        else:
            assert self.end <= commit <= self.next
            assert self.tracker.commit == Committed(commit), "a map without need"
        assert self.tracker.in_flight_records == len(self.open)


TestTrackerMachine = TrackerMachine.TestCase
TestTrackerMachine.settings = settings(max_examples=4 * settings().max_examples, stateful_step_count=20)
