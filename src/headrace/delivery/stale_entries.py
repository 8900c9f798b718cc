"""Entries of blocked keys whose record will never come: found and ended, so that their keys are free again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice

from headrace.delivery.lane import Lane
from headrace.delivery.parked import ParkedEntry, ParkedKeys
from headrace.errors import HeadraceError
from headrace.lifecycle import Clock, Service
from headrace.records import TopicPartition

log = logging.getLogger(__name__)

_ROUND_SECONDS = 60.0
_MOST_ENTRIES = 1000
Offsets = Mapping[TopicPartition, int]


class StaleEntries(Service):
    """Ends entries that no record in the retry topic belongs to.

    An entry is written before its record. A seek past the record, a process that was given up between the two
    writes, or the retention of the retry topic leaves an entry alone. It is stale when the source partition is
    committed past the record and then the retry topic is committed past everything written by that time.
    """

    def __init__(
        self,
        name: str,
        parked: ParkedKeys,
        lanes: Mapping[TopicPartition, Lane],
        ends: Callable[[], Awaitable[Offsets]],
        committed: Callable[[], Awaitable[Offsets]],
        clock: Clock,
        late_seconds: float,
    ) -> None:
        """Prepare.

        Args:
            name: Name of the service.
            parked: The blocked keys.
            lanes: The source partitions of this process.
            ends: Asks Kafka for the ends of the retry topic.
            committed: Asks Kafka what is committed there.
            clock: Time.
            late_seconds: How long a write of a process that was given up may still succeed.
        """
        super().__init__(name)
        self._parked, self._lanes, self._clock = parked, lanes, clock
        self._ends, self._committed, self._late_seconds = ends, committed, late_seconds

    async def start(self) -> None:
        self.spawn(self._watch(), "watch")

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(_ROUND_SECONDS)
            try:
                await self._end_stale()
            except HeadraceError as error:
                log.info("%s: asked again in a minute: %s", self.name, error.description)

    async def _end_stale(self) -> None:
        passed = {
            entry: self._lanes[entry.partition].tracker.epoch
            for entry in islice(filter(self._is_passed, self._parked.entries()), _MOST_ENTRIES)
        }
        if not passed:
            return
        await self._clock.sleep(self._late_seconds)
        ends = await self._ends()
        while passed:
            committed = await self._committed()
            await self._parked.read_to_end()
            left = {*self._parked.entries()}
            passed = {entry: epoch for entry, epoch in passed.items() if entry in left and self._is_in(entry, epoch)}
            if all(committed.get(partition, 0) >= end for partition, end in ends.items()):
                break
            await self._clock.sleep(_ROUND_SECONDS)
        for entry, epoch in passed.items():
            # Each write takes time. The last record of a key comes first: one that comes again below one that waits
            # counts as ended.
            if not self._is_in(entry, epoch):
                continue
            await self._parked.end(entry.record)
            log.warning(
                "%s: the key of offset %d of %s is free again: no record of it is in the retry topic",
                self.name,
                entry.offset,
                entry.partition,
            )

    def _is_passed(self, entry: ParkedEntry) -> bool:
        lane = self._lanes.get(entry.partition)
        return lane is not None and lane.tracker.frontier > entry.offset

    def _is_in(self, entry: ParkedEntry, epoch: int) -> bool:
        """Whether the partition is in the same assignment; a seek back may bring the record again."""
        lane = self._lanes.get(entry.partition)
        return lane is not None and lane.tracker.epoch == epoch and not lane.draining
