"""Pushes all metrics to a server, at an interval. A server that is down costs a line in the log, and nothing else."""

import asyncio
import contextlib
import logging
from typing import Final

from headrace.runtime.clock import Clock, Deadline
from headrace.runtime.service import Service

log = logging.getLogger(__name__)

_LAST_PUSH_SECONDS: Final = 2.0


class PushFailed(Exception):
    """The server did not take the metrics, with the reason."""


class PeriodicPush(Service):
    """Pushes to one server. What fails is not repeated: counters only grow, so the next push has it."""

    outlives = True

    def __init__(self, target: str, server: str, interval_seconds: float, clock: Clock) -> None:
        """Prepare; the server may be down.

        Args:
            target: Label `target` of the failures.
            server: How the log calls it.
            interval_seconds: Time between two pushes.
            clock: Measures it.
        """
        super().__init__(f"metrics to {target}")
        self._target = target
        self._server = server
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._failures = 0
        self._down_since: float | None = None

    async def send(self) -> None:
        """Send the present numbers.

        Raises:
            PushFailed: The server did not take them; the text holds no secret.
        """
        raise NotImplementedError

    async def start(self) -> None:
        self.publish("headrace_metrics_push_failures_total", lambda: self._failures, target=self._target)
        await super().start()

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_seconds)
            await self.push()

    async def drain(self, deadline: Deadline) -> None:
        """Push once more, so that the numbers of the last interval are not lost."""
        await self.cancel_tasks()
        if self._down_since is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.push(), min(_LAST_PUSH_SECONDS, deadline.remaining_seconds))

    async def push(self) -> None:
        """Push the present numbers; a failure is counted, and logged when an outage begins."""
        try:
            await self.send()
        except PushFailed as why:
            self._failures += 1
            if self._down_since is None:
                self._down_since = self._clock.monotonic()
                log.warning("metrics are not taken by %s: %s; pushes continue without more lines", self._server, why)
        else:
            if self._down_since is not None:
                seconds = self._clock.monotonic() - self._down_since
                log.warning("metrics are taken by %s again after %.0f s", self._server, seconds)
            self._down_since = None
