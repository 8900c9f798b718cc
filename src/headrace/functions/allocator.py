"""Which worker takes the next frame: the first free one (pool), or always the same for a partition (static).

Pure bookkeeping on the loop: workers are numbers here. A worker is free, busy, on its way up, or down; only while
every worker that could serve is down is a caller refused, otherwise it waits its turn.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from headrace.errors import DestinationUnavailable
from headrace.records import TopicPartition


class Allocator(Protocol):
    """Hands out workers."""

    @property
    def waiting(self) -> int:
        """Callers that wait for a worker; never more than there are partitions."""

    async def acquire(self, partition: TopicPartition) -> int:
        """Return a worker, which is then busy. If cancelled, none was taken.

        Raises:
            DestinationUnavailable: Every worker that could serve is down; says why.
        """

    def free(self, worker: int) -> None:
        """Say that a worker is up and has nothing to do."""

    def starting(self, worker: int) -> None:
        """Say that a worker is on its way up."""

    def down(self, worker: int, why: str) -> None:
        """Say that a worker is down for a while."""


class Pool:
    """The first free worker takes the next frame; who waits longest comes first."""

    def __init__(self, workers: Iterable[int]) -> None:
        """Take the numbers of the workers, all on their way up."""
        self._workers = frozenset(workers)
        self._free: deque[int] = deque()
        self._busy: set[int] = set()
        self._down: dict[int, str] = {}
        self._waiters: deque[asyncio.Future[int]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def acquire(self, partition: TopicPartition) -> int:
        if self._free:
            worker = self._free.popleft()
            self._busy.add(worker)
            return worker
        self._refuse_if_all_down()
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            # Race: the worker may have been handed over before the cancellation was seen; it must not get lost.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(waiter.result())
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def free(self, worker: int) -> None:
        self.starting(worker)
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._busy.add(worker)
                waiter.set_result(worker)
                return
        self._free.append(worker)

    def starting(self, worker: int) -> None:
        self._busy.discard(worker)
        self._down.pop(worker, None)
        if worker in self._free:
            self._free.remove(worker)

    def down(self, worker: int, why: str) -> None:
        self.starting(worker)
        self._down[worker] = why
        if len(self._down) == len(self._workers):
            waiters, self._waiters = self._waiters, deque()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(self._unavailable())

    def _give_back(self, worker: int) -> None:
        if worker in self._busy:
            self.free(worker)

    def _refuse_if_all_down(self) -> None:
        if len(self._down) == len(self._workers):
            raise self._unavailable()

    def _unavailable(self) -> DestinationUnavailable:
        return DestinationUnavailable(next(iter(self._down.values())))


class Static:
    """A partition always has the same worker, whatever else is assigned: its state may be kept in memory."""

    def __init__(self, workers: Iterable[int]) -> None:
        """Take the numbers of the workers, all on their way up."""
        self._pools = [Pool([worker]) for worker in workers]

    @property
    def waiting(self) -> int:
        return sum(pool.waiting for pool in self._pools)

    def worker_of(self, partition: TopicPartition) -> int:
        """Return a partition's worker: partitions of a topic in turn, each topic from a start of its own."""
        return (zlib.crc32(partition.topic.encode()) + partition.partition) % len(self._pools)

    async def acquire(self, partition: TopicPartition) -> int:
        return await self._pools[self.worker_of(partition)].acquire(partition)

    def free(self, worker: int) -> None:
        self._pools[worker].free(worker)

    def starting(self, worker: int) -> None:
        self._pools[worker].starting(worker)

    def down(self, worker: int, why: str) -> None:
        self._pools[worker].down(worker, why)
