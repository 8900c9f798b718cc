"""How often one caller may come (a token bucket per key, of a bounded number of keys), and how often at once."""

from __future__ import annotations

from collections import Counter, OrderedDict

from headrace.errors import TooManyRequests
from headrace.lifecycle import Clock

_MAX_KEYS = 10_000
_FREE_FAILURES = 10
_FAILURE_SECONDS = 0.1


class RateLimit:
    """Allows `per_second` on average and a second's worth, at least one, at once."""

    def __init__(self, per_second: float, clock: Clock) -> None:
        self._per_second = per_second
        self._size = max(per_second, 1.0)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> None:
        """Count one.

        Raises:
            TooManyRequests: It is one too many.
        """
        now = self._clock.monotonic()
        level, since = self._buckets.pop(key, (self._size, now))
        level = min(self._size, level + (now - since) * self._per_second)
        allowed = level >= 1
        self._buckets[key] = (level - 1 if allowed else level, now)
        if len(self._buckets) > _MAX_KEYS:  # the one unused longest is full again soonest
            self._buckets.popitem(last=False)
        if not allowed:
            raise TooManyRequests("more requests came than this caller may send: wait, and send again")


class FailureDelay:
    """Says how long the answer to a key's failure must wait: the first ten do not, then ten per second are answered."""

    MOST_SECONDS = 2.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()

    def count(self, key: str) -> float:
        """Count a failure; more than `MOST_SECONDS`: too many wait already."""
        now = self._clock.monotonic()
        free_at = max(self._free_at.pop(key, now), now) + _FAILURE_SECONDS
        self._free_at[key] = min(free_at, now + _FREE_FAILURES * _FAILURE_SECONDS + self.MOST_SECONDS)
        if len(self._free_at) > _MAX_KEYS:
            self._free_at.popitem(last=False)
        return max(0.0, free_at - now - _FREE_FAILURES * _FAILURE_SECONDS)

    def applies(self, key: str) -> bool:
        """Return whether the next failure of a key would wait."""
        now = self._clock.monotonic()
        return self._free_at.get(key, now) - now > (_FREE_FAILURES - 1) * _FAILURE_SECONDS


class InFlight:
    """Allows each key so many at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def enter(self, key: str) -> None:
        """Count one more until `leave`.

        Raises:
            TooManyRequests: It is one too many, and not counted.
        """
        if self._counts[key] >= self._limit:
            raise TooManyRequests(f"{self._limit} requests of this caller are not answered yet: wait for some")
        self._counts[key] += 1

    def leave(self, key: str) -> None:
        """Count one less."""
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
