"""Which delivery begins next: partitions take turns, and a busy one leaves room for those that have nothing under way.

Workers are tasks that are born when there is something to begin and no other is free, and end when there is nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from headrace.delivery.lane import Batch, Lane
from headrace.records import TopicPartition

_KEPT = 4
"""One part in so many of the places is kept for partitions with nothing under way."""


class Dispatcher:
    """Begins deliveries, so many at a time."""

    def __init__(
        self,
        places: int,
        lanes: Mapping[TopicPartition, Lane],
        attempt: Callable[[Lane, Batch], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        """Prepare.

        Args:
            places: Deliveries under way at most.
            lanes: The lanes of the present assignment, as it changes.
            attempt: Makes one attempt.
            spawn: Runs a coroutine as a task of the owner.
        """
        self._places = places
        self._lanes = lanes
        self._attempt = attempt
        self._spawn = spawn
        self._turns: deque[Lane] = deque()
        self._queued: set[Lane] = set()
        self._workers: dict[asyncio.Task[None], Lane] = {}

    def offer(self, lane: Lane) -> None:
        """Say that a lane may have something to begin."""
        self._queue(lane)
        self._begin()

    def _queue(self, lane: Lane) -> None:
        if lane not in self._queued and lane.startable:
            self._queued.add(lane)
            self._turns.append(lane)

    def _begin(self) -> None:
        while len(self._workers) < self._places and (lane := self._next()):
            batch = lane.take()
            self._queue(lane)
            worker = self._spawn(self._work(lane, batch), "delivery")
            self._workers[worker] = lane
            lane.begin(worker, batch)
            worker.add_done_callback(self._worker_ended)

    async def _work(self, lane: Lane, batch: Batch) -> None:
        me = asyncio.current_task()
        assert me
        while True:
            await self._attempt(lane, batch)
            lane.leave(me)
            del self._workers[me]
            self._queue(lane)
            following = self._next()
            if following is None:
                return
            lane, batch = following, following.take()
            self._workers[me] = lane
            lane.begin(me, batch)
            self.offer(lane)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        # Whoever ended on its way, before it began or by a defect, still has its place.
        if lane := self._workers.pop(worker, None):
            lane.leave(worker)
            self._begin()

    def _next(self) -> Lane | None:
        """Return the lane whose turn it is; it is no longer queued."""
        for _ in range(len(self._turns)):
            lane = self._turns.popleft()
            if lane.startable and lane.under_way and self._is_kept():
                self._turns.append(lane)
                continue
            self._queued.discard(lane)
            if lane.startable:
                return lane
        return None

    def _is_kept(self) -> bool:
        """Whether the free places are kept for lanes with nothing under way."""
        free = self._places - len(self._workers)
        if free > self._places // _KEPT:
            return False
        return free <= min(self._places // _KEPT, sum(1 for lane in self._lanes.values() if not lane.under_way))
