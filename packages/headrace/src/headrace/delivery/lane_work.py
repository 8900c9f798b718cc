"""The work of one lane that has begun: deliveries in flight, work that will be tried again, and their timers."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from headrace.delivery.offset_map import Tries
from headrace.delivery.pump_context import Batch, Work
from headrace.records import Record, RecordBatch
from headrace.runtime import Clock


class Begun(NamedTuple):
    """Work that has begun and is not completed."""

    work: Work
    why: str
    """Why it pauses before it is tried again; empty if it does not pause."""
    since: float | None
    """When its delivery began, by the monotonic clock; None if it is not being delivered."""

    @property
    def attempts(self) -> int:
        """Deliveries of its records so far, including one in flight."""
        return self.work.attempt - (self.since is None and isinstance(self.work, Batch))


class WorkInFlight:
    """Work of a lane that is being done now, by a task."""

    __slots__ = ("since", "task", "work")

    def __init__(self, work: Work, since: float) -> None:
        self.work = work
        self.since = since
        """When it began, by the monotonic clock."""
        self.task: asyncio.Task[None] | None = None
        """Does it."""

    def cancel(self) -> None:
        """Stop it; its task ends later."""
        if self.task:
            self.task.cancel()


class InFlight:
    """What is in flight of a lane."""

    def __init__(self, clock: Clock) -> None:
        self.each: dict[WorkInFlight, None] = {}
        """The work, in the order in which it began."""
        self.delivered: list[RecordBatch] = []
        """What was delivered and is about to be completed; no record waits for it any more."""
        self.begun_at = 0.0
        """When the last work began, by the monotonic clock."""
        self.idle = asyncio.Event()
        """Set while no record is in flight."""
        self.idle.set()
        self._clock = clock

    def __iter__(self) -> Iterator[Begun]:
        return (Begun(each.work, "", each.since) for each in self.each)

    @property
    def records(self) -> int:
        """How many records are in flight."""
        return sum(len(each.work.records) for each in self.each)

    def begin(self, running: WorkInFlight) -> None:
        """Record that work begins."""
        self.each[running] = None
        self.begun_at = running.since
        self.idle.clear()

    def replace(self, running: WorkInFlight, work: Work) -> None:
        """Record that other work follows at once; a drain does not see the lane idle in between."""
        running.work = work
        running.since = self.begun_at = self._clock.monotonic()

    def leave(self, running: WorkInFlight) -> None:
        """Record that work is over."""
        self.each.pop(running, None)
        self._check_idle()

    def cancel(self) -> None:
        """Cancel everything."""
        for each in self.each:
            each.cancel()

    def abandon(self, records: Sequence[Record]) -> None:
        """Cancel the work on any of these records; it no longer keeps the lane busy."""
        offsets = {record.offset for record in records}
        for each in self.each:
            if not offsets.isdisjoint(each.work.records.offsets):
                each.cancel()
                self.replace(each, Batch(RecordBatch.of(())))
        self._check_idle()

    def _check_idle(self) -> None:
        for each in self.each:
            if each.work.records:
                return
        self.idle.set()


class RetryQueue:
    """Work that has begun, is not completed, and is not being delivered now."""

    def __init__(self) -> None:
        self.due: deque[Work] = deque()
        """Work to deliver or write again now."""
        self.backing_off: dict[object, tuple[Batch, str]] = {}
        """Work that pauses before it is tried again, and why."""
        self.behind: list[Batch] = []
        """In order `partition`: work that waits until the records before it are completed, the last one first."""
        self.was_last = False
        """Whether the last work of the lane was taken from here."""
        self.failures = 0
        """How often writing dead letters failed since the last success."""
        self.earlier: dict[int, Tries] = {}
        """By offset: what failed before this assignment and has not begun in it, and what a drain has cleared."""

    def __iter__(self) -> Iterator[tuple[Work, str]]:
        """Iterate over the work, each with the reason for its pause."""
        yield from self.backing_off.values()
        yield from ((work, "") for work in (*self.due, *self.behind))

    def tries_at(self, offset: int, in_flight: InFlight) -> Tries | None:
        """Return the failures of a record, here or in flight, so that they count at its next owner."""
        for work in itertools.chain((begun.work for begun in in_flight), (work for work, _ in self)):
            if work.attempt > 1 and offset in work.records.offsets:
                return tries_of(work)
        return self.earlier.get(offset)

    def clear(self) -> None:
        """Forget the work, but not how often it failed."""
        for work, _ in self:
            if work.attempt > 1:
                self.earlier |= dict.fromkeys(work.records.offsets, tries_of(work))
        for waiting in (self.due, self.backing_off, self.behind):
            waiting.clear()


def tries_of(work: Work) -> Tries:
    """Return the failures of work; the attempt that is waiting or in flight does not count."""
    return Tries(work.attempt - 1, work.first_failed_at)


class LaneTimers:
    """The timers of one lane, by name."""

    def __init__(
        self, later: Callable[[float, Callable[[], None]], asyncio.Task[None]], elapsed: Callable[[], None]
    ) -> None:
        """Prepare; `later` calls a function after a pause; `elapsed` is called after each timer's function."""
        self._later = later
        self._elapsed = elapsed
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._is_closed = False

    def __contains__(self, name: object) -> bool:
        return name in self._tasks

    def start(self, seconds: float, then: Callable[[], object], name: object) -> None:
        """Call a function after a pause, unless the timers are closed."""

        def elapsed() -> None:
            self._tasks.pop(name, None)
            then()
            self._elapsed()

        if not self._is_closed:
            self._tasks[name] = self._later(seconds, elapsed)

    def cancel(self, name: object) -> None:
        """Stop a timer, if it runs."""
        if timer := self._tasks.pop(name, None):
            timer.cancel()

    def close(self) -> None:
        """Stop every timer, and never start another one."""
        self._is_closed = True
        for timer in self._tasks.values():
            timer.cancel()
