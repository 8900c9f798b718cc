"""How late the event loop is: everything that it serves waits as long."""

import asyncio
from typing import Final

from headrace.runtime import clock
from headrace.runtime.gauge_registry import DurationHistogram
from headrace.runtime.service import Service

_INTERVAL_SECONDS: Final = 0.1


class LoopDelay(Service):
    """Measures by how much a timer of the loop is late."""

    def __init__(self) -> None:
        super().__init__("loop delay")
        self._delays = DurationHistogram()

    async def start(self) -> None:
        self.publish("headrace_event_loop_delay_seconds", lambda: self._delays)
        await super().start()

    async def run(self) -> None:
        while True:
            due = clock.perf_counter() + _INTERVAL_SECONDS
            await asyncio.sleep(_INTERVAL_SECONDS)
            self._delays.add(max(0.0, clock.perf_counter() - due))
