"""Changes of a partition's position on request: seeks and skips, each with a commit that Kafka acknowledges."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from headrace.delivery.lane import Lane
from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.delivery.outcomes import Membership, Outcome, Reply
from headrace.delivery.pump_context import PumpContext, PumpHooks
from headrace.errors import DeadLetterFailed, InvalidRequest, OffsetsKeptElsewhere
from headrace.records import Committed, Record, TopicPartition
from headrace.runtime import Deadline
from headrace.runtime.failpoints import reach
from headrace.runtime.telemetry.log_fields import record_fields

log = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
"""Longest wait for deliveries in flight when a seek or skip begins."""
_UNBLOCK_AGAIN_SECONDS = 1.0


class LaneOwner(Protocol):
    """The pump, as seeks and skips use it."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine as a task."""

    async def drain_lanes(self, lanes: Sequence[Lane], deadline: Deadline, why: str = "", fenced: str = "") -> None:
        """Begin nothing more, wait for deliveries in flight, and ignore results after the deadline."""

    def apply_pauses(self) -> None:
        """Pause or resume lanes after `reason` has changed."""

    def complete_delivered(self, lane: Lane) -> None:
        """Complete what was delivered of a lane, and was about to be completed a little later."""

    def report(self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply]) -> None:
        """Report completed records."""


