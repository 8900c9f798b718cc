"""One run: it delivers the records of a window once, without joining a group and without commits.

A run is a `WindowSource`, a pump and the pump's destination. Its caller saves its progress as the offsets and offset
maps that a group would commit. A restart repeats at most what was handed over and not saved.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from headrace.config.consumers import FlowControl
from headrace.delivery.pump import Pump
from headrace.errors import HeadraceError
from headrace.records import CommitOffsets, Offsets, Record, TopicPartition
from headrace.runtime import Clock, Deadline, Service
from headrace.runtime.failpoints import reach

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0
_SLICE_RECORDS = 500
_SLICES_PER_SECOND = 10
_PARTS = 4
"""The buffer's capacity is handed over, and saved, in this many parts."""
_LOOK_SECONDS, _SAVE_SECONDS = 0.2, 1.0
DRAIN_SECONDS = 10.0
"""How long deliveries of a stopped run may take to complete."""
_SILENT_SECONDS = 30.0

Read = Callable[[Offsets, Offsets], AsyncGenerator[list[Record], None]]
"""Reads partitions from their first offsets up to, without, their ends, as `read_records`."""
StartOffsets = Callable[[Sequence[TopicPartition]], Awaitable[Offsets]]
"""Returns the first offset of each partition's log."""


class Limits(NamedTuple):
    """How much a run may buffer, repeat after a kill, and deliver in a second."""

    flow: FlowControl
    repeats_at_most: int
    """Records that may be handed over and not saved."""
    rate_records: float | None = None


class Progress(NamedTuple):
    """The progress of a run at one moment."""

    positions: CommitOffsets
    """What a group would have committed."""
    completed: int
    """Records that were completed in this run."""
    counts: Mapping[str, int]
    """Their outcomes, by the names of `Counts`."""


