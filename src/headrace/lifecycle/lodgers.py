"""Groups of services that come and go while the process runs: what dies in one takes nobody else with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from headrace.errors import HeadraceError, ServiceDied
from headrace.lifecycle.clock import Clock, Deadline
from headrace.lifecycle.gauge_registry import register_gauge, unregister_gauge
from headrace.lifecycle.service import Readiness, Service
from headrace.lifecycle.supervisor import Signals, Supervisor, first_of

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_GAUGES: Final = ("headrace_running_registrations", "headrace_failing_registrations")


class Lodging(NamedTuple):
    """What is to live under a name."""

    version: int
    """Another version of the same name replaces the one before, once that has drained."""
    make: Callable[[], Sequence[Service]]
    """Makes its services, downstream first; again each time it starts."""
    leave: Callable[[], None]
    """Undoes what `make` did beside that; called when they have stopped."""


class _Lodger:
    """One name: what is wanted there, and what lives there now."""

    def __init__(self) -> None:
        self.wanted: Lodging | None = None
        self.changed = asyncio.Event()
        self.signals = Signals()
        self.supervisor: Supervisor | None = None
        self.why = ""
        self.task: asyncio.Task[None] | None = None


class Lodgers(Service):
    """Starts, drains and stops groups of services on demand, each on its own.

    A group of which a service dies, or that cannot be made, is drained and started again after a pause that grows from
    a second to a minute. That is said by `readiness_of`, a gauge and the log, and by nothing else of the process.
    """

    def __init__(self, name: str, clock: Clock, drain_seconds: float) -> None:
        super().__init__(name)
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._lodgers: dict[str, _Lodger] = {}
        self._wanted: Mapping[str, Lodging] = {}

    async def start(self) -> None:
        register_gauge(_GAUGES[0], lambda: sum(lodger.supervisor is not None for lodger in self._lodgers.values()))
        register_gauge(_GAUGES[1], lambda: sum(bool(lodger.why) for lodger in self._lodgers.values()))

    async def drain(self, deadline: Deadline) -> None:
        self.settle({})
        if tasks := [lodger.task for lodger in self._lodgers.values() if lodger.task]:
            await asyncio.wait(tasks, timeout=deadline.remaining_seconds)

    async def stop(self) -> None:
        self.settle({})
        for lodger in self._lodgers.values():
            lodger.signals.notice()  # the second one: now
        if tasks := [lodger.task for lodger in self._lodgers.values() if lodger.task]:
            await asyncio.wait(tasks)
        for gauge in _GAUGES:
            unregister_gauge(gauge)
        await super().stop()

    def settle(self, wanted: Mapping[str, Lodging]) -> None:
        """Let these live here from now on and no others; what goes, or is replaced, drains first."""
        for name in [*self._lodgers, *wanted]:
            lodger, lodging = self._lodgers.get(name), wanted.get(name)
            if lodger is None:
                lodger = self._lodgers[name] = _Lodger()
                lodger.wanted = lodging
                lodger.task = self.spawn(self._live(name, lodger), name)
            elif (lodger.wanted and lodger.wanted.version) != (lodging and lodging.version):
                lodger.wanted = lodging
                lodger.changed.set()
                if not lodger.signals.drain_asked.is_set():
                    lodger.signals.notice()

    def readiness_of(self, name: str) -> Readiness:
        """Say whether what lives under a name does its work, and if not, why."""
        lodger = self._lodgers.get(name)
        if lodger is None:
            return Readiness(False, "not started yet")
        if lodger.supervisor is None:
            return Readiness(False, lodger.why or "not started yet")
        reasons = [text for ready, text in lodger.supervisor.readiness().values() if not ready]
        return Readiness(not reasons, "; ".join(reasons))

    async def _live(self, name: str, lodger: _Lodger) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while lodger.wanted:
            lodger.changed.clear()
            lodger.signals = Signals()
            began = self._clock.monotonic()
            lodger.why = await self._once(lodger, lodger.wanted)
            if not lodger.why:
                pause = _FIRST_PAUSE_SECONDS
                continue
            if self._clock.monotonic() - began > _LONGEST_PAUSE_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            log.error("%s %s: %s; it starts again in %g s", self.name, name, lodger.why, pause)
            await first_of(self._clock.sleep(pause), lodger.changed.wait())
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        del self._lodgers[name]

    async def _once(self, lodger: _Lodger, lodging: Lodging) -> str:
        """Run what is wanted until it is not, or until it dies. Returns why it died."""
        try:
            supervisor = Supervisor(lodging.make(), self._clock, self._drain_seconds)
            await supervisor.start()
            lodger.supervisor, lodger.why = supervisor, ""
            await supervisor.run(lodger.signals)
        except ServiceDied as death:
            return death.description
        except Exception as cause:  # noqa: BLE001 boundary: its owner sees why it cannot start, and nobody else does
            return cause.description if isinstance(cause, HeadraceError) else f"{type(cause).__name__}: {cause}"
        finally:
            lodger.supervisor = None
            lodging.leave()
        return ""
