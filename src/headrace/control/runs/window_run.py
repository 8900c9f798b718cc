"""One run: the records of a window are delivered once, without joining a group and without commits.

A run is a `WindowSource`, a pump and a sink, which is the pump's destination. Its caller saves its progress as
the offsets and maps that a group would commit. A restart repeats at most what was handed over and not saved.
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
"""The records that may be held are handed over, and saved, in so many parts."""
_LOOK_SECONDS, _SAVE_SECONDS, _DRAIN_SECONDS = 0.2, 1.0, 10.0
_SILENT_SECONDS = 30.0

Read = Callable[[Offsets, Offsets], AsyncGenerator[list[Record], None]]
"""Reads partitions from offsets to before offsets, as `read_records`."""
StartOffsets = Callable[[Sequence[TopicPartition]], Awaitable[Offsets]]
"""Returns the first offset that is still in each partition."""


class Limits(NamedTuple):
    """How much a run may hold, repeat after a kill, and deliver in a second."""

    flow: FlowControl
    repeats_at_most: int
    """Records that may be handed over and are not saved as ended."""
    rate_records: float | None = None


class Progress(NamedTuple):
    """How far a run is at one moment."""

    positions: CommitOffsets
    """What a group would have committed."""
    ended: int
    """Records that ended in this run."""
    counts: Mapping[str, int]
    """How they ended, by the names of `Counts`."""


class _Held:
    """Records of a run that were handed over, until they have ended and are saved."""

    def __init__(self, limits: Limits) -> None:
        self.handed = 0
        self.ended = 0
        self.saved = 0
        self.size_bytes = 0
        """Bytes of those that have not ended."""
        self.is_complete = False
        """Whether no more come."""
        self._limits = limits

    @property
    def unsaved(self) -> int:
        """Records that a kill would repeat."""
        return self.handed - self.saved

    def has_capacity(self, records: int, size_bytes: int) -> bool:
        """Return whether so many more may be handed over."""
        flow, held = self._limits.flow, self.handed - self.ended
        if self.unsaved and self.unsaved + records > self._limits.repeats_at_most:
            return False
        return not held or (held + records <= flow.max_records and self.size_bytes + size_bytes <= flow.max_bytes)


class WindowSource(Service):
    """Reads a window for a pump, and holds a bounded number of records that have not ended or are not saved."""

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
        """Prepare; sets itself as the pump's source. `starts` has what had ended above in an earlier run, too.

        `start_offsets` finds what was removed from the log when reading fails.
        """
        super().__init__(f"{pump.name} source")
        self.progress = Progress(starts, 0, pump.counts.read())
        self.changed = asyncio.Event()
        """Set whenever there is more to save, or the window has ended."""
        self.finished = False
        """Whether the whole window has ended."""
        self._pump, self._ends = pump, ends
        self._positions = {partition: start.offset for partition, start in starts.items()}
        self._read, self._start_offsets, self._limits, self._clock = read, start_offsets, limits, clock
        self._epoch = int(clock.time() * 1000)
        self._held = _Held(limits)
        self._released = asyncio.Event()
        self._due = 0.0
        pump.connect(self)

    @property
    def unsaved(self) -> int:
        """Records handed over and not saved as ended; a kill repeats so many."""
        return self._held.unsaved

    @property
    def is_urgent(self) -> bool:
        """Whether so much has ended, or all of it, that it should be saved now."""
        return self.finished or self._held.ended - self._held.saved >= max(1, self._limits.repeats_at_most // _PARTS)

    @property
    def waits_for_records(self) -> bool:
        """Whether all that was handed over has ended, and neither the rate nor the end of the window is the reason."""
        return (
            not self._held.is_complete
            and self._held.handed == self._held.ended
            and self._clock.monotonic() >= self._due
        )

    async def start(self) -> None:
        self._pump.on_assigned(dict.fromkeys(self._ends, self._epoch), self.progress.positions)
        self.spawn(self._follow(), "read")

    async def close(self, deadline: Deadline) -> None:
        """Read no more, and let what is in flight end."""
        await self.cancel_tasks()
        self.commit(await self._pump.on_revoked(list(self._ends), deadline))

    def saved(self, progress: Progress) -> None:
        """Note that the progress is saved."""
        self._held.saved = progress.ended
        self._released.set()

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        self._held.ended += records
        self._held.size_bytes -= size_bytes
        self._released.set()
        if self.is_urgent:
            self.changed.set()

    def commit(self, offsets: CommitOffsets) -> None:
        # The pump commits all that has ended since its last commit, so these numbers and offsets belong together.
        self.progress = Progress({**self.progress.positions, **offsets}, self._held.ended, self._pump.counts.read())
        self._look()
        self.changed.set()

    def _look(self) -> None:
        if self._held.is_complete and self.progress.ended == self._held.handed:
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
                log.warning("%s: %s; reading continues", self.name, error.description)
                self._positions.update({p: min(start, self._ends[p]) for p, start in passed.items()})
                await self._clock.sleep(_AGAIN_SECONDS)
        self._held.is_complete = True
        for partition, end in self._ends.items():
            self._pump.on_end(partition, self._epoch, end)
        self._look()

    def _parts(self, batch: list[Record]) -> list[list[Record]]:
        """Return neighbours of one partition, at most a tenth of a second of the rate."""
        limits = self._limits
        most = max(1, min(_SLICE_RECORDS, min(limits.flow.max_records, limits.repeats_at_most) // _PARTS))
        if limits.rate_records:
            most = max(1, min(most, int(limits.rate_records / _SLICES_PER_SECOND)))
        if most >= len(batch) and len({record.partition for record in batch}) == 1:
            return [batch]
        runs = [list(run) for _, run in itertools.groupby(batch, key=lambda record: record.partition)]
        return [run[n : n + most] for run in runs for n in range(0, len(run), most)]

    async def _hand_over(self, records: list[Record]) -> None:
        partition, size = records[0].topic_partition, sum([record.size_bytes for record in records])
        while not self._held.has_capacity(len(records), size):
            self._released.clear()
            await self._released.wait()
        if rate := self._limits.rate_records:
            now = self._clock.monotonic()
            await self._clock.sleep(self._due - now)
            self._due = max(self._due, now) + len(records) / rate
        self._held.handed += len(records)
        self._held.size_bytes += size
        self._positions[partition] = records[-1].offset + 1
        reach("replay.read")
        self._pump.on_records(partition, self._epoch, records)
        await asyncio.sleep(0)


Save = Callable[[Progress], Awaitable[bool]]


class Run:
    """Delivers one window, and saves what has ended: often, at the end, and before it stops for any reason."""

    def __init__(self, clock: Clock, check: Callable[[], None] = lambda: None) -> None:
        """Prepare; `check` raises if the run cannot continue."""
        self._clock, self._check = clock, check
        self._problem: HeadraceError | None = None
        self._source: WindowSource | None = None

    def fail(self, problem: HeadraceError) -> None:
        """End the run with an error; the first one counts."""
        self._problem = self._problem or problem
        if self._source:
            self._source.changed.set()

    async def deliver(self, pump: Pump, source: WindowSource, save: Save, stop: asyncio.Event) -> bool:
        """Deliver the window.

        Args:
            save: Saves progress and says whether that succeeded; it is called again if not.
            stop: Set to end the run early.

        Returns:
            Whether the whole window has ended and is saved.

        Raises:
            HeadraceError: The run failed. What had ended is saved, as far as that is possible.
        """
        self._source = source
        try:
            for service in (pump, source):
                service.on_death = self._died
                await service.start()
            return await self._save_often(pump, source, save, stop)
        except (HeadraceError, asyncio.CancelledError):
            with contextlib.suppress(HeadraceError, TimeoutError):
                await asyncio.shield(self._close(source, save))
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
            if self._problem:
                raise self._problem
            self._check()
            if stop.is_set():
                await self._close(source, save)
                return False
            now = self._clock.monotonic()
            if not source.waits_for_records:
                received_at = now
            elif now - received_at >= _SILENT_SECONDS:
                received_at = now
                log.warning(
                    "%s: no records were received for %g s, and the window has not ended: see whether its partitions "
                    "have leaders (headrace topics describe)",
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

    async def _close(self, source: WindowSource, save: Save) -> None:
        await source.close(Deadline(self._clock, _DRAIN_SECONDS))
        await save(source.progress)

    def _died(self, service: Service) -> None:
        cause = service.death
        self.fail(cause if isinstance(cause, HeadraceError) else HeadraceError(f"{service.name} ended: {cause}"))
