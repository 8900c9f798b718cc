"""The ack tracker, case by case; `test_delivery_machine.py` compares it with a model, in its pump."""

from __future__ import annotations

import pytest

from headrace.delivery.tracker import AckTracker
from headrace.records import Committed


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
