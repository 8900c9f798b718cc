"""Logging of handlers' exceptions: the first of a kind with its stack, then how many came since, once a minute."""

from __future__ import annotations

import logging

from headrace.functions import wire
from headrace.lifecycle import Clock
from headrace.records import Record

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 60.0
_MAX_KINDS = 100


class FailureLog:
    """Logs the exceptions of one function. A kind is a class of exception and the line that raised it."""

    def __init__(self, name: str, clock: Clock) -> None:
        """Log under this name."""
        self._name, self._clock = name, clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """When a kind was logged last, and how many came since."""

    def add(self, record: Record, result: wire.Result) -> None:
        """Take one failure."""
        frames = [line.strip() for line in result.stack.splitlines() if line.lstrip().startswith('File "')]
        kind, now = (result.error, frames[-1] if frames else ""), self._clock.monotonic()
        logged_at, since = self._kinds.get(kind, (float("-inf"), 0))
        if now - logged_at < _PAUSE_SECONDS:
            self._kinds[kind] = logged_at, since + 1
            return
        while len(self._kinds) >= _MAX_KINDS and kind not in self._kinds:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = now, 0
        where = f"{record.topic_partition} offset {record.offset}"
        if logged_at < 0:
            log.warning("%s: the handler raised %s at %s\n%s", self._name, result.reason, where, result.stack)
        else:
            text = "%s: the handler raised %s %d more times in %.0f s, the last time at %s: %s"
            log.warning(text, self._name, result.error, since + 1, now - logged_at, where, result.reason)
