"""Starts services in order, watches them, and takes them down in reverse at a signal."""

import asyncio
import logging
import signal
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from headrace.errors import ServiceDied
from headrace.runtime.clock import Clock, Deadline
from headrace.runtime.service import Readiness, Service

log = logging.getLogger(__name__)

T = TypeVar("T")


class Signals:
    """SIGTERM and SIGINT: the first drains, the second stops now."""

    def __init__(self) -> None:
        self.drain_requested = asyncio.Event()
        """Set by the first SIGTERM or SIGINT."""
        self.stop_requested = asyncio.Event()
        """Set by the second."""

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.notice)

    def notice(self) -> None:
        if self.drain_requested.is_set():
            self.stop_requested.set()
        self.drain_requested.set()


class Supervisor:
    """Owns the services of a process, downstream first.

    Stopping has two steps: first every service drains, in reverse order and by one shared deadline; then every service
    stops, in reverse order. So a service that answers health requests still does while the others drain.
    """

    def __init__(self, services: Sequence[Service], clock: Clock, drain_seconds: float) -> None:
        self._services = list(services)
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._started: list[Service] = []
        self._death = asyncio.Event()
        self.draining = False

    @property
    def services(self) -> Sequence[Service]:
        """Every service, downstream first."""
        return self._services

    def add(self, service: Service) -> None:
        """Add a service that starts after the others, and drains and stops before them. Only before `start`."""
        self._services.append(service)

    async def start(self) -> None:
        """Start every service in order; if one fails, stop those that have started and raise its error."""
        for service in self._services:
            service.on_death = self._died
            try:
                await service.start()
            except BaseException:
                self._started.append(service)
                await self.stop()
                raise
            self._started.insert(0 if service.outlives else len(self._started), service)

    async def run(self, signals: Signals) -> None:
        """Wait for a signal or a death, then drain and stop.

        Raises:
            ServiceDied: A service stopped because of an error; the others were drained.
        """
        await first_of(signals.drain_requested.wait(), self._death.wait())
        self.draining = True
        await first_of(self.drain(), signals.stop_requested.wait())
        await self.stop()
        if self._death.is_set():
            raise await self.death()

    async def death(self) -> ServiceDied:
        """Wait until a service stops because of an error; return which, and why."""
        await self._death.wait()
        service = next(each for each in self._services if each.death is not None)
        died = ServiceDied(f"service {service.name} ended by itself: {service.death}", service=service.name)
        died.__cause__ = service.death
        return died

    def readiness(self) -> dict[str, Readiness]:
        """Return the readiness of each service by name; that of a dead one has its error."""
        found: dict[str, Readiness] = {}
        for service in self._services:
            found |= self._readiness_of(service)
        return found

    def begin_drain(self, deadline: Deadline) -> None:
        """Begin the drain of every started service, so that consumers leave their groups side by side."""
        for service in reversed(self._started):
            service.begin_drain(deadline)

    async def drain(self, deadline: Deadline | None = None) -> None:
        """Drain every started service in reverse order by one shared deadline, by default in `drain_seconds`."""
        deadline = deadline or Deadline(self._clock, self._drain_seconds)
        self.begin_drain(deadline)
        for service in reversed(self._started):
            try:
                await asyncio.wait_for(service.drain(deadline), deadline.remaining_seconds)
            except TimeoutError:
                log.warning("service %s did not drain in time", service.name)
            except Exception:  # boundary: one service's failure to drain must not keep the others from draining
                log.exception("service %s failed to drain", service.name)

    async def stop(self) -> None:
        """Stop every started service in reverse order."""
        self.begin_drain(Deadline(self._clock, 0))
        while self._started:
            service = self._started[-1]
            try:
                await service.stop()
            except Exception:  # boundary: one service's failure to stop must not keep the others alive
                log.exception("service %s failed to stop", service.name)
            self._started.remove(service)  # not if this was cancelled

    def _died(self, service: Service) -> None:
        self._death.set()

    def _readiness_of(self, service: Service) -> dict[str, Readiness]:
        if service.death is not None:
            why = f"ended by itself: {service.death}"
        elif self.draining:
            why = "draining"
        elif service not in self._started:
            why = "not started"
        else:
            return service.readiness_by_name()
        return {service.name: Readiness(False, why)}


async def first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Run all until the first has ended, then cancel the others; raise its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def run_while(work: Coroutine[Any, Any, T], waiting: Coroutine[Any, Any, object]) -> T | None:
    """Run work to its end and return its result.

    If `waiting` ends first, cancel the work; return None, or raise the error of `waiting`.
    """
    task, other = asyncio.ensure_future(work), asyncio.ensure_future(waiting)
    tasks: set[asyncio.Future[Any]] = {task, other}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        other.result()
        return None
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
