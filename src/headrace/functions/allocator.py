"""Chooses the worker of the next frame: the first free one (pool), or always the same for a partition (static).

Pure bookkeeping on the loop: workers are numbers here. A worker is free, busy, starting, or down; only while
every worker that could serve is down is a caller refused, otherwise it waits.
"""

import asyncio
import zlib

from headrace.errors import DestinationUnavailable
from headrace.records import TopicPartition


class Allocator:
    """Hands out the workers of a trigger, numbered from 0 and at first all on their way up.

    Static allocation is one pool per worker: a partition always has the same one, whatever else is assigned, so its
    state may be kept in the worker's memory.
    """

    def __init__(self, workers: int, *, static: bool = False) -> None:
        self._pools = [range(n, n + 1) for n in range(workers)] if static else [range(workers)]
        self._free: list[int] = []
        self._busy: set[int] = set()
        self._down: dict[int, str] = {}
        self._waiters: list[tuple[range, asyncio.Future[int]]] = []

    @property
    def waiting(self) -> int:
        """Callers that wait for a worker; never more than there are partitions."""
        return len(self._waiters)

    async def acquire(self, partition: TopicPartition) -> int:
        """Return a worker, which is then busy; the longest waiting caller is first. If cancelled, none was taken.

        Raises:
            DestinationUnavailable: Every worker that could serve is down; the text has the reason.
        """
        # Partitions of a topic in turn, each topic with an offset of its own; the same in every process.
        number = (zlib.crc32(partition.topic.encode()) + partition.partition) % len(self._pools)
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._pools[number], waiter))
        self._assign()
        try:
            return await waiter
        except asyncio.CancelledError:
            # Race: the worker may have been handed over before the cancellation was seen; it must not get lost.
            if not waiter.cancelled() and waiter.exception() is None and waiter.result() in self._busy:
                self.free(waiter.result())
            self._assign()
            raise

    def free(self, worker: int) -> None:
        """Take note that a worker is up and idle."""
        self.starting(worker)
        self._free.append(worker)
        self._assign()

    def starting(self, worker: int) -> None:
        """Take note that a worker is starting."""
        self._busy.discard(worker)
        self._down.pop(worker, None)
        if worker in self._free:
            self._free.remove(worker)

    def down(self, worker: int, why: str) -> None:
        """Take note that a worker is down for a while."""
        self.starting(worker)
        self._down[worker] = why
        self._assign()

    def _assign(self) -> None:
        """Give each waiting caller, in order, a free worker of its pool, or refuse it if the whole pool is down."""
        waiters, self._waiters = self._waiters, []
        for pool, waiter in waiters:
            worker = next((number for number in self._free if number in pool), None)
            if waiter.done():
                continue
            if worker is not None:
                self._free.remove(worker)
                self._busy.add(worker)
                waiter.set_result(worker)
            elif all(number in self._down for number in pool):
                waiter.set_exception(DestinationUnavailable(self._down[pool[0]]))
            else:
                self._waiters.append((pool, waiter))
