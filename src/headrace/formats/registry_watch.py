"""Whether the schema registry answers, for readiness."""

from __future__ import annotations

from headrace.errors import RegistryUnavailable
from headrace.formats.registry import SchemaRegistry
from headrace.lifecycle import Clock, Readiness, Service

_WELL_SECONDS = 10.0
_ILL_SECONDS = 1.0


class RegistryWatch(Service):
    """Asks the registry now and then; requests that need it are not held up by this."""

    def __init__(self, registry: SchemaRegistry, clock: Clock) -> None:
        super().__init__("schema registry")
        self._registry = registry
        self._clock = clock
        self._problem = "the schema registry was not asked yet"

    async def start(self) -> None:
        self.spawn(self._watch(), "watch")

    def readiness(self) -> Readiness:
        return Readiness(not self._problem, self._problem)

    async def _watch(self) -> None:
        while True:
            try:
                await self._registry.check()
            except RegistryUnavailable as error:
                self._problem = error.description
            else:
                self._problem = ""
            await self._clock.sleep(_ILL_SECONDS if self._problem else _WELL_SECONDS)
