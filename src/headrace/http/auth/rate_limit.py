"""Limits how often one caller may send requests, and how many of them may be unanswered."""

import functools
from collections import Counter

from headrace.errors import TooManyRequests
from headrace.runtime import Clock, TokenBucket

_MAX_KEYS = 10_000
"""The key that was used longest ago is forgotten first: its bucket is full again soonest."""
_FREE_FAILURES = 10
_FAILURES_PER_SECOND = 10


class RateLimit:
    """Allows each key `per_second` on average and a second's worth, at least one, at once."""

    def __init__(self, per_second: float, clock: Clock) -> None:
        burst = max(per_second, 1.0)
        self._bucket_of = functools.lru_cache(_MAX_KEYS)(lambda key: TokenBucket(clock, per_second, burst))

    def take(self, key: str) -> None:
        """Count one request of a key; TooManyRequests if it has used up its limit."""
        if not self._bucket_of(key).try_take():
            raise TooManyRequests("this caller sends more requests than it may: wait, and send again")


class FailureDelay:
    """Delays answers to a key's failures: the first ten are answered at once, then ten per second."""

    MOST_SECONDS = 2.0

    def __init__(self, clock: Clock) -> None:
        self._bucket_of = functools.lru_cache(_MAX_KEYS)(
            lambda key: TokenBucket(clock, _FAILURES_PER_SECOND, _FREE_FAILURES)
        )

    def count(self, key: str) -> float:
        """Count a failure and return how long its response must wait; above `MOST_SECONDS` too many wait already."""
        bucket = self._bucket_of(key)
        wait = bucket.seconds_until(1)
        if wait <= self.MOST_SECONDS:
            bucket.take()
        return wait

    def applies(self, key: str) -> bool:
        """Return whether the response to the next failure of a key would wait."""
        return self._bucket_of(key).seconds_until(1) > 0


class RequestsInFlight:
    """Allows each key so many unanswered requests."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def enter(self, key: str) -> None:
        """Count one more until `leave`; at the limit TooManyRequests, and nothing is counted."""
        if self._counts[key] >= self._limit:
            raise TooManyRequests(f"{self._limit} requests of this caller are not answered yet: wait for some")
        self._counts[key] += 1

    def leave(self, key: str) -> None:
        """Count one less."""
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
