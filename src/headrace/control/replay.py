"""A stretch of a topic delivered once more, beside the group and without touching it.

Nothing is joined and nothing committed. How far a replay is stays with its job, as the offset and the map that a group
would commit; so after a restart what had ended is not delivered again, but for what was not written down by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from headrace.config.consumers import FlowControl
from headrace.delivery.pump import Pump
from headrace.errors import HeadraceError
from headrace.lifecycle import Clock, Deadline, Service
from headrace.lifecycle.failpoints import reach
from headrace.records import Committed, Record, TopicPartition

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0
_SLICE_RECORDS = 500
_SLICES_PER_SECOND = 10
_PARTS = 4
"""What may be held is handed over, and written down as ended, in so many parts."""

Read = Callable[[Mapping[TopicPartition, int], Mapping[TopicPartition, int]], AsyncGenerator[list[Record], None]]
"""Reads partitions from offsets to before offsets, as `read_records`."""
StartOffsets = Callable[[Sequence[TopicPartition]], Awaitable[Mapping[TopicPartition, int]]]
"""Asks for the first offset that is still in each partition."""


class Limits(NamedTuple):
    """What a replay may hold, let a kill repeat, and deliver in a second."""

    flow: FlowControl
    repeats_at_most: int
    """Records that may be handed over and are not written down as ended."""
    rate_records: float | None = None


class Standing(NamedTuple):
    """How far a replay is at one moment."""

    positions: Mapping[TopicPartition, Committed]
    """What a group would have committed."""
    ended: int
    """Records that ended in this run."""
    counts: Mapping[str, int]
    """How they ended, by the names of `Counts`."""


class WindowSource(Service):
    """Reads a window for a pump, and holds only so much that has not ended or is not written down as ended."""

    def __init__(
        self,
        pump: Pump,
        starts: Mapping[TopicPartition, Committed],
        ends: Mapping[TopicPartition, int],
        *,
        read: Read,
        start_offsets: StartOffsets,
        limits: Limits,
        clock: Clock,
    ) -> None:
        """Prepare; sets itself as the pump's source.

        Args:
            pump: Delivers.
            starts: Where to begin, and what had ended above by an earlier run.
            ends: Where to end, for the same partitions.
            read: Reads.
            start_offsets: Tells what is gone when reading fails.
            limits: How much and how fast.
            clock: For the rate and for pauses.
        """
        super().__init__(f"{pump.name} source")
        self.standing = Standing(starts, 0, pump.counts.read())
        self.news = asyncio.Event()
        """Set whenever there is more to write down, or nothing more to come."""
        self.finished = False
        """Whether the whole window has ended."""
        self._pump = pump
        self._ends = ends
        self._positions = {partition: start.offset for partition, start in starts.items()}
        self._read, self._start_offsets = read, start_offsets
        self._limits, self._clock, self._rate = limits, clock, limits.rate_records
        self._some = max(1, limits.repeats_at_most // _PARTS)
        self._slice = min(_SLICE_RECORDS, max(1, limits.flow.max_records // _PARTS), self._some)
        self._epoch = int(clock.time() * 1000)
        self._handed = self._ended = self._saved = self._bytes = 0
        self._room = asyncio.Event()
        self._due = 0.0
        self._is_read = False
        self._reading: asyncio.Task[None] | None = None
        pump.connect(self)

    @property
    def unsaved(self) -> int:
        """Records handed over and not written down as ended: so many come again after a kill."""
        return self._handed - self._saved

    @property
    def is_urgent(self) -> bool:
        """Whether so much has ended, or all of it, that it should be written down now."""
        return self.finished or self._ended - self._saved >= self._some

    async def start(self) -> None:
        self._pump.on_assigned(dict.fromkeys(self._ends, self._epoch), self.standing.positions)
        self._reading = self.spawn(self._follow(), "read")

    async def close(self, deadline: Deadline) -> None:
        """Read no more, and let what is in flight end."""
        if self._reading:
            self._reading.cancel()
        self.commit(await self._pump.on_revoked(list(self._ends), deadline))

    def saved(self, standing: Standing) -> None:
        """Take note that a standing is written down."""
        self._saved = standing.ended
        self._room.set()

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        self._ended += records
        self._bytes -= size_bytes
        self._room.set()
        if self.is_urgent:
            self.news.set()

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        # The pump commits all that has ended since it did so last, so these numbers and offsets belong together.
        positions = {**self.standing.positions, **offsets}
        self.standing = Standing(positions, self._ended, self._pump.counts.read())
        self._look()
        self.news.set()

    def _look(self) -> None:
        if self._is_read and self.standing.ended == self._handed:
            self.finished = True
            self.news.set()

    async def _follow(self) -> None:
        while left := {p: at for p, at in self._positions.items() if at < self._ends[p]}:
            try:
                async with contextlib.aclosing(self._read(left, {p: self._ends[p] for p in left})) as batches:
                    async for batch in batches:
                        for part in self._parts(batch):
                            await self._hand_over(part)
                self._positions = dict(self._ends)
            except HeadraceError as error:
                starts: Mapping[TopicPartition, int] = {}
                with contextlib.suppress(HeadraceError):
                    starts = await self._start_offsets(list(left))
                passed = {p: starts[p] for p in left if starts.get(p, 0) > self._positions[p]}
                if not passed and not error.retriable:
                    raise
                log.warning("%s: %s; going on", self.name, error.description)
                self._positions.update({p: min(start, self._ends[p]) for p, start in passed.items()})
                await self._clock.sleep(_AGAIN_SECONDS)
        self._is_read = True
        for partition, end in self._ends.items():
            self._pump.on_end(partition, self._epoch, end)
        self._look()

    def _parts(self, batch: list[Record]) -> list[list[Record]]:
        """Return neighbours of one partition, at most a tenth of a second of the rate."""
        most = self._slice
        if self._rate:
            most = max(1, min(most, int(self._rate / _SLICES_PER_SECOND)))
        if most >= len(batch) and len({record.partition for record in batch}) == 1:
            return [batch]
        runs = [list(run) for _, run in itertools.groupby(batch, key=lambda record: record.partition)]
        return [run[n : n + most] for run in runs for n in range(0, len(run), most)]

    async def _hand_over(self, records: list[Record]) -> None:
        partition, size = records[0].topic_partition, sum([record.size_bytes for record in records])
        while not self._fits(len(records), size):
            self._room.clear()
            await self._room.wait()
        if self._rate:
            now = self._clock.monotonic()
            await self._clock.sleep(self._due - now)
            self._due = max(self._due, now) + len(records) / self._rate
        self._handed += len(records)
        self._bytes += size
        self._positions[partition] = records[-1].offset + 1
        reach("replay.read")
        self._pump.on_records(partition, self._epoch, records)
        await asyncio.sleep(0)

    def _fits(self, records: int, size_bytes: int) -> bool:
        flow, held = self._limits.flow, self._handed - self._ended
        if self.unsaved and self.unsaved + records > self._limits.repeats_at_most:
            return False
        return not held or (held + records <= flow.max_records and self._bytes + size_bytes <= flow.max_bytes)
