"""Records that end without a delivery because somebody said so, wherever they are, and those that are still to come."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.delivery.lane import Lane
from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.errors import DeadLetterFailed
from headrace.records import Record, TopicPartition

if TYPE_CHECKING:
    from headrace.delivery.pump import Pump

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0


class Skips:
    """What is to be skipped in the partitions of one pump."""

    def __init__(self, pump: Pump, over: Callable[[Lane, Sequence[Record], str], None]) -> None:
        """Prepare; `over` takes records of a lane that have ended, and in which way."""
        self._pump = pump
        self._over = over
        self._coming: dict[TopicPartition, dict[int, str]] = defaultdict(dict)
        self._far: dict[TopicPartition, set[int]] = defaultdict(set)
        """Offsets of those that have come, and lie too far ahead of the first unfinished one for an offset map."""

    def skip(self, partition: TopicPartition, offset: int, reason: str) -> str:
        """Skip a record; see `Pump.skip`."""
        lane = self._pump.lanes.get(partition)
        if lane is None:
            return "not assigned"
        tracker = lane.tracker
        if not lane.draining and tracker.is_open(offset):
            return self._end(lane, offset, reason)
        if offset < (tracker.position or 0) and not tracker.is_open(offset):
            return "ended already"
        self._coming[partition][offset] = reason
        return "will be skipped"

    def assigned(self, lane: Lane) -> None:
        """Forget what the group has passed."""
        self._far.pop(lane.partition, None)
        coming = self._coming.pop(lane.partition, {})
        self._coming[lane.partition] = {at: why for at, why in coming.items() if at >= lane.tracker.frontier}

    def forget(self, partition: TopicPartition) -> None:
        """Skip nothing of a partition that is not ours any more."""
        self._coming.pop(partition, None)
        self._far.pop(partition, None)

    def came(self, lane: Lane, records: Sequence[Record] = ()) -> None:
        """Skip what has come, or is not too far ahead any more, unless it had ended before this assignment."""
        if not lane.draining and (coming := self._coming.get(lane.partition)):
            far, limit = self._far[lane.partition], lane.tracker.frontier + SPAN_OFFSETS
            near = {offset for offset in far if offset < limit}
            far -= near
            for offset in sorted(near.union(record.offset for record in records)):
                if (reason := coming.pop(offset, None)) is not None and lane.tracker.is_open(offset):
                    self._end(lane, offset, reason)

    def _end(self, lane: Lane, offset: int, reason: str) -> str:
        if offset >= lane.tracker.frontier + SPAN_OFFSETS:
            self._coming[lane.partition][offset] = reason
            self._far[lane.partition].add(offset)
            return "will be skipped"
        record = lane.remove(offset)
        if record and not self._pump.let_go:
            self._ended(lane, record, reason)
            return "skipped"
        if record:  # else it is on its way already
            self._coming[lane.partition][offset] = reason  # should a seek have it come again before that is done
            self._pump.spawn(self._let_go(lane, record, reason), "skip")
        return "will be skipped"

    async def _let_go(self, lane: Lane, record: Record, reason: str) -> None:
        """End a record whose key waits for it elsewhere: that is told first, or the key would wait for ever."""
        pump = self._pump
        assert pump.let_go
        while not lane.draining:
            try:
                await pump.let_go(record)
            except DeadLetterFailed as failure:
                lane.waits(failure.description)
                await pump.clock.sleep(_AGAIN_SECONDS)
                continue
            if not lane.draining:
                self._coming[lane.partition].pop(record.offset, None)
                lane.moves()
                return self._ended(lane, record, reason)
        return None

    def _ended(self, lane: Lane, record: Record, reason: str) -> None:
        if lane.tracker.done([record.offset], lane.tracker.epoch):
            lane.head_since = self._pump.clock.time()
        lane.ended(())  # what is not too far ahead any more goes on
        self._pump.counts.skipped_by_hand += 1
        log.warning("%s: offset %d is skipped, as somebody said: %s", lane.label, record.offset, reason)
        self._over(lane, [record], f"skipped by hand: {reason}")
        self._pump.offer(lane)
