"""How many records a destination is given per second at most: a bucket of tokens for all lanes of its pumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.lifecycle import Clock

_BURST_SECONDS = 0.1
"""What was not used is kept for so long, so that late timers do not lower the rate."""


class Rate:
    """A delivery begins when what began before it is paid for, so deliveries of any size keep the rate."""

    def __init__(
        self,
        clock: Clock,
        later: Callable[[float, Callable[[], None]], asyncio.Task[None]],
        wake: Callable[[], None],
    ) -> None:
        """Begin without a limit; `later` calls something after a pause, `wake` has deliveries begin again."""
        self.records_per_second: float | None = None
        """None for no limit."""
        self._clock = clock
        self._later = later
        self._wakes = [wake]
        self._free_at = 0.0
        self._pause: asyncio.Task[None] | None = None

    def share(self, wake: Callable[[], None]) -> None:
        """Have another pump to the same destination take turns."""
        self._wakes.append(wake)

    def change(self, records_per_second: float | None) -> None:
        """Keep another rate from now on."""
        if records_per_second != self.records_per_second:
            self.records_per_second = records_per_second
            self._free_at = 0.0
            if self._pause:
                self._pause.cancel()
            self._over()

    @property
    def admits(self) -> bool:
        """Whether a delivery may begin now; if not, `wake` is called when one may."""
        if self.records_per_second is None:
            return True
        seconds = self._free_at - self._clock.monotonic()
        if seconds > 0 and not self._pause:
            self._pause = self._later(seconds, self._over)
        return seconds <= 0

    @property
    def waits_for(self) -> str:
        """Why nothing begins, in one sentence; empty while it may."""
        if self.records_per_second is None or self._free_at <= self._clock.monotonic():
            return ""
        return f"deliveries are limited to {self.records_per_second:g} records a second"

    def take(self, records: int) -> None:
        """Note that so many records begin."""
        if self.records_per_second is not None:
            earliest = self._clock.monotonic() - _BURST_SECONDS
            self._free_at = max(self._free_at, earliest) + records / self.records_per_second

    def _over(self) -> None:
        self._pause = None
        self._wakes.append(self._wakes.pop(0))
        for wake in self._wakes:
            wake()
