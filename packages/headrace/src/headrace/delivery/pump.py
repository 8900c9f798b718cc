"""The pump: takes records from a source, keeps a lane per partition, and commits only what is completed."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from headrace.config.consumers import DeliveryConfig
from headrace.delivery.breaker import Breaker
from headrace.delivery.lane import Lane
from headrace.delivery.limit import DeliveryRate
from headrace.delivery.outcomes import DeadLetterWriter, Destination, Membership, Outcome, Reply, Source, no_epoch
from headrace.delivery.pump_context import COMMIT_RECORDS, Counts, PumpContext, PumpHooks
from headrace.delivery.schedule import Deliverer
from headrace.delivery.seeks_and_skips import DRAIN_SECONDS, Seeks
from headrace.delivery.status import PumpStatus, SettingsInForce, status_of
from headrace.records import CommitOffsets, Committed, Epochs, Record, RecordBatch, TopicPartition
from headrace.runtime import Clock, Deadline, Readiness, Service
from headrace.runtime.chance import Random, new_random
from headrace.runtime.failpoints import reach

log = logging.getLogger(__name__)

_ACK_LOOK_SECONDS = 0.01
_COMMIT_TURN_SECONDS, _COMMIT_PAUSE_SECONDS = 0.01, 0.03
"""Time of the loop for commits, and the pause after it. The map of a partition with many records in flight takes a
millisecond."""


class Pump(Service):
    """Delivers the records of one group to one destination, at least once, in the configured order.

    It is the listener of a source: the source reports assignments and records, the pump reports what is completed. Call
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
        on_completed = hooks.on_completed or (shares_with.hooks.on_completed if shares_with else None)
        self.hooks: PumpHooks = hooks._replace(on_completed=on_completed)
        self.source: Source | None = None
        self._lanes: dict[TopicPartition, Lane] = {}
        self._shared = shares_with
        self._retries: list[Pump] = []
        self._context: PumpContext = self._make_context(name, group, delivery, clock, chance or new_random())
        self._deliverer = Deliverer(
            self._context,
            destination,
            dead_letters,
            epoch_of=(shares_with.epoch_of if shares_with else no_epoch) if hooks.replay else None,  # the live one's
            spawn=self.spawn,
            on_completed=self._completed,
            replay=hooks.replay,
            live=shares_with is None,
        )
        self._max_records = delivery.batch.max_records
        self._pauses: dict[TopicPartition | None, str] = {}
        self.seeks = Seeks(self, self._lanes, self._context, self.hooks)
        self._dirty: dict[TopicPartition, int] = {}
        """Records completed since the last commit, in the order in which the partitions were marked."""
        self._changed = asyncio.Event()

    def _make_context(
        self, name: str, group: str, delivery: DeliveryConfig, clock: Clock, chance: Random
    ) -> PumpContext:
        shared = self._shared
        delayed = self.hooks.delayed

        def begin() -> None:
            self._deliverer.begin()

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
        """Set the source of records; `member` is the same consumer, if seeks are possible."""
        self.source = source
        self.seeks.member = member

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._context.group

    @property
    def counts(self) -> Counts:
        """What it has done since it started."""
        return self._context.counts

    @property
    def breaker(self) -> Breaker:
        """The breaker of its destination."""
        return self._context.breaker

    @property
    def lanes(self) -> Mapping[TopicPartition, Lane]:
        """The lanes of the current assignment."""
        return self._lanes

    def numbers(self) -> dict[str, int]:
        """Return the counts by name, the records in flight, stalled partitions, and whether the breaker is open."""
        lanes = self._lanes.values()
        numbers = {
            "in_flight": sum(lane.tracker.in_flight_records for lane in lanes),
            "awaiting_ack": sum(len(lane.acks.awaiting_ack) for lane in lanes),
            "breaker_open": int(bool(self.breaker.waits_for)),
            "stalled_partitions": sum(bool(lane.stalled) for lane in lanes),
        }
        return {**self.counts.read(), **numbers}

    async def start(self) -> None:
        self.spawn(self._commit_often(), "commit")

    async def drain(self, deadline: Deadline) -> None:
        """Drain the partitions that a dead source has not revoked; nothing of them is committed."""
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
        # A partition may be assigned again without a revoke; two lanes would then deliver its records in any order.
        self._fence([lane for p in partitions if (lane := self._lanes.get(p)) and not lane.is_fenced])
        for partition, epoch in partitions.items():
            lane = self._lanes[partition] = self._make_lane(partition, epoch, committed.get(partition))
            lane.pause(self._pause_of(partition))
            self.seeks.assigned(lane)
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
            if completed := lane.add(RecordBatch.of(records)):
                self.counts.already_completed += len(completed)
                self._release(partition, completed)
            if completed or before not in (None, lane.tracker.commit_offset):
                self._mark(partition, len(completed or ()))
            if self.seeks.has_skips:
                self.seeks.begin_skips(lane)
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
        """Drain first, then fence: deliveries in flight may finish until the deadline; later results are ignored."""
        lanes = [self._lanes[partition] for partition in partitions if partition in self._lanes]
        self.counts.assignment_changes += bool(lanes)
        for lane in lanes:
            lane.drain()
        listener = self.hooks.partitions
        drained = None
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
        """Take an explicit acknowledgement; return why it is rejected, or an empty text.

        Completed records may be acknowledged again. With `up_to` it also acknowledges the delivered records before it.
        """
        lane = self._lanes.get(partition)
        if lane is None:
            return f"{partition} is not assigned to this process any more; its next owner will deliver the record again"
        self.complete_delivered(lane)
        tracker = lane.tracker
        is_waiting = tracker.is_in_flight(offset) and offset not in lane.acks.awaiting_ack
        if offset >= (tracker.position or 0) or (is_waiting and not lane.begun(offset)):
            return f"offset {offset} of {partition} was not delivered yet; acknowledge it when the handler has it"
        if lane.acknowledge(offset, up_to=up_to):
            self._deliverer.offer(lane)
        self._mark(partition)
        return ""

    async def _wait_for_acks(self, lanes: Sequence[Lane], deadline: Deadline) -> None:
        """Wait for late explicit acknowledgements, and complete what was acknowledged during its delivery."""
        clock = self._context.clock
        until = clock.monotonic() + min(self.hooks.acks.wait_seconds, deadline.remaining_seconds)
        while any(lane.acks.awaiting_ack for lane in lanes) and clock.monotonic() < until:
            await clock.sleep(_ACK_LOOK_SECONDS)
        for lane in lanes:
            lane.acks.complete_acked()

    # Live control ----------------------------------------------------------------------------------------------------

    def pause(self, partitions: Collection[TopicPartition] | None, why: str) -> None:
        """Begin nothing new in partitions; deliveries in flight finish and are committed.

        Records are still received, up to the limits of memory, and the membership continues. A pause stays with its
        partition in every later assignment of this process. None means all partitions and the retry topics.
        """
        self._pauses |= dict.fromkeys([None] if partitions is None else partitions, why)
        if partitions is None:
            for retries in self._retries:
                retries.pause(None, why)
        self.apply_pauses()

    def pause_like(self, earlier: "Pump") -> None:
        """Copy the pauses of a pump that this one replaces."""
        for partition, why in earlier._pauses.items():
            self.pause(None if partition is None else [partition], why)

    def resume(self, partitions: Collection[TopicPartition] | None) -> None:
        """End the pause of partitions. None ends the pause of all, and keeps those of single partitions."""
        for partition in [None] if partitions is None else partitions:
            self._pauses.pop(partition, None)
        if partitions is None:
            for retries in self._retries:
                retries.resume(None)
        self.apply_pauses()

    @property
    def settings(self) -> SettingsInForce:
        """The current settings."""
        batch, limit, rate = self._context.batch, self.breaker.limit, self._context.rate.records_per_second
        return SettingsInForce(rate, self._max_records, batch.max_bytes, batch.linger_seconds, limit.most)

    def change(self, settings: SettingsInForce) -> None:
        """Apply settings to new deliveries.

        A delivery has at most as many records as the rate allows in a second. The rate includes the retry topics.
        """
        rate = settings.rate_records
        self._max_records = settings.max_records
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
        """Return the status of each assigned partition; cheap enough to be called often."""
        for lane in self._lanes.values():
            self.complete_delivered(lane)
        partitions = {p: status_of(lane, self._context, self.seeks.member) for p, lane in self._lanes.items()}
        return PumpStatus(partitions, self.breaker.status)

    def commit_now(self, due: Sequence[TopicPartition] | None = None, most_seconds: float = math.inf) -> int:
        """Commit what was completed since the last commit, in all partitions or those `due`, for `most_seconds`.

        Return the number of partitions that were processed.
        """
        commits: dict[TopicPartition, Committed] = {}
        clock, looked_at = self._context.clock, 0
        until = clock.monotonic() + most_seconds
        for partition in [*self._dirty] if due is None else due:
            if commits and clock.monotonic() >= until:
                break
            looked_at += 1
            if partition not in self._dirty:  # revoked since
                continue
            lane = self._lanes[partition]
            self.complete_delivered(lane)
            del self._dirty[partition]
            if commit := lane.to_commit:
                commits[partition] = commit
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
        return self.seeks.reason(partition) or self._pauses.get(None) or self._pauses.get(partition, "")

    def apply_pauses(self) -> None:
        """Pause or resume the lanes after a reason has changed."""
        for partition, lane in self._lanes.items():
            lane.pause(self._pause_of(partition))
            self._deliverer.offer(lane)

    async def drain_lanes(self, lanes: Sequence[Lane], deadline: Deadline, why: str = "", fenced: str = "") -> None:
        """Begin nothing more, wait for deliveries in flight, and ignore results after the deadline."""
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
        """Abandon what is still in flight: late results are ignored, and the records will be delivered again."""
        for lane in lanes:
            self.complete_delivered(lane)
        if in_flight := sum([lane.fence(why) for lane in lanes]):
            self.counts.in_flight_at_revoke += in_flight
            log.warning("%s: in_flight_at_revoke=%d; these records will be delivered again", self.name, in_flight)

    def _completed(self, lane: Lane, records: RecordBatch, how: Outcome, replies: Sequence[Reply]) -> None:
        awaiting_ack = how is Outcome.AWAITING_ACK
        lane.complete(records, awaiting_ack=awaiting_ack)
        reach("ended.after")
        self._release(lane.partition, records)
        if how is not Outcome.HANDED_OFF and how is not Outcome.DELAYED:
            self.report(records, records.size_bytes, Outcome.DELIVERED if awaiting_ack else how, replies)
        self._mark(lane.partition, len(records))
        if self.seeks.has_skips:
            self.seeks.begin_skips(lane)

    def _release(self, partition: TopicPartition, records: RecordBatch) -> None:
        """Release the bytes of completed records."""
        if self.source:
            self.source.release(partition, len(records), records.size_bytes)

    def complete_delivered(self, lane: Lane) -> None:
        """Complete what was delivered of a lane, and was about to be completed a little later."""
        self._deliverer.complete_delivered(lane)

    def report(self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply]) -> None:
        """Report completed records to `on_completed`, in the form they have in their original topic."""
        hooks = self.hooks
        if hooks.on_completed:
            records = [hooks.delayed(record).origin for record in records] if hooks.delayed else records
            hooks.on_completed(records, size_bytes, how, replies, hooks.replay)

    def _mark(self, partition: TopicPartition, completed: int = 0) -> None:
        self._dirty[partition] = self._dirty.get(partition, 0) + completed
        self._changed.set()

    def _forget(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            # A source that timed out may have assigned the partition again, with another lane.
            if self._lanes.get(lane.partition) is lane:
                del self._lanes[lane.partition]
                self.seeks.forget(lane.partition)
                self._dirty.pop(lane.partition, None)

    async def _commit_often(self) -> None:
        clock, pace, all_since = self._context.clock, self.hooks.commits, -math.inf
        while True:
            await self._changed.wait()
            # A partition with few records waits until all are due.
            if (now := clock.monotonic()) - all_since >= pace.most_seconds - pace.seconds:
                all_since = now
                due = [*self._dirty]
            else:
                due = [partition for partition, records in self._dirty.items() if records >= COMMIT_RECORDS]
            if len(due) == len(self._dirty):
                self._changed.clear()
            # A replay counts what is completed at one moment, so its offsets must be of the same moment.
            most = math.inf if self.hooks.replay else _COMMIT_TURN_SECONDS
            while (done := self.commit_now(due, most)) < len(due):  # later marks wait for the next round
                due = due[done:]
                await clock.sleep(_COMMIT_PAUSE_SECONDS)
            await clock.sleep(pace.seconds)
