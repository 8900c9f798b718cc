"""Assaults on this process, to test how its clients behave. Each ends by itself, and there is one of each kind."""

import asyncio
import logging
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from headrace.errors import InternalError, InvalidRequest
from headrace.runtime import Clock, Deadline, Readiness, Service
from headrace.runtime.memory import trim

log = logging.getLogger(__name__)

Assault = Literal["latency", "exception", "memory", "kill"]
ASSAULTS: Final[tuple[Assault, ...]] = get_args(Assault)
Disturbance = Callable[[], Awaitable[None]]
"""Delays a request, or raises its error."""
_MAX_SECONDS: Final = 600
_KILL_SECONDS: Final = 1.0
"""For the response and the audit event."""
_STEP_BYTES: Final = 4_194_304
_STEP_SECONDS: Final = 0.02
_MEGABYTE: Final = 1_048_576
_MEMORY = Path("/proc/meminfo")


class AssaultRequest(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The extent of an assault. Fields of other assaults have no effect."""

    seconds: Annotated[float, Meta(ge=0, le=_MAX_SECONDS)] = 60.0
    """How long it lasts; 0 ends a running one. `kill` ends the process after a second."""
    level: Annotated[int, Meta(ge=1, le=10_000)] = 10
    """Latency, exception: on average one request in this many is hit."""
    milliseconds: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    """Latency: delay of such a request."""
    megabytes: Annotated[int, Meta(ge=1, le=512)] = 64
    """Memory: how much is filled, in MiB."""


class AssaultView(msgspec.Struct, rename="camel"):
    """An assault that runs."""

    seconds_left: float
    by: str
    settings: AssaultRequest


class Running(NamedTuple):
    """An assault that runs."""

    settings: AssaultRequest
    by: str
    end: Deadline
    task: asyncio.Task[None]


class Chaos(Service):
    """Runs assaults. Readiness names them; health, metrics and administration are never hit."""

    def __init__(self, clock: Clock, apply: Callable[[Disturbance | None], None]) -> None:
        """Prepare; `apply` takes the disturbance of requests, or None when there is none any more."""
        super().__init__("chaos")
        self._clock = clock
        self._apply = apply
        self._running: dict[Assault, Running] = {}
        self._random = random.Random()
        self.on_end: Callable[[Assault], None] = lambda _: None
        """Called when an assault has ended."""

    async def start(self) -> None:
        """Nothing runs until a request."""

    async def drain(self, deadline: Deadline) -> None:
        for assault in [*self._running]:
            self.end(assault)

    def readiness(self) -> Readiness:
        """Always ready; the reason names the assaults."""
        views = self.running()
        return Readiness(True, "; ".join(f"assault {name} for {one.seconds_left:.0f} s" for name, one in views.items()))

    def running(self) -> dict[Assault, AssaultView]:
        """Return the assaults that run."""
        return {
            name: AssaultView(round(one.end.remaining_seconds, 1), one.by, one.settings)
            for name, one in self._running.items()
        }

    def begin(self, assault: Assault, settings: AssaultRequest, by: str) -> None:
        """Begin an assault, instead of a running one of the same kind.

        Raises:
            InvalidRequest: This machine has not enough free memory.
        """
        if assault == "memory" and (free := _free_bytes()) < 2 * settings.megabytes * _MEGABYTE:
            raise InvalidRequest(f"the machine has {free // _MEGABYTE} MiB of free memory: fill at most half of it")
        self.end(assault)
        end = Deadline(self._clock, settings.seconds)
        task = self.spawn(self._run(assault, settings), assault)
        self._running[assault] = Running(settings, by, end, task)
        self._apply(self._disturb)
        log.warning("assault %s by %s begins, for %g s", assault, by, settings.seconds)

    def end(self, assault: Assault) -> bool:
        """End an assault; return whether it ran."""
        running = self._running.pop(assault, None)
        if running is None:
            return False
        running.task.cancel()
        if not self._running.keys() & {"latency", "exception"}:
            self._apply(None)
        log.warning("assault %s has ended", assault)
        self.on_end(assault)
        return True

    async def _run(self, assault: Assault, settings: AssaultRequest) -> None:
        if assault == "kill":
            await self._clock.sleep(_KILL_SECONDS)
            log.critical("an assault kills this process")
            os.kill(os.getpid(), signal.SIGKILL)
        elif assault == "memory":
            await self._fill(settings)
        else:
            await self._clock.sleep(settings.seconds)
        self.end(assault)

    async def _fill(self, settings: AssaultRequest) -> None:
        end = Deadline(self._clock, settings.seconds)
        filled: list[bytearray] = []
        try:
            while len(filled) * _STEP_BYTES < settings.megabytes * _MEGABYTE and not end.passed:
                filled.append(bytearray(b"\1") * _STEP_BYTES)  # zeros would take no memory before they are written
                await self._clock.sleep(_STEP_SECONDS)
            await self._clock.sleep(end.remaining_seconds)
        finally:
            filled.clear()
            trim()

    async def _disturb(self) -> None:
        """Delay a request or fail it, as the running assaults say."""
        if (one := self._running.get("latency")) and self._hits(one):
            await self._clock.sleep(one.settings.milliseconds / 1000)
        if (one := self._running.get("exception")) and self._hits(one):
            raise InternalError("an assault fails this request (POST /adm/chaosmonkey/exception); it is not a defect")

    def _hits(self, one: Running) -> bool:
        return not one.end.passed and self._random.randrange(one.settings.level) == 0


def _free_bytes() -> int:
    """Return the memory that this machine can give; 0 where the system does not report it."""
    try:
        line = next(line for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return 0
