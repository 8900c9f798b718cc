"""The pump: takes records from a source, keeps a lane per partition, and commits what has ended and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from random import Random

from headrace.config.consumers import DeliveryConfig
from headrace.delivery.attempt import Attempts, Counts
from headrace.delivery.breaker import Breaker
from headrace.delivery.dispatcher import Dispatcher
from headrace.delivery.lane import Lane
from headrace.delivery.live import LiveSettings, PumpStatus, status_of
from headrace.delivery.protocols import DeadLetterWriter, Destination, Membership, Outcome, Source, Waiting, Witness
from headrace.delivery.rate import Rate
from headrace.delivery.skips import Skips
from headrace.errors import InvalidRequest, OffsetsKeptElsewhere
from headrace.lifecycle import Clock, Deadline, Readiness, Service
from headrace.lifecycle.failpoints import reach
from headrace.records import Committed, Record, TopicPartition

log = logging.getLogger(__name__)

_COMMIT_SECONDS = 0.2
_COMMIT_TURN_SECONDS, _COMMIT_PAUSE_SECONDS = 0.01, 0.03
"""Of the loop, and how long it is left to others then: the map of a partition with much open takes a millisecond."""


class Pump(Service):
    """Delivers the records of one group to one destination, at least once, in the order that was chosen.

    It is the listener of a source: the source tells it of assignments and records, it tells the source what has
    ended. Set `source` before the source starts.
    """

    waiting: Callable[[Record], Waiting] | None = None
    """Tells what a record of a retry tier is, if this one delivers from the tiers. Set before start."""
    replay: str = ""
    """Id of the job, if this one delivers once more what the group has had. Set before start."""
    source: Source | None = None
    member: Membership | None = None
    """The same consumer as `source`, if it has a group whose place can be changed. Set before start."""
    retries: Pump | None = None
    """The pump that delivers from the retry tiers of this one, if there are any."""
    first_of: Callable[[Record], Record] | None = None
    """Returns a record as it lay where it came from at first, if these are copies. Set before start."""
    let_go: Callable[[Record], Awaitable[None]] | None = None
    """Tells a key that waits for a record elsewhere that it is skipped. Set before start."""
    on_drained: Callable[[Collection[TopicPartition], Deadline], Coroutine[None, None, None]] | None = None
    """Called before partitions are given up, when nothing of them is in flight, and after they were lost. Set before
    start."""
    drain_seconds: float = 20.0
    """What is in flight when a seek comes may end for so long."""

    def __init__(
        self,
        name: str,
        group: str,
        destination: Destination,
        dead_letters: DeadLetterWriter | None,
        *,
        delivery: DeliveryConfig,
        clock: Clock,
        chance: Random | None = None,
        beside: Pump | None = None,
    ) -> None:
        """Prepare.

        Args:
            name: Name of the service.
            group: The consumer group.
            destination: Where records are delivered.
            dead_letters: Where those go that failed; without it their partition stands still.
            delivery: Order, portions, attempts.
            clock: Time.
            chance: Jitter of pauses.
            beside: Another pump that delivers to the same destination, so that they share what is known of it.
        """
        super().__init__(name)
        self.group = group
        self.destination = destination
        self.dead_letters = dead_letters
        self.ordering = delivery.ordering
        self.ordered_null_keys = delivery.null_keys == "ordered"
        self.batch = delivery.batch
        self.retry = delivery.retry
        self.clock = clock
        self.chance = chance or Random()
        self.counts = Counts()
        self.witness: Witness | None = beside.witness if beside else None
        """Told of what has ended. Set before start."""
        self._beside = beside
        self._lanes: dict[TopicPartition, Lane] = {}
        self.breaker: Breaker = (
            beside.breaker if beside else Breaker(name, delivery, clock, self.chance, self.later, self._begin)
        )
        self.rate = Rate(clock, self.later, self._begin)
        attempt = Attempts(self, self._ended).make
        self._dispatcher = Dispatcher(self.breaker, self.rate, self._lanes, attempt, self.spawn, live=not beside)
        self._max_records = delivery.batch.max_records
        self._hold = ""
        self._holds: dict[TopicPartition, str] = {}
        self._skips = Skips(self, self._over)
        self._seeks: dict[TopicPartition, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._dirty: dict[TopicPartition, None] = {}  # in the order they were marked
        self._changed = asyncio.Event()

    @property
    def lanes(self) -> Mapping[TopicPartition, Lane]:
        """The lanes of the present assignment."""
        return self._lanes

    def numbers(self) -> dict[str, int]:
        """Return the counts by name, and what is so now: `open` records, and whether the breaker is open."""
        open_records = sum(lane.tracker.open_records for lane in self._lanes.values())
        return {**self.counts.read(), "open": open_records, "breaker_open": int(bool(self.breaker.waits_for))}

    async def start(self) -> None:
        self.spawn(self._commit_often(), "commit")

    async def stop(self) -> None:
        self._fence(list(self._lanes.values()))
        await super().stop()
        self._dispatcher.close()

    def readiness(self) -> Readiness:
        """Say which partitions have stood still for a while, and why."""
        for partition, lane in self._lanes.items():
            if lane.standing:
                return Readiness(False, f"{partition} stands still: {lane.standing}")
        return Readiness(True)

    def epoch_of(self, partition: TopicPartition) -> int:
        """Return the epoch of a partition's assignment; 0 if it is not assigned here."""
        lane = self._lanes.get(partition)
        return lane.tracker.epoch if lane and not lane.fenced else 0

    def delivery_epoch(self, lane: Lane) -> int:
        """Return the epoch that deliveries of a lane carry: in a replay that of the live assignment."""
        if not self.replay:
            return lane.tracker.epoch
        return self._beside.epoch_of(lane.partition) if self._beside else 0

    def serve_tiers(self, tiers: Pump) -> None:
        """Have another pump deliver from the retry tiers of this one, under its holds and its rate. Before start."""
        self.retries = tiers
        tiers.rate = tiers._dispatcher.rate = self.rate
        self.rate.share(tiers._begin)

    # The listener of the source --------------------------------------------------------------------------------------

    def on_assigned(
        self, partitions: Mapping[TopicPartition, int], committed: Mapping[TopicPartition, Committed]
    ) -> None:
        # A partition can be assigned again without a revoke before: two lanes would deliver its records in any order.
        self._fence([lane for p in partitions if (lane := self._lanes.get(p)) and not lane.fenced])
        for partition, epoch in partitions.items():
            lane = self._lanes[partition] = Lane(partition, epoch, committed.get(partition), self)
            lane.held = self._held(partition)
            self._skips.assigned(lane)

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        lane = self._lanes.get(partition)
        if lane and lane.tracker.epoch == epoch:
            reach("enqueue.before")
            self.counts.taken += len(records)
            if ended := lane.add(records):
                self.counts.spared += len(ended)
                self._release(partition, ended)
                self._mark(partition)
            self._skips.came(lane, records)
            self.offer(lane)
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
        """Drain first, fence second: what is in flight may end until the deadline, then late results mean nothing."""
        lanes = [self._lanes[partition] for partition in partitions if partition in self._lanes]
        await self._drain(lanes, deadline)
        if lanes and self.on_drained:
            await self.on_drained(partitions, deadline)
        commits = {lane.partition: commit for lane in lanes if (commit := lane.tracker.commit)}
        self._forget(lanes)
        return commits

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        lanes = [self._lanes[partition] for partition in partitions if partition in self._lanes]
        self._fence(lanes)
        self._forget(lanes)
        if lanes and self.on_drained:
            self.spawn(self.on_drained(partitions, Deadline(self.clock, self.drain_seconds)), "drained")

    # Live control ----------------------------------------------------------------------------------------------------

    def hold(self, partitions: Collection[TopicPartition] | None, why: str) -> None:
        """Begin nothing new in partitions; what is under way ends and is committed.

        Records are still taken, up to the bounds of memory, and the membership goes on. A hold stays with its partition
        through every assignment in this process.

        Args:
            partitions: Which; None for all, also those assigned later, and for the retry tiers of this pump.
            why: What the status is to say, a sentence.
        """
        if partitions is None:
            self._hold = why
            if self.retries:
                self.retries.hold(None, why)
        else:
            self._holds |= dict.fromkeys(partitions, why)
        self._apply_holds()

    def release_hold(self, partitions: Collection[TopicPartition] | None) -> None:
        """Take back a hold: that of the whole, which leaves those of single partitions, or those of partitions."""
        if partitions is None:
            self._hold = ""
            if self.retries:
                self.retries.release_hold(None)
        for partition in partitions or ():
            self._holds.pop(partition, None)
        self._apply_holds()

    async def seek(self, partition: TopicPartition, offset: int) -> bool:
        """Go on at another offset, exactly: nothing from before it comes after it.

        Begins nothing new, waits for what is under way (what then still is means nothing), commits the offset, and
        begins there in a new epoch. A second seek of a partition waits for the first. An offset that is out of range
        is met by what `on_gap` says. If cancelled, the seek may still happen.

        Returns:
            True once Kafka has acknowledged the commit; False if the partition is not ours, or was lost meanwhile: then
            the seek may or may not have happened, and is to be repeated where the partition is.

        Raises:
            InvalidRequest: That is no offset.
            OffsetsKeptElsewhere: The backend says where this group goes on.
        """
        if not 0 <= offset < 2**63:
            raise InvalidRequest(f"{partition} cannot go on at {offset}, which is no offset: name one that is there")
        if self.member and self.member.keeps_offsets_elsewhere:
            raise OffsetsKeptElsewhere(group=self.group)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # A task of its own: a caller that gives up must not leave a partition that has drained and goes on nowhere.
        seek = self.spawn(self._seek(partition, offset, answer), "seek")
        seek.add_done_callback(lambda _: answer.cancel())
        await asyncio.wait([answer])
        return not answer.cancelled()

    def skip(self, partition: TopicPartition, offset: int, reason: str) -> str:
        """End a record without a delivery, wherever it is; the log has the reason.

        An attempt under way is given up for this record, and its others are delivered again. It is committed within a
        moment; so whoever must be sure says it again in each assignment, until the committed offset has passed it.

        Returns:
            "skipped"; "will be skipped", when it comes from Kafka; "ended already"; "not assigned".
        """
        return self._skips.skip(partition, offset, reason)

    @property
    def settings(self) -> LiveSettings:
        """How much is delivered, as it was said last."""
        batch, limit = self.batch, self.breaker.limit
        return LiveSettings(
            self.rate.records_per_second, self._max_records, batch.max_bytes, batch.linger_seconds, limit.most
        )

    def change(self, settings: LiveSettings) -> None:
        """Deliver so much from now on; what is under way is not touched.

        A delivery holds no more than a second's worth of the rate, which is kept together with the retry tiers.
        """
        rate, self._max_records = settings.rate_records, settings.max_records
        portion = min(settings.max_records, max(1, int(rate))) if rate else settings.max_records
        values = {"max_bytes": settings.max_bytes, "linger_seconds": settings.linger_seconds}
        self.batch = self.batch.model_copy(update={"max_records": portion, **values})
        self.breaker.limit.change(settings.max_in_flight)
        self.breaker.resize(portion)
        self.rate.change(rate)  # which may begin deliveries
        for lane in self._lanes.values():
            lane.change()
            self.offer(lane)

    def status(self) -> PumpStatus:
        """Return where each partition of the present assignment stands, and why; cheap enough to be asked often."""
        partitions = {p: status_of(lane, self, self.member) for p, lane in self._lanes.items()}
        return PumpStatus(partitions, self.breaker.status)

    # The rules of the lanes ------------------------------------------------------------------------------------------

    def later(self, seconds: float, call: Callable[[], None]) -> asyncio.Task[None]:
        return self.spawn(self._call_later(seconds, call), "pause")

    def offer(self, lane: Lane) -> None:
        self._dispatcher.offer(lane)

    # -----------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._dispatcher.begin()

    async def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        await self.clock.sleep(seconds)
        call()

    def _held(self, partition: TopicPartition) -> str:
        return self._hold or self._holds.get(partition, "")

    def _apply_holds(self) -> None:
        for partition, lane in self._lanes.items():
            lane.held = self._held(partition)
            self.offer(lane)

    async def _seek(self, partition: TopicPartition, offset: int, answer: asyncio.Future[bool]) -> None:
        async with self._seeks[partition]:
            lane, member = self._lanes.get(partition), self.member
            if not lane or not member:
                return
            reach("seek.before")
            lane.leaves = f"a seek to offset {offset} waits for what is in flight"
            await self._drain([lane], Deadline(self.clock, self.drain_seconds))
            lane.leaves = f"a seek to offset {offset} waits until Kafka has taken the commit of it"
            if await member.seek(partition, lane.tracker.epoch, offset):
                log.warning("%s: goes on at offset %d, as somebody said", lane.label, offset)
                answer.set_result(True)

    async def _drain(self, lanes: Sequence[Lane], deadline: Deadline) -> None:
        """Begin nothing more, wait for what is in flight, and let it mean nothing from the deadline on."""
        for lane in lanes:
            lane.drain()
        reach("drain.before")
        for lane in lanes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lane.idle.wait(), deadline.remaining_seconds)
        self._fence(lanes)
        reach("drain.fenced")

    def _fence(self, lanes: Sequence[Lane]) -> None:
        """End what has not ended by now; its late results mean nothing, and its records come again elsewhere."""
        if abandoned := sum([lane.fence() for lane in lanes]):
            self.counts.abandoned += abandoned
            log.warning("%s: abandoned=%d records in flight; they will be delivered again", self.name, abandoned)

    def _ended(self, lane: Lane, records: Sequence[Record], how: str, outcomes: Sequence[Outcome]) -> None:
        if lane.tracker.done([record.offset for record in records], lane.tracker.epoch):
            lane.head_since = self.clock.time()
        reach("ended.after")
        lane.ended(records)
        self._over(lane, records, how, outcomes)

    def _over(self, lane: Lane, records: Sequence[Record], how: str, outcomes: Sequence[Outcome] = ()) -> None:
        self._release(lane.partition, records, how, outcomes)
        self._mark(lane.partition)
        self._skips.came(lane)

    def _release(
        self, partition: TopicPartition, records: Sequence[Record], how: str = "", outcomes: Sequence[Outcome] = ()
    ) -> None:
        """Give back the room of records that have ended; those that have ended in a way of their own are told of."""
        size_bytes = sum([record.size_bytes for record in records])
        if self.source:
            self.source.release(partition, len(records), size_bytes)
        if how and self.witness:
            records = [self.first_of(record) for record in records] if self.first_of else records
            self.witness(records, size_bytes, how, outcomes, self.replay)

    def _mark(self, partition: TopicPartition) -> None:
        self._dirty[partition] = None
        self._changed.set()

    def _forget(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            # A source that gave up waiting may have assigned the partition anew: then the lane there is another one.
            if self._lanes.get(lane.partition) is lane:
                del self._lanes[lane.partition]
                self._skips.forget(lane.partition)
                self._dirty.pop(lane.partition, None)

    async def _commit_often(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            # The progress of a replay counts what has ended at one moment, so it is said at one moment.
            most = math.inf if self.replay else _COMMIT_TURN_SECONDS
            left = len(self._dirty)  # what is marked from now on waits for the next round
            while self._dirty and (left := left - self.commit_now(most)) > 0:
                await self.clock.sleep(_COMMIT_PAUSE_SECONDS)
            await self.clock.sleep(_COMMIT_SECONDS)

    def commit_now(self, most_seconds: float = math.inf) -> int:
        """Tell the source what has ended since it was told last, as far as that takes so long and no longer.

        Returns:
            How many partitions it looked at, those first that were marked first.
        """
        commits: dict[TopicPartition, Committed] = {}
        until, marked = self.clock.monotonic() + most_seconds, len(self._dirty)
        while self._dirty and (not commits or self.clock.monotonic() < until):
            partition = next(iter(self._dirty))
            del self._dirty[partition]
            if commit := self._lanes[partition].tracker.commit:
                commits[partition] = commit
        looked_at = marked - len(self._dirty)
        if commits and self.source:
            self.source.commit(commits)
        return looked_at
