"""How many deliveries a destination gets at a time, learned from what it does with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from typing import Protocol


class SlotUser(Protocol):
    """Makes deliveries under a limit that it may share with others."""

    in_flight: int
    """Its deliveries in flight."""
    last_turn: int
    """Number of its last delivery among those of all users."""

    @property
    def waits(self) -> bool:
        """Whether it may have something to begin."""

    def begin_one(self) -> bool:
        """Begin one delivery if there is one and `free_for` leaves a slot; return whether one has begun."""


class AdaptiveLimit:
    """Additive increase, multiplicative decrease, once per round trip at most.

    Latency is no signal here: the time a batch takes says more of its records than of a queue before the destination,
    and a limit that shrinks on it would let one slow key slow down the others. Source: RFC 5681 section 3.1.
    """

    def __init__(self, most: int) -> None:
        """Begin at the upper bound."""
        self.places = most
        """Deliveries under way at most, now."""
        self.under_way = 0
        self.most = most
        """The upper bound."""
        self._allowed = float(most)
        self._cut_at = 0
        self._users: list[SlotUser] = []
        self._live: SlotUser | None = None
        self._turns = 0

    def join(self, user: SlotUser, *, live: bool = False) -> None:
        """Count the deliveries of a user; one slot is reserved for the one that is live."""
        self._users.append(user)
        if live:
            self._live = user

    def leave(self, user: SlotUser) -> None:
        """Forget a user that begins nothing more."""
        if user in self._users:
            self._users.remove(user)

    def free_for(self, user: SlotUser) -> int:
        """Return how many deliveries a user may begin now."""
        free = self.places - self.under_way
        if user is not self._live and self._live:
            free = min(free, max(1, self.places - 1) - (self.under_way - self._live.in_flight))
        return free

    def take(self, user: SlotUser) -> None:
        """Count a delivery that begins."""
        self._turns += 1
        user.last_turn = self._turns
        user.in_flight += 1
        self.under_way += 1

    def give_back(self, user: SlotUser) -> None:
        """Note that a delivery is over."""
        user.in_flight -= 1
        self.under_way -= 1

    def others_wait(self, user: SlotUser) -> bool:
        """Whether another user may have something to begin."""
        return len(self._users) > 1 and any(other.waits for other in self._users if other is not user)

    def begin(self) -> None:
        """Begin what may begin; next is the user with the fewest in flight, of equals the one that waits longest."""
        while any(user.begin_one() for user in self._in_turn()):
            pass

    def _in_turn(self) -> list[SlotUser]:
        users = self._users
        return sorted(users, key=lambda user: (user.in_flight, user.last_turn)) if len(users) > 1 else users

    def change(self, most: int) -> None:
        """Keep another upper bound; what was learned below it stays."""
        self._allowed = float(most) if self.places >= self.most else min(self._allowed, float(most))
        self.most, self.places = most, int(self._allowed)

    def grow(self) -> None:
        """Note that a delivery was answered; a bound that was not reached says nothing."""
        if self.places < self.most and self.under_way >= self.places:
            self._allowed += 1 / self._allowed
            self.places = int(self._allowed)

    def cut(self, ticket: int, newest: int) -> None:
        """Note that a delivery was pushed back; those that began before the last cut were part of the same crowd.

        Args:
            ticket: Number of the delivery.
            newest: Number of the delivery that began last.
        """
        if ticket > self._cut_at:
            self._cut_at = newest
            self._allowed = max(1.0, min(self._allowed, self.under_way) / 2)
            self.places = int(self._allowed)


class SharedSlots:
    """Slots of a limit for deliveries that no pump makes."""

    def __init__(self, limit: AdaptiveLimit) -> None:
        """Prepare; the limit is joined only while somebody waits or delivers."""
        self.in_flight = self.last_turn = 0
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._used = 0

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def begin_one(self) -> bool:
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if not self._waiting or self._limit.free_for(self) <= 0:
            return False
        self._limit.take(self)
        self._waiting.popleft().set_result(None)
        return True

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncGenerator[None, None]:
        """Wait for a slot, and hold it."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(taken)
        if not self._used:
            self._limit.join(self)
        self._used += 1
        self._limit.begin()
        try:
            await taken
            yield
        finally:
            self._used -= 1
            if taken.done() and not taken.cancelled():
                self._limit.give_back(self)
            if not self._used:
                self._limit.leave(self)
            self._limit.begin()
