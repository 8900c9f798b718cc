"""How many deliveries a destination gets at a time, learned from its responses, and how many records per second."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Protocol

from headrace.runtime import Clock
from headrace.runtime.clock import TokenBucket

_BURST_SECONDS = 0.1
"""Unused tokens are kept this long, so that late timers do not lower the rate."""
_NO_DEBT_SECONDS = 1e-6
"""A shorter wait is a rounding error: a timer for it could elapse without the clock having moved."""


class SlotUser(Protocol):
    """Makes deliveries under a limit that it may share with others."""

    in_flight: int
    """Its deliveries in flight."""
    last_turn: int
    """The id of its last attempt that took a slot."""

    @property
    def has_records(self) -> bool:
        """Whether it has records that are not completed."""

    def begin_one(self) -> bool:
        """Begin one delivery if there is one and a slot is free; return whether one has begun."""


class AdaptiveLimit:
    """A concurrency limit: additive increase, multiplicative decrease, once per round trip at most.

    Latency is not used as a signal: it depends more on the records of a batch than on a queue at the destination.
    A limit that shrinks with latency would let one slow key slow down the others. Source: RFC 5681 section 3.1.
    """

    def __init__(self, most: int) -> None:
        self.concurrency = most
        """Deliveries in flight at most, now."""
        self.in_flight = 0
        self.most = most
        """The upper bound."""
        self.newest = 0
        """The id of the newest attempt; attempts are numbered from 1 over all users."""
        self._allowed = float(most)
        self._cut_at = 0
        self._users: list[SlotUser] = []
        self._live: SlotUser | None = None
        self._alone = 0
        """Deliveries that require to be alone in flight; they take turns."""
        self._writing = 0
        """Finished deliveries that keep their slots while their dead letters are written."""
        self._alone_turn = asyncio.Lock()
        self._changed = asyncio.Event()

    def join(self, user: SlotUser, *, live: bool = False) -> None:
        """Count the deliveries of a user; one slot is reserved for the live user."""
        self._users.append(user)
        if live:
            self._live = user

    def leave(self, user: SlotUser) -> None:
        """Remove a user that begins nothing more, and the slot that is reserved for it."""
        if user in self._users:
            self._users.remove(user)
        if user is self._live:
            self._live = None

    @property
    def has_records(self) -> bool:
        """Whether a user has records that are not completed, or there is no user."""
        return not self._users or any(user.has_records for user in self._users)

    @property
    def is_shared(self) -> bool:
        """Whether several users take slots."""
        return len(self._users) > 1

    def free_for(self, user: SlotUser) -> int:
        """Return how many deliveries a user may begin now; below zero if it should have fewer in flight."""
        free, live = self.concurrency - self.in_flight, self._live
        if self._alone:
            return -1
        if live is user or live is None:
            return free
        return min(free, max(1, self.concurrency - 1) - (self.in_flight - live.in_flight))

    def take(self, user: SlotUser) -> int:
        """Take a slot for a delivery that begins; return the id of its attempt."""
        self.newest += 1
        user.last_turn = self.newest
        user.in_flight += 1
        self.in_flight += 1
        return self.newest

    def keep(self) -> int:
        """Begin another attempt in the slot of one that was answered; return its id."""
        self._grow()
        self.newest += 1
        return self.newest

    def release(self, user: SlotUser, *, answered: bool = False) -> None:
        """Release the slot of a finished delivery; if it was answered, the limit may grow."""
        if answered:
            self._grow()
        user.in_flight -= 1
        self.in_flight -= 1
        self._changed.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncGenerator[None, None]:
        """Wait until nothing else is in flight; nothing else begins while the context lasts."""
        self._alone += 1
        self._changed.set()
        try:
            async with self._alone_turn:
                while self.in_flight - self._writing > self._alone:
                    self._changed.clear()
                    await self._changed.wait()
                yield
        finally:
            self._alone -= 1
            self.begin()

    @contextlib.contextmanager
    def writing(self) -> Generator[None, None, None]:
        """Keep a slot while dead letters are written; a delivery that must be alone does not wait for it."""
        self._writing += 1
        self._changed.set()
        try:
            yield
        finally:
            self._writing -= 1

    def begin(self) -> None:
        """Begin what may begin: first the user with the fewest in flight, then the one that has waited longest."""
        while any(user.begin_one() for user in sorted(self._users, key=lambda user: (user.in_flight, user.last_turn))):
            pass

    def change(self, most: int) -> None:
        """Set another upper bound; a lower limit that was learned stays."""
        self._allowed = float(most) if self.concurrency >= self.most else min(self._allowed, float(most))
        self.most, self.concurrency = most, int(self._allowed)

    def _grow(self) -> None:
        """Grow, if the limit is reached."""
        if self.concurrency < self.most and self.in_flight >= self.concurrency:
            self._allowed += 1 / self._allowed
            self.concurrency = int(self._allowed)

    def cut(self, attempt_id: int) -> None:
        """Halve the limit after a refused delivery, unless it began before the last cut."""
        if attempt_id > self._cut_at:
            self._cut_at = self.newest
            self._allowed = max(1.0, min(self._allowed, self.in_flight) / 2)
            self.concurrency = int(self._allowed)


class DeliveryRate:
    """Limits the records per second of the pumps of one consumer: a delivery waits until those before are paid for."""

    def __init__(
        self, clock: Clock, later: Callable[[float, Callable[[], None]], asyncio.Task[None]], wake: Callable[[], None]
    ) -> None:
        """Begin without a limit; `later` calls a function after a pause, `wake` begins deliveries again."""
        self._clock = clock
        self._later = later
        self._wakes = [wake]
        self._bucket: TokenBucket | None = None
        self._pause: asyncio.Task[None] | None = None

    @property
    def records_per_second(self) -> float | None:
        """The limit; None for none."""
        return self._bucket.per_second if self._bucket else None

    def share(self, wake: Callable[[], None]) -> None:
        """Take turns with another pump."""
        self._wakes.append(wake)

    def change(self, records_per_second: float | None) -> None:
        """Set another rate."""
        if records_per_second != self.records_per_second:
            rate = records_per_second
            self._bucket = TokenBucket(self._clock, rate, rate * _BURST_SECONDS) if rate else None
            if self._pause:
                self._pause.cancel()
            self._over()

    @property
    def admits(self) -> bool:
        """Whether a delivery may begin now; if not, `wake` is called later."""
        if self._bucket is None:
            return True
        seconds = self._bucket.seconds_until()
        if seconds > _NO_DEBT_SECONDS and not self._pause:
            self._pause = self._later(seconds, self._over)
        return seconds <= _NO_DEBT_SECONDS

    @property
    def waits_for(self) -> str:
        """Why nothing begins, in one sentence; empty while deliveries may begin."""
        if self._bucket is None or self._bucket.seconds_until() <= _NO_DEBT_SECONDS:
            return ""
        return f"deliveries are limited to {self._bucket.per_second:g} records a second"

    def take(self, records: int) -> None:
        """Count records of a delivery that begins."""
        if self._bucket:
            self._bucket.take(records)

    def _over(self) -> None:
        self._pause = None
        self._wakes.append(self._wakes.pop(0))
        for wake in self._wakes:
            wake()
