"""The pump: takes records from a source, runs a lane per partition, and commits what has ended and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from random import Random

from headrace.config.consumers import BatchConfig, RetryConfig
from headrace.delivery.lane import Counts, Lane
from headrace.delivery.protocols import DeadLetterWriter, Destination, Source
from headrace.lifecycle import Clock, Deadline, Readiness, Service
from headrace.lifecycle.queues import register_gauge, unregister_gauge
from headrace.records import Committed, Record, TopicPartition

log = logging.getLogger(__name__)

_COMMIT_SECONDS = 0.2


class Pump(Service):
    """Delivers the records of one group to one destination, at least once, in order inside each partition.

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
        batch: BatchConfig,
        retry: RetryConfig,
        clock: Clock,
        chance: Random | None = None,
    ) -> None:
        super().__init__(name)
        self.group = group
        self.destination = destination
        self.dead_letters = dead_letters
        self.batch = batch
        self.retry = retry
        self.clock = clock
        self.chance = chance or Random()
        self.counts = Counts()
        self.source: Source | None = None
        self._lanes: dict[TopicPartition, Lane] = {}
        self._tasks_of: dict[TopicPartition, asyncio.Task[None]] = {}
        self._dirty: set[TopicPartition] = set()
        self._changed = asyncio.Event()

    @property
    def lanes(self) -> Mapping[TopicPartition, Lane]:
        """The lanes of the present assignment."""
        return self._lanes

    async def start(self) -> None:
        register_gauge(f"{self.name} open records", self._open_records)
        self.spawn(self._commit_often(), "commit")

    async def stop(self) -> None:
        unregister_gauge(f"{self.name} open records")
        self._abandon(list(self._lanes.values()), list(self._tasks_of.values()))
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
            lane = Lane(partition, epoch, self, committed.get(partition), self._ended)
            self._lanes[partition] = lane
            self._tasks_of[partition] = self.spawn(lane.run(), f"lane {partition}")

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        lane = self._lanes.get(partition)
        if lane and lane.tracker.epoch == epoch:
            self.counts.taken += len(records)
            if ended := lane.add(records):
                self.counts.spared += len(ended)
                self._release(partition, ended)
                self._mark(partition)

    def on_end(self, partition: TopicPartition, epoch: int, position: int) -> None:
        lane = self._lanes.get(partition)
        if lane and lane.tracker.epoch == epoch and lane.tracker.end_reached(position):
            self._mark(partition)

    async def on_revoked(
        self, partitions: Sequence[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, Committed]:
        """Drain first, fence second: what is in flight may end until the deadline, then late results mean nothing."""
        lanes = [self._lanes[partition] for partition in partitions if partition in self._lanes]
        tasks = [self._tasks_of[lane.partition] for lane in lanes]
        for lane, task in zip(lanes, tasks, strict=True):
            if not lane.drain():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=deadline.remaining_seconds)
        self._abandon(lanes, tasks)
        commits = {lane.partition: commit for lane in lanes if (commit := lane.tracker.commit)}
        self._forget(lanes)
        return commits

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        lanes = [self._lanes[partition] for partition in partitions if partition in self._lanes]
        self._abandon(lanes, [self._tasks_of[lane.partition] for lane in lanes])
        self._forget(lanes)

    # -----------------------------------------------------------------------------------------------------------------

    def _open_records(self) -> int:
        return sum(lane.tracker.open_records for lane in self._lanes.values())

    def _abandon(self, lanes: Sequence[Lane], tasks: Sequence[asyncio.Task[None]]) -> None:
        """End what has not ended by now; its late results mean nothing, and its records come again elsewhere."""
        for task in tasks:
            task.cancel()
        abandoned = sum(lane.in_flight for lane in lanes)
        if abandoned:
            self.counts.abandoned += abandoned
            log.warning("%s: abandoned=%d records in flight; they will be delivered again", self.name, abandoned)

    def _ended(self, lane: Lane, records: Sequence[Record]) -> None:
        if self._lanes.get(lane.partition) is not lane:
            self.counts.late += len(records)
            return
        lane.tracker.done([record.offset for record in records], lane.tracker.epoch)
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
                del self._lanes[lane.partition], self._tasks_of[lane.partition]
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
