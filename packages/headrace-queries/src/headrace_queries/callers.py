"""Who sends statements, and how long a caller waits after one of its statements has ended a process."""

import math
from typing import Final, NamedTuple

from headrace.errors import TooManyRequests
from headrace.runtime import Clock

_FIRST_SECONDS: Final = 5.0
_LONGEST_SECONDS: Final = 600.0
_FORGOTTEN_SECONDS: Final = 3_600.0
_MOST_CALLERS: Final = 1_000


class Caller(NamedTuple):
    """The caller of a statement."""

    owner: str
    """Name of its principal; empty without authentication."""
    address: str = ""

    @property
    def name(self) -> str:
        """Its principal, or its address without authentication."""
        return self.owner or self.address


class _Ends(NamedTuple):
    times: int
    at: float
    until: float


class CallerEnds:
    """Counts the processes that each caller's statements have ended, and rejects its statements for a growing time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: dict[str, _Ends] = {}
        """The caller that was counted last is at the end."""

    def count(self, caller: Caller) -> float:
        """Count an end, and return the seconds for which statements of this caller are rejected."""
        now = self._clock.monotonic()
        known = self._ends.pop(caller.name, None)
        times = known.times + 1 if known and now - known.at < _FORGOTTEN_SECONDS else 1
        seconds = min(_FIRST_SECONDS * 2.0 ** min(times - 1, 30), _LONGEST_SECONDS)
        self._ends[caller.name] = _Ends(times, now, now + seconds)
        if len(self._ends) > _MOST_CALLERS:
            del self._ends[next(iter(self._ends))]
        return seconds

    def check(self, caller: Caller) -> None:
        """Raise TooManyRequests while statements of this caller are rejected."""
        known = self._ends.get(caller.name)
        if known is None or (left := known.until - self._clock.monotonic()) <= 0:
            return
        error = TooManyRequests(
            f"a statement of this caller could not be interrupted, and its process was ended ({known.times} times): "
            f"change it, and send statements again after {math.ceil(left)} s"
        )
        error.retry_after_seconds = math.ceil(left)
        raise error
