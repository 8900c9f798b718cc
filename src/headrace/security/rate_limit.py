"""How often one caller may come (a token bucket per key, of a bounded number of keys), and how often at once."""

from __future__ import annotations

from collections import Counter, OrderedDict

from headrace.errors import TooManyRequests
from headrace.lifecycle import Clock

_MAX_KEYS = 10_000


class RateLimit:
    """Allows `per_second` on average and a second's worth, at least `burst`, at once."""

    def __init__(self, per_second: float, clock: Clock, burst: float = 1.0) -> None:
        self._per_second = per_second
        self._size = max(per_second, burst)
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