class _HandedOver:
    """Counts the records of a run that were handed over, completed and saved, and enforces its limits."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self.records = 0
        self.completed = 0
        self.saved = 0
        self.in_flight_bytes = 0
        self.is_last = False
        """Whether the last record of the window was handed over."""
        self.changed = asyncio.Event()
        """Set when records were completed or saved."""
        self._limits = limits
        self._clock = clock
        self._due = 0.0

    @property
    def in_flight(self) -> int:
        """Records that are not completed."""
        return self.records - self.completed

    @property
    def unsaved(self) -> int:
        """Records that a kill would repeat."""
        return self.records - self.saved

    @property
    def waits_for_rate(self) -> bool:
        """Whether the rate forbids to hand over the next record now."""
        return self._clock.monotonic() < self._due

    async def add(self, records: int, size_bytes: int) -> None:
        """Wait until the limits allow these records, and count them."""
        while not self._has_capacity(records, size_bytes):
            self.changed.clear()
            await self.changed.wait()
        if rate := self._limits.rate_records:
            now = self._clock.monotonic()
            await self._clock.sleep(self._due - now)
            self._due = max(self._due, now) + records / rate
        self.records += records
        self.in_flight_bytes += size_bytes

    def _has_capacity(self, records: int, size_bytes: int) -> bool:
        flow = self._limits.flow
        if self.unsaved and self.unsaved + records > self._limits.repeats_at_most:
            return False
        if not self.in_flight:
            return True
        return self.in_flight + records <= flow.max_records and self.in_flight_bytes + size_bytes <= flow.max_bytes


class WindowSource(Service):
    """Reads a window for a pump, and bounds the records that are not completed or not saved."""

    def __init__(
        self,
        pump: Pump,
        starts: CommitOffsets,
        ends: Offsets,
        *,
        read: Read,
        start_offsets: StartOffsets,
        limits: Limits,
        clock: Clock,
    ) -> None:
        """Prepare, and become the pump's source.

        `starts` has the offset maps of an earlier run, too. When reading fails, `start_offsets` finds what was removed
        from the log.
        """
        super().__init__(f"{pump.name} source")
        self.progress = Progress(starts, 0, pump.counts.read())
        self.changed = asyncio.Event()
        """Set whenever there is more to save, or the window is completed."""
        self.finished = False
        """Whether the whole window is completed."""
        self._pump, self._ends = pump, ends
        self._positions = {partition: start.offset for partition, start in starts.items()}
        self._read, self._start_offsets, self._limits, self._clock = read, start_offsets, limits, clock
        self._epoch = int(clock.time() * 1000)
        self._handed_over = _HandedOver(limits, clock)
        pump.connect(self)

    @property
    def unsaved(self) -> int:
        """Records handed over and not saved; a kill repeats this many."""
        return self._handed_over.unsaved

    @property
    def is_urgent(self) -> bool:
        """Whether the whole window, or so large a part, is completed that it should be saved now."""
        return self.finished or self._handed_over.completed - self._handed_over.saved >= max(
            1, self._limits.repeats_at_most // _PARTS
        )

    @property
    def waits_for_records(self) -> bool:
        """Whether nothing is in flight, and the reason is neither the rate nor the end of the window."""
        return not (self._handed_over.is_last or self._handed_over.in_flight or self._handed_over.waits_for_rate)

    async def start(self) -> None:
        self._pump.on_assigned(dict.fromkeys(self._ends, self._epoch), self.progress.positions)
        self.spawn(self._follow(), "read")

    async def close(self, deadline: Deadline) -> None:
        """Stop reading, and wait for what is in flight."""
        await self.cancel_tasks()
        self.commit(await self._pump.on_revoked(list(self._ends), deadline))

    def saved(self, progress: Progress) -> None:
        self._handed_over.saved = progress.completed
        self._handed_over.changed.set()

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        self._handed_over.completed += records
        self._handed_over.in_flight_bytes -= size_bytes
        self._handed_over.changed.set()
        if self.is_urgent:
            self.changed.set()

    def commit(self, offsets: CommitOffsets) -> None:
        # The pump commits all that was completed since its last commit, so these numbers and offsets belong together.
        self.progress = Progress(
            {**self.progress.positions, **offsets}, self._handed_over.completed, self._pump.counts.read()
        )
        self._look()
        self.changed.set()

    def _look(self) -> None:
        if self._handed_over.is_last and self.progress.completed == self._handed_over.records:
            self.finished = True
            self.changed.set()

    async def _follow(self) -> None:
        while left := {p: at for p, at in self._positions.items() if at < self._ends[p]}:
            try:
                async with contextlib.aclosing(self._read(left, {p: self._ends[p] for p in left})) as batches:
                    async for batch in batches:
                        for part in self._parts(batch):
                            await self._hand_over(part)
                self._positions = dict(self._ends)
            except HeadraceError as error:
                starts: Offsets = {}
                with contextlib.suppress(HeadraceError):
                    starts = await self._start_offsets(list(left))
                passed = {p: starts[p] for p in left if starts.get(p, 0) > self._positions[p]}
                if not passed and not error.retriable:
                    raise
                log.warning("%s: %s; will retry", self.name, error.description)
                self._positions.update({p: min(start, self._ends[p]) for p, start in passed.items()})
                await self._clock.sleep(_AGAIN_SECONDS)
        self._handed_over.is_last = True
        for partition, end in self._ends.items():
            self._pump.on_end(partition, self._epoch, end)
        self._look()

    def _parts(self, batch: list[Record]) -> list[list[Record]]:
        """Split a batch into parts of one partition each, with at most the records of a tenth of a second."""
        limits = self._limits
        most = max(1, min(_SLICE_RECORDS, min(limits.flow.max_records, limits.repeats_at_most) // _PARTS))
        if limits.rate_records:
            most = max(1, min(most, int(limits.rate_records / _SLICES_PER_SECOND)))
        if most >= len(batch) and len({record.partition for record in batch}) == 1:
            return [batch]
        runs = [list(run) for _, run in itertools.groupby(batch, key=lambda record: record.partition)]
        return [run[n : n + most] for run in runs for n in range(0, len(run), most)]

    async def _hand_over(self, records: list[Record]) -> None:
        await self._handed_over.add(len(records), sum([record.size_bytes for record in records]))
        partition = records[0].topic_partition
        self._positions[partition] = records[-1].offset + 1
        reach("replay.read")
        self._pump.on_records(partition, self._epoch, records)
        await asyncio.sleep(0)


Save = Callable[[Progress], Awaitable[bool]]


class Run:
    """Delivers one window, and saves what is completed: often, at the end, and before it stops for any reason."""

    def __init__(
        self, clock: Clock, check: Callable[[], None] = lambda: None, *, drain_seconds: float = DRAIN_SECONDS
    ) -> None:
        """Prepare; `check` raises if the run cannot continue.

        Deliveries that have begun have `drain_seconds` to complete when the run is stopped.
        """
        self._clock, self._check, self._drain_seconds = clock, check, drain_seconds
        self._failure: HeadraceError | None = None
        self._source: WindowSource | None = None
        self.halted = False
        """Set to end the run early, as `stop` does."""

    def fail(self, error: HeadraceError) -> None:
        """End the run with an error; after the first one, others are ignored."""
        self._failure = self._failure or error
        if self._source:
            self._source.changed.set()

    async def deliver(self, pump: Pump, source: WindowSource, save: Save, stop: asyncio.Event) -> bool:
        """Deliver the window.

        Args:
            save: Saves progress and returns whether that succeeded; it is called again if not.
            stop: Set to end the run early.

        Returns:
            Whether the whole window is completed and saved.

        Raises:
            HeadraceError: The run failed. What was completed is saved if that is possible.
        """
        self._source = source
        try:
            for service in (pump, source):
                service.on_death = self._died
                await service.start()
            return await self._save_often(pump, source, save, stop)
        except (HeadraceError, asyncio.CancelledError):
            with contextlib.suppress(HeadraceError, TimeoutError):
                await asyncio.shield(self._close(source, save, DRAIN_SECONDS))
            raise
        finally:
            for service in (source, pump):
                await service.stop()

    async def _save_often(self, pump: Pump, source: WindowSource, save: Save, stop: asyncio.Event) -> bool:
        saved = None
        saved_at = received_at = self._clock.monotonic()
        while not (source.finished and saved is source.progress):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):  # wait_for may lose a cancellation before Python 3.12
                    await source.changed.wait()
            source.changed.clear()
            if self._failure:
                raise self._failure
            self._check()
            if stop.is_set() or self.halted:
                await self._close(source, save, self._drain_seconds)
                return False
            now = self._clock.monotonic()
            if not source.waits_for_records:
                received_at = now
            elif now - received_at >= _SILENT_SECONDS:
                received_at = now
                log.warning(
                    "%s: no records received for %g s before the end of the window: check whether its partitions have "
                    "leaders (headrace topics describe)",
                    source.name,
                    _SILENT_SECONDS,
                )
            if source.is_urgent or now - saved_at >= _SAVE_SECONDS:
                pump.commit_now()
                progress = source.progress
                if await save(progress):
                    source.saved(progress)
                    saved_at, saved = now, progress
        return True

    async def _close(self, source: WindowSource, save: Save, seconds: float) -> None:
        await source.close(Deadline(self._clock, seconds))
        await save(source.progress)

    def _died(self, service: Service) -> None:
        cause = service.death
        self.fail(cause if isinstance(cause, HeadraceError) else HeadraceError(f"{service.name} ended: {cause}"))
