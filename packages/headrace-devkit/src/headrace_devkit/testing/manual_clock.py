"""A clock for tests of what waits."""

import asyncio
import heapq

_FEWEST_TURNS, _MOST_TURNS = 20, 1000


class ManualClock:
    """A clock that moves only when `advance` is called."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = 0

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        self._number += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._number, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move time forward, waking every sleeper in the order of its due time."""
        target = self._now + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= target:
            due, _, future = heapq.heappop(self._sleepers)
            self._now = max(self._now, due)
            if not future.done():
                future.set_result(None)
            await self.settle()
        self._now = target
        await self.settle()

    async def settle(self) -> None:
        """Let every task run until it waits for something."""
        ready = getattr(asyncio.get_running_loop(), "_ready", ())  # asyncio's queue of what runs in the next turn
        for turn in range(_MOST_TURNS):
            if turn >= _FEWEST_TURNS and not ready:
                return
            await asyncio.sleep(0)
