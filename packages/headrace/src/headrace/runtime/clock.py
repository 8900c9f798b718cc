"""One clock for everything that waits, so that tests can control time; and fair slices of long computations.

Callers without a `Clock` call `clock.monotonic()` and the others here, so that a simulation can replace them.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from time import monotonic, perf_counter, time, time_ns
from typing import Any, Final, Protocol
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
        return monotonic()

    def time(self) -> float:
        return time()

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


class RestartPauses:
    """Pauses between the starts of one service, process or group: each twice as long as the previous one."""

    def __init__(self, clock: Clock, first_seconds: float, longest_seconds: float, steady_seconds: float) -> None:
        """Start without failures. The failure of a run that was `steady_seconds` long counts as the first."""
        self.failures = 0
        """Failures in a row."""
        self.longest_seconds = longest_seconds
        self._clock = clock
        self._first_seconds = first_seconds
        self._steady_seconds = steady_seconds
        self._started_at = clock.monotonic()

    def started(self) -> None:
        """Let the present run begin now."""
        self._started_at = self._clock.monotonic()

    @property
    def steady(self) -> bool:
        """Whether the present run is long enough."""
        return self._clock.monotonic() - self._started_at >= self._steady_seconds

    def failed(self) -> float:
        """Count a failure and return the seconds to wait before the next start."""
        self.failures = 1 if self.steady else self.failures + 1
        return min(self._first_seconds * 2.0 ** min(self.failures - 1, 30), self.longest_seconds)

    async def keep(
        self,
        work: Callable[[], Coroutine[Any, Any, object]],
        on_failure: Callable[[Exception, float], None],
        failures: type[Exception] = Exception,
        wait: Callable[[float], Awaitable[object]] | None = None,
    ) -> None:
        """Run work until it returns a false value: again at once after a true one, and after a pause if it fails.

        Args:
            on_failure: Called with the error, and the seconds of the pause that begins.
            failures: The errors that are failures; others are raised.
            wait: Waits for these seconds, where something else decides about a pause, too.
        """
        while True:
            self.started()
            try:
                if not await work():
                    return
                self.failures = 0
                continue
            except failures as cause:
                pause = self.failed()
                on_failure(cause, pause)
            await (wait or self._clock.sleep)(pause)


_WAITING: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]]] = WeakKeyDictionary()


async def next_slice(*, started: bool = False) -> None:
    """Wait until this computation may run its next slice, of a few milliseconds.

    `asyncio.sleep(0)` would run all of them in the same iteration: thirty slices of 5 ms block the loop for 150 ms.
    A `started` computation goes first. Otherwise thirty large requests would alternate, and all be in memory at once.
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


class TokenBucket:
    """Provides `per_second` tokens on average, and at most `burst` at once.

    `take` may overdraw the bucket; later callers then wait until the debt is paid. So takes of any size keep the rate.
    """

    __slots__ = ("_at", "_clock", "_level", "burst", "per_second")

    def __init__(self, clock: Clock, per_second: float, burst: float = 0.0) -> None:
        """Start with a full bucket of `burst` tokens; with 0, each take waits for the debt of the previous one."""
        self.per_second = per_second
        self.burst = burst
        self._clock = clock
        self._level = burst
        self._at = clock.monotonic()

    def seconds_until(self, tokens: float = 0.0) -> float:
        """Return the time until the bucket holds this many tokens; with 0, until there is no debt."""
        return max(0.0, (tokens - self._fill()) / self.per_second)

    def take(self, tokens: float = 1.0) -> None:
        """Take tokens, also those that the bucket does not hold yet."""
        self._level = self._fill() - tokens

    def try_take(self) -> bool:
        """Take a token if the bucket holds one, and return whether it did."""
        if self._fill() < 1:
            return False
        self._level -= 1
        return True

    async def wait(self, tokens: float) -> None:
        """Wait until there is no debt, then take tokens."""
        if seconds := self.seconds_until():
            await self._clock.sleep(seconds)
        self.take(tokens)

    def _fill(self) -> float:
        now = self._clock.monotonic()
        self._level = min(self.burst, self._level + (now - self._at) * self.per_second)
        self._at = now
        return self._level
