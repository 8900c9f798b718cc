"""A service that records what is called, for the tests of those who start and stop services."""

from __future__ import annotations

import asyncio

from headrace.runtime import Deadline, Readiness, Service


class RecordedService(Service):
    """Its methods with a name in `broken` raise; it drains, and is ready, when it may."""

    def __init__(self, name: str, events: list[str], *broken: str) -> None:
        super().__init__(name)
        self.may_drain = asyncio.Event()
        self.may_drain.set()
        self._events = events
        self._broken = broken

    async def start(self) -> None:
        self._record("start")

    async def drain(self, deadline: Deadline) -> None:
        self._record("drain")
        await self.may_drain.wait()

    async def stop(self) -> None:
        await super().stop()
        self._record("stop")

    def readiness(self) -> Readiness:
        return Readiness(self.may_drain.is_set(), "" if self.may_drain.is_set() else "stalled")

    def _record(self, method: str) -> None:
        self._events.append(f"{method} {self.name}")
        if method in self._broken:
            raise RuntimeError(f"cannot {method}")
