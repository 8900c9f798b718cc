"""Which delivery begins next: partitions take turns, and a busy one leaves room for those that have nothing under way.

Workers are tasks that are born when there is something to begin and no other is free, and end when there is nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from headrace.delivery.batch import Batch
from headrace.delivery.breaker import Breaker
from headrace.delivery.lane import Lane
from headrace.delivery.rate import Rate
from headrace.records import TopicPartition

_KEPT = 4
"""One part in so many of the places is kept for partitions with nothing under way."""


class Dispatcher:
    """Begins deliveries, so many at a time."""

    def __init__(
        self,
        breaker: Breaker,
        rate: Rate,
        lanes: Mapping[TopicPartition, Lane],
        attempt: Callable[[Lane, Batch, int], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        *,
        live: bool = True,
    ) -> None:
        """Prepare.

        Args:
            breaker: Knows whether and how many deliveries the destination gets.
            rate: Knows how many records may begin.
            lanes: The lanes of the present assignment, as it changes.
            attempt: Makes one attempt, known to the breaker by its ticket.
            spawn: Runs a coroutine as a task of the owner.
            live: Whether one slot of the limit is reserved for it.
        """
        self.in_flight = self.last_turn = 0
        self._breaker = breaker
        self._limit = breaker.limit
        self._limit.join(self, live=live)
        self.rate = rate
        self._lanes = lanes
        self._attempt = attempt
        self._spawn = spawn
        self._turns: deque[Lane] = deque()
        self._queued: set[Lane] = set()
        self._busy = 0  # lanes with something under way
        self._workers: dict[asyncio.Task[None], tuple[Lane, int]] = {}

    def offer(self, lane: Lane) -> None:
        """Say that a lane may have something to begin."""
        self._queue(lane)
        self.begin()

    def begin(self) -> None:
        """Begin what may begin now, here or at others who share the limit."""
        self._limit.begin()

    def close(self) -> None:
        """Begin nothing more."""
        self._limit.leave(self)
        self._limit.begin()

    @property
    def waits(self) -> bool:
        return bool(self._turns)

    def begin_one(self) -> bool:
        if not (lane := self._next()):
            return False
        batch, ticket = self._take(lane)
        self._queue(lane)
        worker = self._spawn(self._work(lane, batch, ticket), "delivery")
        self._enter(worker, lane, batch, ticket)
        worker.add_done_callback(self._worker_ended)
        return True

    def _queue(self, lane: Lane) -> None:
        if lane not in self._queued and lane.startable:
            self._queued.add(lane)
            self._turns.append(lane)

    def _take(self, lane: Lane) -> tuple[Batch, int]:
        batch = lane.take()
        if batch.letters:
            return batch, 0
        self.rate.take(len(batch.records))
        self._limit.take(self)
        return batch, self._breaker.begin()

    def _enter(self, worker: asyncio.Task[None], lane: Lane, batch: Batch, ticket: int) -> None:
        self._workers[worker] = (lane, ticket)
        self._busy += not lane.under_way
        lane.begin(worker, batch)

    async def _work(self, lane: Lane, batch: Batch, ticket: int) -> None:
        me = asyncio.current_task()
        assert me
        if ticket and self._breaker.stops(ticket):
            lane.give_back(batch)
            return  # `_worker_ended` does the rest
        while True:
            await self._attempt(lane, batch, ticket)
            self._leave(me)
            self._queue(lane)
            following = None if self._limit.others_wait(self) else self._next()
            if following is None:
                self.begin()
                return
            lane = following
            batch, ticket = self._take(lane)
            self._enter(me, lane, batch, ticket)
            self.offer(lane)

    def _leave(self, worker: asyncio.Task[None]) -> Lane | None:
        lane, ticket = self._workers.pop(worker, (None, 0))
        if lane:
            lane.leave(worker)
            self._busy -= not lane.under_way
            if ticket:  # dead letters need no leave of the destination's
                self._limit.give_back(self)
                self._breaker.leave(ticket)
        return lane

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        # Whoever ended on its way, before it began or by a defect, still has its place.
        if lane := self._leave(worker):
            self.offer(lane)

    def _next(self) -> Lane | None:
        """Return the lane whose turn it is, if a delivery may begin; it is no longer queued."""
        free = self._limit.free_for(self) - (len(self._workers) - self.in_flight)  # dead letters are written beside
        if free <= 0 or not self._turns or not self._breaker.admits or not self.rate.admits:
            return None
        for _ in range(len(self._turns)):
            lane = self._turns.popleft()
            startable = lane.startable
            if startable and lane.under_way and self._is_kept(free):
                self._turns.append(lane)
                continue
            self._queued.discard(lane)
            if startable:
                return lane
        return None

    def _is_kept(self, free: int) -> bool:
        """Whether the free places are kept for lanes with nothing under way."""
        return free <= min(self._limit.places // _KEPT, len(self._lanes) - self._busy)
