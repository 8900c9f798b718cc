"""The interface of everything that runs: start, drain, stop, readiness."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from headrace.errors import HeadraceError
from headrace.lifecycle.clock import Deadline
from headrace.lifecycle.gauge_registry import Measured, register_gauge, unregister_gauge

log = logging.getLogger(__name__)


class Readiness(NamedTuple):
    """Whether a service does its work now; if not, one sentence says why."""

    ready: bool
    reason: str = ""


class Service:
    """Something that runs inside the process.

    A subclass overrides `run`, or what it needs of `start`, `drain` and `stop`, and starts its tasks with `spawn`. A
    task that ends with an error takes its service down, and the supervisor names the service.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.death: BaseException | None = None
        """The error that ended the service, if one did."""
        self.on_death: Callable[[Service], None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gauges: list[tuple[str, dict[str, str]]] = []

    async def start(self) -> None:
        """Begin to work, by default with `run` as a task. Waits for nothing outside the process; a task may."""
        self.spawn(self.run(), "run")

    async def run(self) -> None:
        """Do the work of a service that has one task."""

    async def drain(self, deadline: Deadline) -> None:
        """Accept no new work and finish the work in flight, at most until the deadline."""

    async def stop(self) -> None:
        """End now and release everything. Called once, after `drain` or instead of it."""
        await self.cancel_tasks()
        for metric, labels in self._gauges:
            unregister_gauge(metric, **labels)

    def publish(self, metric: str, read: Callable[[], Measured], **labels: str) -> None:
        """Publish a gauge until the service stops."""
        register_gauge(metric, read, **labels)
        self._gauges.append((metric, labels))

    def readiness(self) -> Readiness:
        """Return whether the service does its work now."""
        return Readiness(True)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine as a task of this service, on the loop.

        If it raises, the service is dead; if it returns, nothing happens.
        """
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def die(self, cause: BaseException) -> None:
        """Report that this service ended by itself. Call on the loop; only the first report counts."""
        if self.death is None:
            self.death = cause
            # The text of a HeadraceError is complete; a defect needs its trace.
            trace = None if isinstance(cause, HeadraceError) else cause
            log.critical("service %s died: %s", self.name, cause, exc_info=trace)
            if self.on_death:
                self.on_death(self)

    async def cancel_tasks(self) -> None:
        """Cancel this service's tasks and wait until they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            # A task's own error was reported by _task_ended; here only its end matters.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (cause := task.exception()):
            self.die(cause)