class Seeks:
    """The seeks and skips of one pump."""

    def __init__(self, owner: LaneOwner, lanes: Mapping[TopicPartition, Lane], context: PumpContext, hooks: PumpHooks):
        """Prepare; `lanes` are those of the current assignment."""
        self.member: Membership | None = None
        """The consumer, if it has a group that can seek."""
        self._owner = owner
        self._lanes = lanes
        self._context = context
        self._hooks = hooks
        self._skips: dict[TopicPartition, dict[int, str]] = defaultdict(dict)
        """Offsets to skip, each with its reason."""
        self._locks: dict[TopicPartition, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._rewinding: dict[TopicPartition, str] = {}

    @property
    def has_skips(self) -> bool:
        """Whether skips are requested that have not begun, as their records are not here yet."""
        return bool(self._skips)

    def reason(self, partition: TopicPartition) -> str:
        """Return why a partition must not begin yet: a seek is not complete. Empty if it may begin."""
        return self._rewinding.get(partition, "")

    def assigned(self, lane: Lane) -> None:
        """Keep only the skips at or above the position of a new assignment."""
        skips = self._skips.pop(lane.partition, {})
        if left := {offset: why for offset, why in skips.items() if offset >= lane.tracker.frontier}:
            self._skips[lane.partition] = left

    def forget(self, partition: TopicPartition) -> None:
        """Drop the skips of a partition that is no longer assigned."""
        self._skips.pop(partition, None)

    async def seek(self, partition: TopicPartition, offset: int) -> bool:
        """Continue exactly at another offset: nothing that was read before the seek is delivered after it.

        Begins nothing new, waits for deliveries in flight (late results are ignored), commits the offset, and begins
        there in a new epoch. A second seek of a partition waits for the first. `on_gap` decides what happens at an
        offset that is out of range. If the call is cancelled, the seek may still happen.

        Returns:
            True once Kafka has acknowledged the commit; False if the partition is not assigned, or was lost meanwhile.
            Then the seek may have happened, and must be repeated by the process that has the partition.

        Raises:
            InvalidRequest: The offset is not valid.
            OffsetsKeptElsewhere: The backend stores the offsets of this group.
        """
        if not 0 <= offset < 2**63:
            raise InvalidRequest(f"{offset} is not a valid offset for {partition}; use an existing offset")
        if self.member and self.member.keeps_offsets_elsewhere:
            raise OffsetsKeptElsewhere(group=self._context.group)
        response = self._spawn_seek(lambda response: self._seek(partition, offset, response), "seek")
        await asyncio.wait([response])
        return not response.cancelled()

    def skip(self, partition: TopicPartition, offset: int, reason: str) -> Coroutine[None, None, str]:
        """Complete a record without a delivery; the log has the reason.

        A skip is a seek to the same offset: its commit has an offset map in which the record is completed. Deliveries
        of the record are cancelled; other deliveries in flight may finish first. Others that wait for their explicit
        acknowledgement are delivered again. A record that is not read yet, or is beyond the span of the offset map, is
        skipped later, while the partition is assigned here. The request counts from the call on; await its result.

        Returns:
            "skipped", once Kafka has acknowledged the commit; "will be skipped"; "already completed"; "not assigned".
        """
        lane = self._lanes.get(partition)
        if lane:
            self._owner.complete_delivered(lane)
        known = ""
        response: asyncio.Future[None] | None = None
        if lane is None:
            known = "not assigned"
        elif not lane.tracker.is_in_flight(offset) and offset < (lane.tracker.position or 0):
            known = "already completed"
        else:
            self._skips[partition][offset] = reason
            response = self.begin_skips(lane)

        async def result() -> str:
            if response:
                await asyncio.wait([response])
            if known or offset in self._skips.get(partition, ()):
                return known or "will be skipped"
            return "skipped" if response and not response.cancelled() else "not assigned"

        return result()

    def begin_skips(self, lane: Lane) -> asyncio.Future[None] | None:
        """Begin the requested skips of records that are here; nothing of the lane begins from now on."""
        partition, tracker = lane.partition, lane.tracker
        limit = tracker.frontier + SPAN_OFFSETS
        due = [offset for offset in self._skips.get(partition, ()) if offset < limit and tracker.is_in_flight(offset)]
        if lane.condition.is_ending or not self.member:
            return None
        awaiting_ack = lane.acks.awaiting_ack  # the lane no longer has these records
        acked_later = {offset: Record(*partition, offset, -1, None, None) for offset in due if offset in awaiting_ack}
        records = [record for offset in sorted(due) if (record := acked_later.get(offset) or lane.find(offset))]
        if not records:
            return None
        lane.drain("a skip waits for other deliveries in flight")
        lane.in_flight.abandon(records)
        return self._spawn_seek(lambda response: self._skip(lane, records, response), "skip")

    def deliver_again(self, partition: TopicPartition) -> None:
        """Deliver again what has begun and is not completed: its worker has ended, and with it what it knew.

        This is a skip of no record, so completed records are not delivered again.
        """
        lane = self._lanes.get(partition)
        if lane is None or not (lane.acks.awaiting_ack or lane.in_flight.each):
            return
        lane.acks.awaiting_ack.clear()  # or the acknowledgement of a later record would complete them
        if self.member and not lane.condition.is_ending:
            if self._hooks.partitions:
                self._hooks.partitions.draining([partition])
            lane.drain("its worker has ended; records that wait for an acknowledgement will be delivered again")
            self._spawn_seek(lambda response: self._skip(lane, [], response), "deliver again")

    def _spawn_seek(
        self, move: Callable[[asyncio.Future[None]], Coroutine[None, None, None]], name: str
    ) -> asyncio.Future[None]:
        """Run a seek or skip in its own task: a caller that is cancelled must not leave a partition drained.

        Returns a future that has a result once the commit is acknowledged, and is cancelled if that fails.
        """
        response: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner.spawn(move(response), name).add_done_callback(lambda _: response.cancel())
        return response

    async def _seek(self, partition: TopicPartition, offset: int, response: asyncio.Future[None]) -> None:
        async with self._locks[partition]:
            lane = self._lanes.get(partition)
            member = self.member
            if not lane or not member:
                return
            reach("seek.before")
            self._skips.pop(partition, None)  # they are for records before the seek
            await self._owner.drain_lanes(
                [lane],
                Deadline(self._context.clock, DRAIN_SECONDS),
                f"a seek to offset {offset} waits for deliveries in flight",
                f"a seek to offset {offset} waits for its commit",
            )
            if self._hooks.blocked_keys:
                self._rewinding[partition] = "a seek is unblocking the keys of the records that will be read again"
            if await member.seek(partition, lane.tracker.epoch, Committed(offset)):
                log.warning(
                    "%s: continues at offset %d after a seek", lane.label, offset, extra=lane.condition.log_fields
                )
                if await self._rewind(partition, offset):
                    response.set_result(None)
            if self._rewinding.pop(partition, ""):
                self._owner.apply_pauses()

    async def _rewind(self, partition: TopicPartition, offset: int) -> bool:
        """Unblock the keys of the records that will be read again; return False if the partition was lost before."""
        lane = self._lanes.get(partition)
        keys = self._hooks.blocked_keys
        while keys and lane and self._lanes.get(partition) is lane:
            try:
                await keys.rewind(partition, offset)
                break
            except DeadLetterFailed as failure:
                self._rewinding[partition] = failure.description
                lane.pause(failure.description)
                await self._context.clock.sleep(_UNBLOCK_AGAIN_SECONDS)
        return keys is None or (lane is not None and self._lanes.get(partition) is lane)

    async def _skip(self, lane: Lane, records: Sequence[Record], response: asyncio.Future[None]) -> None:
        partition = lane.partition
        tracker = lane.tracker
        deadline = Deadline(self._context.clock, DRAIN_SECONDS)
        async with self._locks[partition]:
            why = "a skip waits for its commit"
            await self._owner.drain_lanes([lane], deadline, lane.condition.reason, why)
            for record in records:
                await self._unblock(lane, record)
            if self._lanes.get(partition) is not lane or not self.member:
                return
            left = [record for record in records if tracker.is_in_flight(record.offset)]
            lane.acks.done([record.offset for record in left])
            commit = tracker.commit
            reasons = dict(self._skips.get(partition, {}))
            if commit and await self.member.seek(partition, tracker.epoch, commit):
                for record in records:
                    self._skips.get(partition, {}).pop(record.offset, None)
                for record in left:
                    reason = reasons.get(record.offset, "")
                    self._context.counts.completed[Outcome.SKIPPED_BY_HAND] += 1
                    fields = record_fields(self._context.group, partition, record=record)
                    log.warning("%s: skipped offset %d by hand: %s", lane.label, record.offset, reason, extra=fields)
                    self._owner.report([record], record.size_bytes, Outcome.SKIPPED_BY_HAND, [Reply(reason)])
                response.set_result(None)

    async def _unblock(self, lane: Lane, record: Record) -> None:
        """Unblock the key of a record before it is completed, or the key would stay blocked."""
        while self._hooks.blocked_keys and self._lanes.get(lane.partition) is lane:
            try:
                return await self._hooks.blocked_keys.unblock(record)
            except DeadLetterFailed as failure:
                lane.fence(failure.description)
                await self._context.clock.sleep(_UNBLOCK_AGAIN_SECONDS)
        return None
