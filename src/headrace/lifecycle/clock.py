"""One clock for everything that waits, so that tests can control time; and turns of long computations."""

import asyncio
import time
from collections import deque
from typing import Final, Protocol
from weakref import WeakKeyDictionary


class Clock(Protocol):
    """Time, as the rest of Headrace uses it."""

    def monotonic(self) -> float:
        """Seconds that only grow; for deadlines and ages."""

    def time(self) -> float:
        """Seconds since the epoch; for people and other machines."""

    async def sleep(self, seconds: float) -> None:
        """Wait; cancelling the wait is safe."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Deadline:
    """A point in time that callers pass on, so that all layers share one limit."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._end = clock.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - self._clock.monotonic())

    @property
    def passed(self) -> bool:
        """Whether the time is up."""
        return self.remaining_seconds <= 0


_WAITING: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]]] = WeakKeyDictionary()


async def next_slice(*, started: bool = False) -> None:
    """Return when this computation may run its next slice, of a few milliseconds.

    `asyncio.sleep(0)` would let all of them run in the same turn: thirty slices of 5 ms hold the loop for 150 ms.
    One that has `started` goes first: thirty large requests that take turns would all be in memory at once.
    """
    loop = asyncio.get_running_loop()
    waiting = _WAITING.setdefault(loop, deque())
    turn = loop.create_future()
    if started:
        waiting.appendleft(turn)
    else:
        waiting.append(turn)
    if len(waiting) == 1:
        loop.call_soon(_wake_one, loop, waiting)
    await turn


def _wake_one(loop: asyncio.AbstractEventLoop, waiting: deque[asyncio.Future[None]]) -> None:
    while waiting and waiting[0].cancelled():
        waiting.popleft()
    if waiting:
        waiting.popleft().set_result(None)
    if waiting:
        loop.call_soon(_wake_one, loop, waiting)
