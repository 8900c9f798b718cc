"""The pump: takes records from a source, keeps a lane per partition, and commits what has ended and nothing else."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random

from headrace.config.consumers import DeliveryConfig
from headrace.delivery.breaker import Breaker
from headrace.delivery.lane import Lane
from headrace.delivery.limit import DeliveryRate
from headrace.delivery.outcomes import DeadLetterWriter, Destination, Membership, Outcome, Reply, Source, no_epoch
from headrace.delivery.pump_context import Counts, PumpContext, PumpHooks
from headrace.delivery.schedule import Deliverer
from headrace.delivery.seeks_and_skips import DRAIN_SECONDS, Moves
from headrace.delivery.status import PumpStatus, SettingsInForce, status_of
from headrace.records import CommitOffsets, Committed, Epochs, Record, RecordBatch, TopicPartition
from headrace.runtime import Clock, Deadline, Readiness, Service
from headrace.runtime.failpoints import reach

log = logging.getLogger(__name__)

_ACK_LOOK_SECONDS = 0.01
_COMMIT_TURN_SECONDS, _COMMIT_PAUSE_SECONDS = 0.01, 0.03
"""Time of the loop for commits, and the pause after it: the map of a partition with many open records takes a
millisecond."""


class Pump(Service):
    """Delivers the records of one group to one destination, at least once, in the configured order.

    It is the listener of a source: the source reports assignments and records, the pump reports what has ended. Call
    `connect` before the source starts.
    """

    def __init__(  # noqa: PLR0913 every part that a pump connects
        self,
        name: str,
        group: str,
        destination: Destination,
        dead_letters: DeadLetterWriter | None,
        *,
        delivery: DeliveryConfig,
        clock: Clock,
        chance: Random | None = None,
        shares_with: "Pump | None" = None,
        hooks: PumpHooks | None = None,
    ) -> None:
        """Prepare; `shares_with` shares breaker and limit. Without `dead_letters` a lasting failure stops a lane."""
        super().__init__(name)
        hooks = hooks or PumpHooks()
        ended = hooks.on_ended or (shares_with.hooks.on_ended if shares_with else None)
        self.hooks: PumpHooks = hooks._replace(on_ended=ended)
        self.source: Source | None = None
        self._lanes: dict[TopicPartition, Lane] = {}
        self._shared, self._retries = shares_with, list[Pump]()
        self._context: PumpContext = self._make_context(name, group, delivery, clock, chance or Random())
        self._deliverer = Deliverer(
            self._context,
            destination,
            dead_letters,
            epoch_of=(shares_with.epoch_of if shares_with else no_epoch) if hooks.replay else None,  # the live one's
            spawn=self.spawn,
            on_ended=self._ended,
            replay=hooks.replay,
            live=shares_with is None,
        )
        self._max_records = delivery.batch.max_records
        self._pauses: dict[TopicPartition | None, str] = {}
        self.moves = Moves(self, self._lanes, self._context, self.hooks)  # seeks and skips
        self._dirty: dict[TopicPartition, None] = {}  # in the order they were marked
        self._changed = asyncio.Event()

    def _make_context(
        self, name: str, group: str, delivery: DeliveryConfig, clock: Clock, chance: Random
    ) -> PumpContext:
        shared, delayed, begin = self._shared, self.hooks.delayed, lambda: self._deliverer.begin()
        breaker = shared.breaker if shared else Breaker(name, delivery, clock, chance, self._later, begin)
        if shared and delayed:
            shared._retries.append(self)
            rate = shared._context.rate
            rate.share(begin)
        else:
            rate = DeliveryRate(clock, self._later, begin)
        hooks = self.hooks
        return PumpContext(
            group,
            delivery.ordering,
            delivery.batch,
            delivery.retry,
            clock,
            chance,
            Counts(),
            breaker,
            rate,
            self._lanes,
            self._later,
            delayed,
            hooks.most_records,
            hooks.acks.window,
        )

    def connect(self, source: Source, member: Membership | None = None) -> None:
        """Set where records come from; `member` is the same consumer, if it has a group that can be moved."""
        self.source, self.moves.member = source, member

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._context.group

    @property
    def counts(self) -> Counts:
        """What it has done since it began."""
        return self._context.counts

    @property
    def breaker(self) -> Breaker:
        """The breaker of its destination."""
        return self._context.breaker

    @property
    def lanes(self) -> Mapping[TopicPartition, Lane]:
        """The lanes of the present assignment."""
        return self._lanes

    def numbers(self) -> dict[str, int]:
        """Return the counts by name, the numbers of `open` and `held` records, and whether the breaker is open."""
        lanes = self._lanes.values()
        numbers = {
            "open": sum(lane.tracker.open_records for lane in lanes),
            "held": sum(len(lane.acks.held) for lane in lanes),
            "breaker_open": int(bool(self.breaker.waits_for)),
        }
        return {**self.counts.read(), **numbers}

    async def start(self) -> None:
        self.spawn(self._commit_often(), "commit")

    async def drain(self, deadline: Deadline) -> None:
        """Drain what the source has not taken away, because it has died; nothing of it is committed."""
        if self._lanes:
            await self.on_revoked([*self._lanes], deadline)

    async def stop(self) -> None:
        self._fence(list(self._lanes.values()))
        await super().stop()
        self._deliverer.close()

    def readiness(self) -> Readiness:
        """Return which partition has not moved for a while, and why."""
        for partition, lane in self._lanes.items():
            if why := lane.stalled:
                return Readiness(False, f"{partition} is stalled: {why}")
        return Readiness(True)

    def epoch_of(self, partition: TopicPartition) -> int:
        """Return the epoch of a partition's assignment; 0 if it is not assigned here."""
        lane = self._lanes.get(partition)
        return lane.tracker.epoch if lane and not lane.is_fenced else 0

    # The listener of the source --------------------------------------------------------------------------------------

    def on_assigned(self, partitions: Epochs, committed: CommitOffsets) -> None:
        self.counts.assignment_changes += bool(partitions)
        # A partition can be assigned again without a revoke before: two lanes would deliver its records in any order.
        self._fence([lane for p in partitions if (lane := self._lanes.get(p)) and not lane.is_fenced])
        for partition, epoch in partitions.items():
            lane = self._lanes[partition] = self._make_lane(partition, epoch, committed.get(partition))
            lane.pause(self._pause_of(partition))
            self.moves.assigned(lane)
        if self.hooks.partitions:
            self.hooks.partitions.assigned(partitions.keys())

    def _make_lane(self, partition: TopicPartition, epoch: int, at: Committed | None) -> Lane:
        return Lane(partition, epoch, at, self._context, self._deliverer.offer)

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        lane = self._lanes.get(partition)
        if lane and lane.tracker.epoch == epoch:
            reach("enqueue.before")
            self.counts.taken += len(records)
            before = lane.tracker.commit_offset
            if ended := lane.add(RecordBatch.of(records)):
                self.counts.already_completed += len(ended)
                self._release(partition, ended)
            if ended or before not in (None, lane.tracker.commit_offset):
                self._mark(partition)
            self.moves.begin_skips(lane)
            self._deliverer.offer(lane)
            reach("enqueue.after")

    def on_end(self, partition: TopicPartition, epoch: int, position: int) -> None:
        lane = self._lanes.get(partition)
        if lane and lane.tracker.epoch == epoch and lane.tracker.end_reached(position):
            self._mark(partition)

    def on_gap(self, partition: TopicPartition, offsets: int) -> None:
        self.counts.gap += offsets

    async def on_revoked(
        self, partitions: Sequence[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, Committed]:
        """Drain first, fence second: what is in flight may end until the deadline, then late results are ignored."""
        lanes = [self._lanes[partition] for partition in partitions if partition in self._lanes]
        self.counts.assignment_changes += bool(lanes)
        for lane in lanes:
            lane.drain()
        listener, drained = self.hooks.partitions, None
        if listener:
            listener.draining(partitions)
            drained = self.spawn(listener.drained(partitions, deadline), "drained")
        await self.drain_lanes(lanes, deadline)
        if drained:
            await asyncio.wait([drained])
        await self._wait_for_acks(lanes, deadline)
        commits = {lane.partition: commit for lane in lanes if (commit := lane.to_commit)}
        self.counts.commits += len(commits)
        self._forget(lanes)
        return commits

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        lanes = [self._lanes[partition] for partition in partitions if partition in self._lanes]
        self.counts.assignment_changes += bool(lanes)
        self._fence(lanes)
        self._forget(lanes)
        if self.hooks.partitions:
            deadline = Deadline(self._context.clock, DRAIN_SECONDS)
            self.spawn(self.hooks.partitions.drained(partitions, deadline), "drained")

    def acknowledge(self, partition: TopicPartition, offset: int, *, up_to: bool) -> str:
        """Take an explicit acknowledgement; return why that is not possible, empty if it is.

        What has ended may be acknowledged again. With `up_to` it counts for the delivered records before it, too.
        """
        lane = self._lanes.get(partition)
        if lane is None:
            return f"{partition} is not assigned to this process any more: its next owner is delivered the record again"
        tracker = lane.tracker
        open_here = tracker.is_open(offset) and offset not in lane.acks.held
        if offset >= (tracker.position or 0) or (open_here and not lane.begun(offset)):
            return f"offset {offset} of {partition} was not delivered yet: acknowledge it when the handler has it"
        if lane.acknowledge(offset, up_to=up_to):
            self._deliverer.offer(lane)
        self._mark(partition)
        return ""

    async def _wait_for_acks(self, lanes: Sequence[Lane], deadline: Deadline) -> None:
        """Wait for late explicit acknowledgements, and end what was acknowledged in flight."""
        clock = self._context.clock
        until = clock.monotonic() + min(self.hooks.acks.wait_seconds, deadline.remaining_seconds)
        while any(lane.acks.held for lane in lanes) and clock.monotonic() < until:
            await clock.sleep(_ACK_LOOK_SECONDS)
        for lane in lanes:
            lane.acks.end_acked()

    # Live control ----------------------------------------------------------------------------------------------------

    def pause(self, partitions: Collection[TopicPartition] | None, why: str) -> None:
        """Begin nothing new in partitions; what is in flight ends and is committed.

        Records are still taken, up to the bounds of memory, and the membership continues. A pause stays with its
        partition through every assignment in this process. None is all, also those assigned later, and retry topics.
        """
        self._pauses |= dict.fromkeys([None] if partitions is None else partitions, why)
        if partitions is None:
            for retries in self._retries:
                retries.pause(None, why)
        self.apply_pauses()

    def pause_like(self, earlier: "Pump") -> None:
        """Keep the pauses of a pump that this one replaces."""
        for partition, why in earlier._pauses.items():
            self.pause(None if partition is None else [partition], why)

    def resume(self, partitions: Collection[TopicPartition] | None) -> None:
        """End a pause: that of the whole, which leaves those of single partitions, or those of partitions."""
        for partition in [None] if partitions is None else partitions:
            self._pauses.pop(partition, None)
        if partitions is None:
            for retries in self._retries:
                retries.resume(None)
        self.apply_pauses()

    @property
    def settings(self) -> SettingsInForce:
        """How much is delivered, as it was set last."""
        batch, limit, rate = self._context.batch, self.breaker.limit, self._context.rate.records_per_second
        return SettingsInForce(rate, self._max_records, batch.max_bytes, batch.linger_seconds, limit.most)

    def change(self, settings: SettingsInForce) -> None:
        """Deliver so much from now on; what is in flight is not touched.

        A delivery holds no more than a second's worth of the rate, which is kept together with the retry topics.
        """
        rate, self._max_records = settings.rate_records, settings.max_records
        portion = min(settings.max_records, max(1, int(rate))) if rate else settings.max_records
        values = {"max_bytes": settings.max_bytes, "linger_seconds": settings.linger_seconds}
        self._context.batch = self._context.batch.model_copy(update={"max_records": portion, **values})
        self.breaker.limit.change(settings.max_in_flight)
        self.breaker.resize(portion)
        self._context.rate.change(rate)  # which may begin deliveries
        for lane in self._lanes.values():
            lane.linger()
            self._deliverer.offer(lane)

    def status(self) -> PumpStatus:
        """Return the status of each partition of the present assignment; cheap enough to be called often."""
        partitions = {p: status_of(lane, self._context, self.moves.member) for p, lane in self._lanes.items()}
        return PumpStatus(partitions, self.breaker.status)

    def commit_now(self, most_seconds: float = math.inf) -> int:
        """Report to the source what has ended since the last call, for at most so long.

        Return how many partitions it looked at, those first that were marked first.
        """
        commits: dict[TopicPartition, Committed] = {}
        clock, marked = self._context.clock, len(self._dirty)
        until = clock.monotonic() + most_seconds
        while self._dirty and (not commits or clock.monotonic() < until):
            partition = next(iter(self._dirty))
            del self._dirty[partition]
            if commit := self._lanes[partition].to_commit:
                commits[partition] = commit
        looked_at = marked - len(self._dirty)
        if commits:
            self.counts.commits += len(commits)
            self._commit(commits)
        return looked_at

    def _commit(self, offsets: CommitOffsets) -> None:
        if self.source:
            self.source.commit(offsets)

    # -----------------------------------------------------------------------------------------------------------------

    def _later(self, seconds: float, call: Callable[[], None]) -> asyncio.Task[None]:
        async def call_later() -> None:
            await self._context.clock.sleep(seconds)
            call()

        return self.spawn(call_later(), "pause")

    def _pause_of(self, partition: TopicPartition) -> str:
        return self.moves.reason(partition) or self._pauses.get(None) or self._pauses.get(partition, "")

    def apply_pauses(self) -> None:
        """Pause and resume the lanes, after a reason for it has changed."""
        for partition, lane in self._lanes.items():
            lane.pause(self._pause_of(partition))
            self._deliverer.offer(lane)

    async def drain_lanes(self, lanes: Sequence[Lane], deadline: Deadline, why: str = "", fenced: str = "") -> None:
        """Begin nothing more, wait for what is in flight, and ignore its results from the deadline on."""
        for lane in lanes:
            lane.drain(why)
        reach("drain.before")
        for lane in lanes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline.remaining_seconds):  # wait_for may lose a cancellation
                    await lane.in_flight.idle.wait()
        self._fence(lanes, fenced)
        reach("drain.fenced")

    def _fence(self, lanes: Sequence[Lane], why: str = "") -> None:
        """End what has not ended by now; its late results are ignored, and its records are delivered again."""
        if in_flight := sum([lane.fence(why) for lane in lanes]):
            self.counts.in_flight_at_revoke += in_flight
            log.warning("%s: in_flight_at_revoke=%d; these records will be delivered again", self.name, in_flight)

    def _ended(self, lane: Lane, records: RecordBatch, how: Outcome, replies: Sequence[Reply]) -> None:
        held = how is Outcome.HELD
        lane.ended(records, held=held)
        reach("ended.after")
        self._release(lane.partition, records)
        if how is not Outcome.HANDED_OFF and how is not Outcome.DELAYED:
            self.report(records, records.size_bytes, Outcome.DELIVERED if held else how, replies)
        self._mark(lane.partition)
        self.moves.begin_skips(lane)

    def _release(self, partition: TopicPartition, records: RecordBatch) -> None:
        """Release the bytes of records that have ended."""
        if self.source:
            self.source.release(partition, len(records), records.size_bytes)

    def report(self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply]) -> None:
        """Report records that have ended to who wants to know, as the records they were at first."""
        hooks = self.hooks
        if hooks.on_ended:
            records = [hooks.delayed(record).origin for record in records] if hooks.delayed else records
            hooks.on_ended(records, size_bytes, how, replies, hooks.replay)

    def _mark(self, partition: TopicPartition) -> None:
        self._dirty[partition] = None
        self._changed.set()

    def _forget(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            # A source that gave up waiting may have assigned the partition anew: then the lane there is another one.
            if self._lanes.get(lane.partition) is lane:
                del self._lanes[lane.partition]
                self.moves.forget(lane.partition)
                self._dirty.pop(lane.partition, None)

    async def _commit_often(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            # A replay counts what has ended at one moment, so its offsets must be of one moment.
            most = math.inf if self.hooks.replay else _COMMIT_TURN_SECONDS
            left = len(self._dirty)  # what is marked from now on waits for the next round
            while self._dirty and (left := left - self.commit_now(most)) > 0:
                await self._context.clock.sleep(_COMMIT_PAUSE_SECONDS)
            await self._context.clock.sleep(self.hooks.commit_seconds)
