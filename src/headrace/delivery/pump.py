"""The pump: takes records from a source, keeps a lane per partition, and commits what has ended and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from random import Random

from headrace.config.consumers import DeliveryConfig
from headrace.delivery.attempt import Attempts, Counts
from headrace.delivery.breaker import Breaker
from headrace.delivery.dispatcher import Dispatcher
from headrace.delivery.lane import Lane
from headrace.delivery.protocols import DeadLetterWriter, Destination, Source, Waiting
from headrace.lifecycle import Clock, Deadline, Readiness, Service
from headrace.lifecycle.failpoints import reach
from headrace.lifecycle.queues import register_gauge, unregister_gauge
from headrace.records import Committed, Record, TopicPartition

log = logging.getLogger(__name__)

_COMMIT_SECONDS = 0.2


class Pump(Service):
    """Delivers the records of one group to one destination, at least once, in the order that was chosen.

    It is the listener of a source: the source tells it of assignments and records, it tells the source what has
    ended. Set `source` before the source starts.
    """

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
        self.waiting: Callable[[Record], Waiting] | None = None
        """Tells what a record of a retry tier is, if this one delivers from the tiers. Set before start."""
        self.replay = ""
        """Id of the job, if this one delivers once more what the group has had. Set before start."""
        self.counts = Counts()
        self.source: Source | None = None
        self._lanes: dict[TopicPartition, Lane] = {}
        self.breaker: Breaker
        if beside:
            self.breaker = beside.breaker
            self.breaker.share(self._begin)
        else:
            self.breaker = Breaker(name, delivery, clock, self.chance, self.later, self._begin)
        attempts = Attempts(self, self._ended)
        self._dispatcher = Dispatcher(self.breaker, self._lanes, attempts.make, self.spawn)
        self._dirty: set[TopicPartition] = set()
        self._changed = asyncio.Event()

    @property
    def lanes(self) -> Mapping[TopicPartition, Lane]:
        """The lanes of the present assignment."""
        return self._lanes

    async def start(self) -> None:
        register_gauge(f"{self.name} open records", self._open_records)
        register_gauge(f"{self.name} breaker open", lambda: int(bool(self.breaker.waits_for)))
        self.spawn(self._commit_often(), "commit")

    async def stop(self) -> None:
        unregister_gauge(f"{self.name} open records")
        unregister_gauge(f"{self.name} breaker open")
        self._fence(list(self._lanes.values()))
        self.breaker.leave_to_others(self._begin)
        await super().stop()

    def readiness(self) -> Readiness:
        """Say which partitions have stood still for a while, and why."""
        for partition, lane in self._lanes.items():
            if lane.standing:
                return Readiness(False, f"{partition} stands still: {lane.standing}")
        return Readiness(True)

    # The listener of the source --------------------------------------------------------------------------------------

    def on_assigned(
        self, partitions: Mapping[TopicPartition, int], committed: Mapping[TopicPartition, Committed]
    ) -> None:
        for partition, epoch in partitions.items():
            self._lanes[partition] = Lane(partition, epoch, committed.get(partition), self)

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        lane = self._lanes.get(partition)
        if lane and lane.tracker.epoch == epoch:
            reach("enqueue.before")
            self.counts.taken += len(records)
            if ended := lane.add(records):
                self.counts.spared += len(ended)
                self._release(partition, ended)
                self._mark(partition)
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
        for lane in lanes:
            lane.drain()
        reach("drain.before")
        for lane in lanes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lane.idle.wait(), deadline.remaining_seconds)
        self._fence(lanes)
        reach("drain.fenced")
        commits = {lane.partition: commit for lane in lanes if (commit := lane.tracker.commit)}
        self._forget(lanes)
        return commits

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        lanes = [self._lanes[partition] for partition in partitions if partition in self._lanes]
        self._fence(lanes)
        self._forget(lanes)

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

    def _open_records(self) -> int:
        return sum(lane.tracker.open_records for lane in self._lanes.values())

    def _fence(self, lanes: Sequence[Lane]) -> None:
        """End what has not ended by now; its late results mean nothing, and its records come again elsewhere."""
        if abandoned := sum([lane.fence() for lane in lanes]):
            self.counts.abandoned += abandoned
            log.warning("%s: abandoned=%d records in flight; they will be delivered again", self.name, abandoned)

    def _ended(self, lane: Lane, records: Sequence[Record]) -> None:
        lane.tracker.done([record.offset for record in records], lane.tracker.epoch)
        reach("ended.after")
        lane.ended(records)
        self._release(lane.partition, records)
        self._mark(lane.partition)

    def _release(self, partition: TopicPartition, records: Sequence[Record]) -> None:
        if self.source:
            self.source.release(partition, len(records), sum([record.size_bytes for record in records]))

    def _mark(self, partition: TopicPartition) -> None:
        self._dirty.add(partition)
        self._changed.set()

    def _forget(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            # A source that gave up waiting may have assigned the partition anew: then the lane there is another one.
            if self._lanes.get(lane.partition) is lane:
                del self._lanes[lane.partition]
                self._dirty.discard(lane.partition)

    async def _commit_often(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._commit()
            await self.clock.sleep(_COMMIT_SECONDS)

    def _commit(self) -> None:
        commits = {p: commit for p in self._dirty if (commit := self._lanes[p].tracker.commit)}
        self._dirty.clear()
        if commits and self.source:
            self.source.commit(commits)
