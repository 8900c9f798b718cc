"""The levels of loggers, which may be changed for a time."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from headrace.runtime.clock import Clock

log = logging.getLogger(__name__)

ROOT: Final = "ROOT"


class LoggerState(NamedTuple):
    """A logger that has a level of its own."""

    name: str
    level: int
    until: float | None
    """When the earlier level returns, in seconds since the epoch; None if never."""


class _Change(NamedTuple):
    before: int
    until: float
    timer: asyncio.TimerHandle


class LogLevels:
    """Changes levels of this process. A restart has those of the configuration. For use on the loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changes: dict[str, _Change] = {}

    def all(self) -> Sequence[LoggerState]:
        """Return the root and each logger with a level of its own, by name."""
        known = {ROOT: logging.getLogger(), **logging.getLogger().manager.loggerDict}
        states = []
        for name, logger in known.items():
            if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET:
                change = self._changes.get(name)
                states.append(LoggerState(name, logger.level, change.until if change else None))
        return sorted(states, key=lambda state: (state.name != ROOT, state.name))

    @property
    def names(self) -> set[str]:
        """Names of all loggers, and of the packages that have some."""
        return {ROOT, *logging.getLogger().manager.loggerDict}

    def change(self, name: str, level: int, seconds: float | None) -> None:
        """Set the level of a known logger; after `seconds` its earlier level returns, by default never."""
        logger = _logger(name)
        last = self._changes.pop(name, None)
        if last:
            last.timer.cancel()
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, self._end, name)
            before = last.before if last else logger.level
            self._changes[name] = _Change(before, self._clock.time() + seconds, timer)
        logger.setLevel(level)

    def end_all(self) -> None:
        """Return every earlier level now."""
        for name in [*self._changes]:
            self._end(name)

    def _end(self, name: str) -> None:
        change = self._changes.pop(name)
        change.timer.cancel()
        _logger(name).setLevel(change.before)
        log.info("logger %s has its earlier level again", name)


def _logger(name: str) -> logging.Logger:
    return logging.getLogger(None if name == ROOT else name)
