"""Checks regularly whether a server answers that this process needs, for readiness."""

from typing import Final, Protocol

from headrace.errors import HeadraceError
from headrace.runtime.clock import Clock
from headrace.runtime.service import Readiness, Service

_WATCH_SECONDS: Final = 10.0
_DOWN_WATCH_SECONDS: Final = 1.0


class WatchedServer(Protocol):
    """A client of a server."""

    async def check(self) -> None:
        """Send a cheap request; HeadraceError if the server does not answer it."""

    async def close(self) -> None:
        """Close every connection."""


class ServerWatch(Service):
    """Checks a server. Requests do not wait for it. At its stop the connections are closed."""

    def __init__(self, name: str, server: WatchedServer, clock: Clock) -> None:
        super().__init__(name)
        self._server = server
        self._clock = clock
        self._problem = f"the {name} has not been checked yet"

    def readiness(self) -> Readiness:
        return Readiness(not self._problem, self._problem)

    async def run(self) -> None:
        while True:
            try:
                await self._server.check()
                self._problem = ""
            except HeadraceError as error:
                self._problem = error.description
            await self._clock.sleep(_DOWN_WATCH_SECONDS if self._problem else _WATCH_SECONDS)

    async def stop(self) -> None:
        await super().stop()
        await self._server.close()
