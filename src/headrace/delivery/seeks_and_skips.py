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

log = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
"""What is in flight when a seek or skip begins may take so long to end."""
_UNBLOCK_AGAIN_SECONDS = 1.0


class LaneOwner(Protocol):
    """The pump, as its moves use it."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine as a task."""

    async def drain_lanes(self, lanes: Sequence[Lane], deadline: Deadline, why: str = "", fenced: str = "") -> None:
        """Begin nothing more, wait for what is in flight, and ignore its results from the deadline on."""

    def apply_pauses(self) -> None:
        """Pause and resume lanes, after `reason` has changed."""

    def report(self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply]) -> None:
        """Report records that have ended."""


class Moves:
    """The seeks and skips of one pump."""

    def __init__(self, owner: LaneOwner, lanes: Mapping[TopicPartition, Lane], context: PumpContext, hooks: PumpHooks):
        """Prepare; `lanes` are those of the present assignment."""
        self.member: Membership | None = None
        """The consumer, if it has a group whose position can be moved."""
        self._owner = owner
        self._lanes = lanes
        self._context = context
        self._hooks = hooks
        self._skips: dict[TopicPartition, dict[int, str]] = defaultdict(dict)
        """Offsets to skip, each with the reason."""
        self._locks: dict[TopicPartition, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._rewinding: dict[TopicPartition, str] = {}

    def reason(self, partition: TopicPartition) -> str:
        """Return why a partition must not begin yet: a seek is not complete. Empty if it may."""
        return self._rewinding.get(partition, "")

    def assigned(self, lane: Lane) -> None:
        """Keep only the skips that are at or above the position of a new assignment."""
        skips = self._skips.pop(lane.partition, {})
        if left := {offset: why for offset, why in skips.items() if offset >= lane.tracker.frontier}:
            self._skips[lane.partition] = left

    def forget(self, partition: TopicPartition) -> None:
        """Drop the skips of a partition that is no longer assigned."""
        self._skips.pop(partition, None)

    async def seek(self, partition: TopicPartition, offset: int) -> bool:
        """Continue at another offset, exactly: no record from before it is delivered afterwards.

        Begins nothing new, waits for what is in flight (late results are ignored), commits the offset, and begins
        there in a new epoch. A second seek of a partition waits for the first. An offset that is out of range is met
        by what `on_gap` says. If cancelled, the seek may still happen.

        Returns:
            True once Kafka has acknowledged the commit; False if the partition is not assigned, or was lost meanwhile:
            then the seek may or may not have happened, and must be repeated where the partition is.

        Raises:
            InvalidRequest: That is no offset.
            OffsetsKeptElsewhere: The backend stores the offsets of this group.
        """
        if not 0 <= offset < 2**63:
            raise InvalidRequest(f"{partition} cannot continue at {offset}, which is no offset: name one that is there")
        if self.member and self.member.keeps_offsets_elsewhere:
            raise OffsetsKeptElsewhere(group=self._context.group)
        response = self._spawn_move(lambda response: self._seek(partition, offset, response), "seek")
        await asyncio.wait([response])
        return not response.cancelled()

    def skip(self, partition: TopicPartition, offset: int, reason: str) -> Coroutine[None, None, str]:
        """End a record without a delivery; the log has the reason.

        A skip is a seek to the same offset: its commit carries an offset map in which the record has ended. Attempts
        that hold the record are cancelled; what else is in flight may end first. Others that wait for their explicit
        acknowledgement are delivered again. A record that is not read yet, or beyond the span of the offset map, is
        skipped later, while the partition is assigned here. The request counts from the call on; await its result.

        Returns:
            "skipped", once Kafka has acknowledged the commit; "will be skipped"; "ended already"; "not assigned".
        """
        lane, known = self._lanes.get(partition), ""
        response: asyncio.Future[None] | None = None
        if lane is None:
            known = "not assigned"
        elif not lane.tracker.is_open(offset) and offset < (lane.tracker.position or 0):
            known = "ended already"
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
        """Begin to skip what was requested and is here; nothing of the lane begins from now on."""
        if not self._skips:
            return None
        partition, tracker = lane.partition, lane.tracker
        limit = tracker.frontier + SPAN_OFFSETS
        due = [offset for offset in self._skips.get(partition, ()) if offset < limit and tracker.is_open(offset)]
        if lane.condition.is_ending or not self.member:
            return None
        held = {offset: Record(*partition, offset, -1, None, None) for offset in due if offset in lane.acks.held}
        records = [record for offset in sorted(due) if (record := held.get(offset) or lane.find(offset))]
        if not records:
            return None
        lane.drain("a skip waits for what else is in flight")
        lane.in_flight.abandon(records)
        return self._spawn_move(lambda response: self._skip(lane, records, response), "skip")

    def deliver_again(self, partition: TopicPartition) -> None:
        """Deliver again what has begun and not ended: the memory of what was called for it is gone.

        It is a skip of no record, so what has ended behind it does not come again.
        """
        lane = self._lanes.get(partition)
        if lane is None or not (lane.acks.held or lane.in_flight):
            return
        lane.acks.held.clear()  # or the acknowledgement of a later record would end them
        if self.member and not lane.condition.is_ending:
            if self._hooks.partitions:
                self._hooks.partitions.draining([partition])
            lane.drain("its worker has ended: what waits for an acknowledgement is delivered again")
            self._spawn_move(lambda response: self._skip(lane, [], response), "deliver again")

    def _spawn_move(
        self, move: Callable[[asyncio.Future[None]], Coroutine[None, None, None]], name: str
    ) -> asyncio.Future[None]:
        """Run a seek or skip as a task of its own: a caller that is cancelled must not leave a partition drained.

        Returns a future that has a result once the commit is acknowledged, and is cancelled if it will not be.
        """
        response: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner.spawn(move(response), name).add_done_callback(lambda _: response.cancel())
        return response

    async def _seek(self, partition: TopicPartition, offset: int, response: asyncio.Future[None]) -> None:
        async with self._locks[partition]:
            lane, member = self._lanes.get(partition), self.member
            if not lane or not member:
                return
            reach("seek.before")
            self._skips.pop(partition, None)  # they are for records before the seek
            await self._owner.drain_lanes(
                [lane],
                Deadline(self._context.clock, DRAIN_SECONDS),
                f"a seek to offset {offset} waits for what is in flight",
                f"a seek to offset {offset} waits until Kafka has taken the commit of it",
            )
            if self._hooks.blocked_keys:
                self._rewinding[partition] = "a seek unblocks the keys of the records that come again"
            if await member.seek(partition, lane.tracker.epoch, Committed(offset)):
                log.warning("%s: continues at offset %d after a seek", lane.label, offset)
                if await self._rewind(partition, offset):
                    response.set_result(None)
            if self._rewinding.pop(partition, ""):
                self._owner.apply_pauses()

    async def _rewind(self, partition: TopicPartition, offset: int) -> bool:
        """Unblock the keys of the records that come again; return False if the partition was lost before."""
        lane, keys = self._lanes.get(partition), self._hooks.blocked_keys
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
        partition, tracker = lane.partition, lane.tracker
        deadline = Deadline(self._context.clock, DRAIN_SECONDS)
        async with self._locks[partition]:
            why = "a skip waits until Kafka has taken the commit of it"
            await self._owner.drain_lanes([lane], deadline, lane.condition.reason, why)
            for record in records:
                await self._unblock(lane, record)
            if self._lanes.get(partition) is not lane or not self.member:
                return
            left = [record for record in records if tracker.is_open(record.offset)]
            lane.acks.done([record.offset for record in left])
            commit, reasons = tracker.commit, dict(self._skips.get(partition, {}))
            if commit and await self.member.seek(partition, tracker.epoch, commit):
                for record in records:
                    self._skips.get(partition, {}).pop(record.offset, None)
                for record in left:
                    reason = reasons.get(record.offset, "")
                    self._context.counts.ended[Outcome.SKIPPED_BY_HAND] += 1
                    log.warning("%s: offset %d is skipped by hand: %s", lane.label, record.offset, reason)
                    self._owner.report([record], record.size_bytes, Outcome.SKIPPED_BY_HAND, [Reply(reason)])
                response.set_result(None)

    async def _unblock(self, lane: Lane, record: Record) -> None:
        """Unblock the key of a record before it ends, or the key would be blocked for ever."""
        while self._hooks.blocked_keys and self._lanes.get(lane.partition) is lane:
            try:
                return await self._hooks.blocked_keys.unblock(record)
            except DeadLetterFailed as failure:
                lane.fence(failure.description)
                await self._context.clock.sleep(_UNBLOCK_AGAIN_SECONDS)
        return None
