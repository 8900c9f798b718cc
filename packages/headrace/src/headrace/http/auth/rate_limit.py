"""Limits the rate of one caller's requests, and how many of them may be in flight."""

import functools
from collections import Counter

from headrace.errors import TooManyRequests
from headrace.runtime import Clock, TokenBucket

_MAX_KEYS = 10_000
"""The least recently used key is forgotten first, because its bucket refills first."""
_FREE_FAILURES = 10
_FAILURES_PER_SECOND = 10


class RateLimit:
    """Allows each key `per_second` on average, and a burst of one second's requests, at least one."""

    def __init__(self, per_second: float, clock: Clock) -> None:
        burst = max(per_second, 1.0)
        self._bucket_of = functools.lru_cache(_MAX_KEYS)(lambda key: TokenBucket(clock, per_second, burst))

    def take(self, key: str) -> None:
        """Count one request of a key; raise TooManyRequests at the limit."""
        if not self._bucket_of(key).try_take():
            raise TooManyRequests("rate limit of this caller reached: wait, then send again")


class FailureDelay:
    """Delays responses to a key's failures: none for the first ten, then ten per second."""

    MOST_SECONDS = 2.0

    def __init__(self, clock: Clock) -> None:
        self._bucket_of = functools.lru_cache(_MAX_KEYS)(
            lambda key: TokenBucket(clock, _FAILURES_PER_SECOND, _FREE_FAILURES)
        )

    def count(self, key: str) -> float:
        """Count a failure, and return the delay of its response; more than `MOST_SECONDS` if too many wait already."""
        bucket = self._bucket_of(key)
        wait = bucket.seconds_until(1)
        if wait <= self.MOST_SECONDS:
            bucket.take()
        return wait

    def applies(self, key: str) -> bool:
        """Return whether the response to a key's next failure would be delayed."""
        return self._bucket_of(key).seconds_until(1) > 0


class RequestsInFlight:
    """Limits the requests in flight of each key."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """It may be changed; requests in flight stay counted."""
        self._counts: Counter[str] = Counter()

    def enter(self, key: str) -> None:
        """Count a request until `leave`; at the limit raise TooManyRequests and count nothing."""
        if self._counts[key] >= self.limit:
            raise TooManyRequests(
                f"limit of {self.limit} requests in flight reached for this caller: wait for responses"
            )
        self._counts[key] += 1

    def leave(self, key: str) -> None:
        """Stop counting a request."""
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
