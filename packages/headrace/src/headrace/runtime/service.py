"""The interface of everything that runs: start, drain, stop, readiness."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, NamedTuple

from headrace.errors import HeadraceError
from headrace.runtime.clock import Deadline, RestartPauses, SystemClock
from headrace.runtime.gauge_registry import Measured, register_gauge, unregister_gauge

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_CLOCK: Final = SystemClock()


class Readiness(NamedTuple):
    """Whether a service does its work now, and the reason if not."""

    ready: bool
    reason: str = ""


class Service:
    """Something that runs inside the process.

    A subclass overrides `run`, or some of `start`, `drain` and `stop`. Start a task that can be restarted at any time
    with `keep`: its errors stop nothing else. Start any other with `spawn`: its error takes the service down, and the
    supervisor names the service.
    """

    outlives = False
    """Whether it drains and stops after all others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.death: BaseException | None = None
        """The error that stopped the service, if there was one."""
        self.on_death: Callable[[Service], None] | None = None
        self._task_failures: dict[str, tuple[str, float]] = {}
        """Reasons of failed tasks, and how long to show them."""
        self._task_failure_count = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gauges: list[tuple[str, dict[str, str]]] = []

    async def start(self) -> None:
        """Start to work, by default with `run` as a task. Must not wait for other processes; a task may."""
        self.keep(self.run, "run")

    async def run(self) -> None:
        """Do the work of a service with one task; called again after an error."""

    def begin_drain(self, deadline: Deadline) -> None:
        """Begin what takes long in `drain`, at the same time as all other services; must not wait."""

    async def drain(self, deadline: Deadline) -> None:
        """Accept no new work, and finish the work in flight by the deadline."""

    async def stop(self) -> None:
        """Stop now and release everything. Called once, after `drain` or instead of it."""
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

    def readiness_by_name(self) -> dict[str, Readiness]:
        """Return the readiness of the service and of the services that it runs, including failed tasks."""
        ready, reason = self.readiness()
        return {self.name: Readiness(ready, "; ".join(filter(None, [reason, self.task_failures])))}

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine as a task of this service, on the loop.

        If it raises, the service dies; if it returns, nothing happens.
        """
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        """Run work as a task until it returns; when it fails, restart it after a growing pause.

        The log, readiness and `headrace_task_failures_total` name the task and the reason.
        """
        pauses = RestartPauses(_CLOCK, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        return self.spawn(pauses.keep(work, partial(self._task_failed, name)), name)

    def _task_failed(self, name: str, cause: Exception, pause: float) -> None:
        if not self._task_failure_count:
            self.publish("headrace_task_failures_total", lambda: self._task_failure_count, service=self.name)
        self._task_failure_count += 1
        reason = f"{name} failed: {cause.description if isinstance(cause, HeadraceError) else repr(cause)}"
        self._task_failures[name] = reason, _CLOCK.monotonic() + pause + _LONGEST_PAUSE_SECONDS
        log.error("%s: %s; will restart in %g s", self.name, reason, pause, exc_info=_trace_of(cause))

    @property
    def task_failures(self) -> str:
        """Tasks that failed in the last minutes and were restarted, with the reasons; empty if none."""
        now = _CLOCK.monotonic()
        self._task_failures = {name: known for name, known in self._task_failures.items() if known[1] > now}
        return "; ".join([reason for reason, _ in self._task_failures.values()])

    def die(self, cause: BaseException) -> None:
        """Report that this service stopped because of an error. Call on the loop; only the first report counts."""
        if self.death is None:
            self.death = cause
            log.critical("service %s died: %s", self.name, cause, exc_info=_trace_of(cause))
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


def _trace_of(cause: BaseException) -> BaseException | None:
    """Return the trace to log: none for a HeadraceError, whose text is complete; a defect needs it."""
    return None if isinstance(cause, HeadraceError) else cause
