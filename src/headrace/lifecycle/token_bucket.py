"""Limits how often something may happen: the one limiter of rates in Headrace."""

from headrace.lifecycle.clock import Clock


class TokenBucket:
    """Gives out `per_second` tokens on average, and at most `burst` at once.

    `take` may overdraw the bucket: what comes later then waits until the debt is paid. So takes of any size keep the
    rate.
    """

    __slots__ = ("_at", "_clock", "_level", "burst", "per_second")

    def __init__(self, clock: Clock, per_second: float, burst: float = 0.0) -> None:
        """Begin with a full bucket that holds at most `burst` tokens; with 0, a take waits for the one before it."""
        self.per_second = per_second
        self.burst = burst
        self._clock = clock
        self._level = burst
        self._at = clock.monotonic()

    def seconds_until(self, tokens: float = 0.0) -> float:
        """Return how long it takes until the bucket holds so many tokens; with 0: until there is no debt."""
        return max(0.0, (tokens - self._fill()) / self.per_second)

    def take(self, tokens: float = 1.0) -> None:
        """Take tokens, also those that the bucket does not hold yet."""
        self._level = self._fill() - tokens

    def try_take(self, tokens: float = 1.0) -> bool:
        """Take tokens if the bucket holds them, and return whether it did."""
        if self._fill() < tokens:
            return False
        self._level -= tokens
        return True

    async def wait(self, tokens: float) -> None:
        """Wait until there is no debt, then take tokens."""
        if seconds := self.seconds_until():
            await self._clock.sleep(seconds)
        self.take(tokens)

    def _fill(self) -> float:
        now = self._clock.monotonic()
        self._level = min(self.burst, self._level + (now - self._at) * self.per_second)
        self._at = now
        return self._level
