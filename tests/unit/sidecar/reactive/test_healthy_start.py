"""A consumer starts with the first successful health check; before, there is nothing to drain or stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace.config.backend import BackendHealth
from headrace.errors import DestinationUnavailable
from headrace.runtime import Deadline, Readiness, Service
from headrace.sidecar.reactive.backend_connection import BackendResponse
from headrace.sidecar.reactive.healthy_start import StartWhenHealthy
from headrace_devkit.testing import ManualClock


class FakeBackend:
    """Responds with the given statuses, and then always with the last one; 0 is no response."""

    url = "http://localhost/"

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests = 0

    async def get(self, path: str) -> BackendResponse:
        assert path == "/ready?x=1"
        self.requests += 1
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if not status:
            raise DestinationUnavailable("waiting for the backend: no process listens there")
        return BackendResponse(status, {}, b"")


class Consumer(Service):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__("consumer")
        self.calls: list[str] = []
        self.cannot_start = False

    async def start(self) -> None:
        self.calls.append("start")
        if self.cannot_start:
            raise RuntimeError("can't start new thread")

    async def drain(self, deadline: Deadline) -> None:
        self.calls.append("drain")

    async def stop(self) -> None:
        self.calls.append("stop")

    def readiness(self) -> Readiness:
        return Readiness(False, "not joined yet")


@contextlib.asynccontextmanager
async def started(
    backend: FakeBackend, fails: bool = False
) -> AsyncIterator[tuple[StartWhenHealthy, Consumer, ManualClock]]:
    consumer, clock = Consumer(), ManualClock()
    consumer.cannot_start = fails
    gate = StartWhenHealthy(consumer, backend, BackendHealth(path="/ready?x=1"), clock)  # type: ignore[arg-type]
    await gate.start()
    await clock.settle()
    try:
        yield gate, consumer, clock
    finally:
        await gate.stop()


async def test_consumption_begins_with_the_first_success() -> None:
    """Not before; readiness says what it waits for; one request per interval."""
    backend = FakeBackend(0, 503, 302, 204)
    async with started(backend) as (gate, consumer, clock):
        for says in ("no process listens there", "http://localhost/ answers HTTP 503", "HTTP 302"):
            ready, reason = gate.readiness()
            assert (ready, consumer.calls) == (False, [])
            assert reason.startswith("waiting for 2xx of GET /ready: ")  # a query may hold a secret
            assert says in reason
            await clock.advance(1)
        assert consumer.calls == ["start"]
        assert gate.readiness() == Readiness(False, "not joined yet")
        await gate.drain(Deadline(clock, 1))
        await clock.advance(100)
    assert consumer.calls == ["start", "drain", "stop"]
    assert backend.requests == 4


async def test_a_consumer_that_has_not_begun_never_does_after_a_drain() -> None:
    """It has nothing to drain or stop, and the backend gets no more requests."""
    backend = FakeBackend(503)
    async with started(backend) as (gate, consumer, clock):
        await gate.drain(Deadline(clock, 1))
        backend.statuses = [200]
        await clock.advance(100)
    assert consumer.calls == []
    assert backend.requests == 1


async def test_a_consumer_that_cannot_start_is_dead_and_not_started_twice() -> None:
    """What its start has begun would run twice, with two members of its group."""
    async with started(FakeBackend(200), fails=True) as (gate, consumer, _):
        await asyncio.sleep(1.2)  # the pause of a kept task
        assert consumer.calls == ["start"]
        assert isinstance(gate.death, RuntimeError)
