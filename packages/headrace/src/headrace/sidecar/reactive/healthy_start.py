"""Starts a consumer once its backend is ready, if `backend.health` is set."""

import logging

from headrace.config.backend import BackendHealth
from headrace.errors import DestinationUnavailable
from headrace.runtime import Clock, Deadline, Readiness, Service
from headrace.sidecar.reactive.client import BackendClient

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0


class StartWhenHealthy(Service):
    """Starts a service once its backend is healthy, and represents it from then on."""

    def __init__(self, waiting: Service, client: BackendClient, health: BackendHealth, clock: Clock) -> None:
        super().__init__(waiting.name)
        self._waiting = waiting
        self._client = client
        self._health = health
        self._clock = clock
        self._what = f"waiting for 2xx of GET {health.path.partition('?')[0]}"
        self._why = self._what
        self._begun = False

    async def start(self) -> None:
        self._waiting.on_death = self._died
        self.keep(self._begin, "health")

    def begin_drain(self, deadline: Deadline) -> None:
        if self._begun:
            self._waiting.begin_drain(deadline)

    async def drain(self, deadline: Deadline) -> None:
        await self.cancel_tasks()
        if self._begun:
            await self._waiting.drain(deadline)

    async def stop(self) -> None:
        await super().stop()
        if self._begun:
            await self._waiting.stop()

    def readiness(self) -> Readiness:
        return self._waiting.readiness() if self._begun else Readiness(False, self._why)

    async def _begin(self) -> None:
        log.info("%s: %s", self.name, self._why)
        while why := await self._problem():
            self._why = f"{self._what}: {why}"
            await self._clock.sleep(_PAUSE_SECONDS)
        self._begun = True
        try:
            await self._waiting.start()
        except Exception as cause:  # noqa: BLE001 boundary: a part of it may run, and must not start twice
            self.die(cause)
        else:
            log.info("%s: the backend is ready, starting to consume", self.name)

    async def _problem(self) -> str:
        try:
            response = await self._client.get(self._health.path)
        except DestinationUnavailable as error:
            return error.description
        return "" if response.status < 300 else f"{self._client.url} answers HTTP {response.status}"

    def _died(self, service: Service) -> None:
        self.death = service.death
        if self.on_death:
            self.on_death(self)
