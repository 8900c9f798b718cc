"""Which worker takes the next frame: the first free one (pool), or always the same for a partition (static).

Pure bookkeeping on the loop: workers are numbers here. A worker is free, busy, on its way up, or down; only while
every worker that could serve is down is a caller refused, otherwise it waits its turn.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque

from headrace.errors import DestinationUnavailable
from headrace.records import TopicPartition


class Allocator:
    """Hands out the workers of a trigger, numbered from 0 and at first all on their way up.

    Static allocation is one pool per worker: a partition always has the same one, whatever else is assigned, so its
    state may be kept in the worker's memory.
    """

    def __init__(self, workers: int, *, static: bool = False) -> None:
        self._pools = [_Pool(1) for _ in range(workers)] if static else [_Pool(workers)]

    @property
    def waiting(self) -> int:
        """Callers that wait for a worker; never more than there are partitions."""
        return sum(len(pool.waiters) for pool in self._pools)

    async def acquire(self, partition: TopicPartition) -> int:
        """Return a worker, which is then busy; who waits longest comes first. If cancelled, none was taken.

        Raises:
            DestinationUnavailable: Every worker that could serve is down; says why.
        """
        # Partitions of a topic in turn, each topic from a start of its own; the same in every process.
        number = (zlib.crc32(partition.topic.encode()) + partition.partition) % len(self._pools)
        return await self._pools[number].acquire()

    def free(self, worker: int) -> None:
        """Say that a worker is up and has nothing to do."""
        self._pool_of(worker).free(worker)

    def starting(self, worker: int) -> None:
        """Say that a worker is on its way up."""
        self._pool_of(worker).forget(worker)

    def down(self, worker: int, why: str) -> None:
        """Say that a worker is down for a while."""
        self._pool_of(worker).take_down(worker, why)

    def _pool_of(self, worker: int) -> _Pool:
        return self._pools[worker % len(self._pools)]


class _Pool:
    """The first free worker takes the next frame."""

    def __init__(self, size: int) -> None:
        self.waiters: deque[asyncio.Future[int]] = deque()
        self._size = size
        self._free: deque[int] = deque()
        self._busy: set[int] = set()
        self._down: dict[int, str] = {}

    async def acquire(self) -> int:
        if self._free:
            worker = self._free.popleft()
            self._busy.add(worker)
            return worker
        if len(self._down) == self._size:
            raise self._unavailable()
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in self.waiters:
                self.waiters.remove(waiter)
            # Race: the worker may have been handed over before the cancellation was seen; it must not get lost.
            elif not waiter.cancelled() and waiter.exception() is None and waiter.result() in self._busy:
                self.free(waiter.result())
            raise

    def free(self, worker: int) -> None:
        self.forget(worker)
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                self._busy.add(worker)
                waiter.set_result(worker)
                return
        self._free.append(worker)

    def forget(self, worker: int) -> None:
        self._busy.discard(worker)
        self._down.pop(worker, None)
        if worker in self._free:
            self._free.remove(worker)

    def take_down(self, worker: int, why: str) -> None:
        self.forget(worker)
        self._down[worker] = why
        if len(self._down) == self._size:
            while self.waiters:
                if not (waiter := self.waiters.popleft()).done():
                    waiter.set_exception(self._unavailable())

    def _unavailable(self) -> DestinationUnavailable:
        return DestinationUnavailable(next(iter(self._down.values())))
