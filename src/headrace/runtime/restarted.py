"""Services that restart together."""

from collections.abc import Callable, Sequence

from headrace.runtime.clock import Clock, Deadline
from headrace.runtime.service import Readiness, Service
from headrace.runtime.supervisor import Supervisor


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

    async def start(self) -> None:
        assert self._supervisor
        await self._supervisor.start()
        self.keep(self._live, "services")

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
        """Run the services until one dies, then drain and stop all of them.

        Raises:
            ServiceDied: One died.
        """
        if self._supervisor is None:
            self._supervisor = Supervisor(self._again(), self._clock, self._seconds)
            try:
                await self._supervisor.start()
            except Exception:  # boundary: `keep` reports it, and what had started is stopped
                self._supervisor = None
                raise
        supervisor = self._supervisor
        death = await supervisor.death()
        await supervisor.drain()
        await supervisor.stop()
        self._supervisor = None
        raise death
