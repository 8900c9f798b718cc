"""The ack tracker: only what has ended is passed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.delivery.tracker import AckTracker


def test_nothing_is_committed_before_anything_is_known() -> None:
    """A fresh tracker has no commit offset."""
    assert AckTracker(1).commit_offset is None


def test_a_delivered_record_holds_the_commit_offset() -> None:
    """Until a record ends, its own offset is what may be committed."""
    tracker = AckTracker(1)
    tracker.delivered([5, 6, 9])
    assert tracker.commit_offset == 5


def test_a_gap_ends_with_the_next_record() -> None:
    """Offsets that were never delivered do not hold the frontier."""
    tracker = AckTracker(1)
    tracker.delivered([5, 9, 12])
    assert tracker.done([5], 1)
    assert tracker.commit_offset == 9


def test_a_later_success_does_not_pass_an_unfinished_record() -> None:
    """Records that end out of order wait for the first one."""
    tracker = AckTracker(1)
    tracker.delivered([1, 2, 3])
    assert not tracker.done([2, 3], 1)
    assert tracker.commit_offset == 1
    assert tracker.done([1], 1)
    assert tracker.commit_offset == 4


def test_another_epoch_is_ignored_and_counted() -> None:
    """A completion from before a rebalance moves nothing."""
    tracker = AckTracker(2)
    tracker.delivered([1])
    assert not tracker.done([1], 1)
    assert (tracker.commit_offset, tracker.stale) == (1, 1)


@pytest.mark.parametrize("offsets", [[2], [7]])
def test_what_is_not_open_cannot_end(offsets: list[int]) -> None:
    """Ending a record twice, or one that never came, is a defect and raises."""
    tracker = AckTracker(1)
    tracker.delivered([2, 3])
    tracker.done([2], 1)
    with pytest.raises(ValueError, match="not open"):
        tracker.done(offsets, 1)


def test_offsets_must_rise() -> None:
    """A source that goes backwards inside an epoch is a defect and raises."""
    tracker = AckTracker(1)
    tracker.delivered([2, 3])
    with pytest.raises(ValueError, match="came after"):
        tracker.delivered([3])


def test_the_end_of_a_partition_brings_lag_to_zero() -> None:
    """With nothing open, the end position is committed, past transaction markers."""
    tracker = AckTracker(1)
    tracker.delivered([0])
    assert not tracker.end_reached(3)
    tracker.done([0], 1)
    assert tracker.commit_offset == 1
    assert tracker.end_reached(3)
    assert tracker.commit_offset == 3
    assert not tracker.end_reached(3)


class TrackerMachine(RuleBasedStateMachine):
    """Compares the tracker with the plainest model: a set of open offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = AckTracker(7)
        self.open: set[int] = set()
        self.next = 0
        self.known = False
        self.end = 0

    @rule(gaps=st.lists(st.integers(0, 3), min_size=1, max_size=40))
    def deliver(self, gaps: list[int]) -> None:
        offsets = []
        for gap in gaps:
            offsets.append(self.next + gap)
            self.next += gap + 1
        self.tracker.delivered(offsets)
        self.open.update(offsets)
        self.known = True

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.open)), min_size=1))
        self.tracker.done(sorted(chosen), 7)
        self.open -= chosen

    @precondition(lambda self: self.open)
    @rule(count=st.integers(1, 30))
    def finish_in_order(self, count: int) -> None:
        chosen = sorted(self.open)[:count]
        self.tracker.done(chosen, 7)
        self.open -= set(chosen)

    @rule(beyond=st.integers(0, 3))
    def reach_end(self, beyond: int) -> None:
        if not self.open:
            self.next += beyond
            self.end = self.next
            self.known = self.known or self.end > 0
        self.tracker.end_reached(self.next)

    @invariant()
    def nothing_unfinished_is_passed(self) -> None:
        if not self.known:
            assert self.tracker.commit_offset is None
            return
        commit = self.tracker.commit_offset
        assert commit is not None
        if self.open:
            assert commit == min(self.open)
        else:
            assert self.end <= commit <= self.next
        assert self.tracker.open_records == len(self.open)


TestTrackerMachine = TrackerMachine.TestCase
TestTrackerMachine.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
