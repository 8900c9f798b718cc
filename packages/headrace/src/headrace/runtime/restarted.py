"""Services that restart together."""

import asyncio
from collections.abc import Callable, Sequence

from headrace.runtime.clock import Clock, Deadline
from headrace.runtime.service import Readiness, Service
from headrace.runtime.supervisor import Supervisor, run_while


class RestartedServices(Service):
    """Services of one consumer: if one of them dies, all are drained, made again and restarted.

    The pause before that grows from 1 s to a minute. The log, readiness and `headrace_task_failures_total` have the
    reason. Nothing else in the process stops.
    """

    def __init__(
        self, name: str, first: Sequence[Service], again: Callable[[], Sequence[Service]], clock: Clock, seconds: float
    ) -> None:
        """Take the services of the first start, downstream first, and the function that makes them again.

        Args:
            seconds: Limit of the drain after one has died.
        """
        super().__init__(name)
        self._again = again
        self._clock = clock
        self._seconds = seconds
        self._supervisor: Supervisor | None = Supervisor(first, clock, seconds)
        self._requested = asyncio.Event()
        self._running = asyncio.Event()

    async def start(self) -> None:
        assert self._supervisor
        await self._supervisor.start()
        self.keep(self._live, "services")

    async def restart(self) -> None:
        """Drain all, make them again and start them; return when they have started.

        Raises:
            TimeoutError: They have not, within twice the limit of the drain. They will be tried again.
        """
        self._running.clear()
        self._requested.set()
        async with asyncio.timeout(2 * self._seconds):
            await self._running.wait()

    def begin_drain(self, deadline: Deadline) -> None:
        if self._supervisor:
            self._supervisor.begin_drain(deadline)

    async def drain(self, deadline: Deadline) -> None:
        await self.cancel_tasks()
        if self._supervisor:
            await self._supervisor.drain(deadline)

    async def stop(self) -> None:
        await super().stop()
        if self._supervisor:
            await self._supervisor.stop()

    def readiness_by_name(self) -> dict[str, Readiness]:
        found = self._supervisor.readiness() if self._supervisor else {}
        if self.task_failures:
            found[self.name] = Readiness(self._supervisor is not None, self.task_failures)
        return found

    async def _live(self) -> None:
        """Run the services, again after each request to restart; when one dies, drain and stop all of them.

        Raises:
            ServiceDied: One died.
        """
        while True:
            await self._live_once()

    async def _live_once(self) -> None:
        if self._supervisor is None:
            self._requested.clear()
            self._supervisor = Supervisor(self._again(), self._clock, self._seconds)
            try:
                await self._supervisor.start()
            except Exception:  # boundary: `keep` reports it, and what had started is stopped
                self._supervisor = None
                raise
        supervisor = self._supervisor
        if not self._requested.is_set():
            self._running.set()
        death = await run_while(supervisor.death(), self._requested.wait())
        await supervisor.drain()
        await supervisor.stop()
        self._supervisor = None
        if death:
            raise death
