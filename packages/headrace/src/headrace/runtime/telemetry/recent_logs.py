"""The latest log records of this process in memory, for administrators; bounded in number and bytes."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from headrace.runtime.telemetry.correlation import correlation_id

MAX_RECORDS: Final = 10_000
MAX_CHARACTERS: Final = 4_000_000
"""Of all messages together."""
_MESSAGE_CHARACTERS: Final = 2000
_RECORD_CHARACTERS: Final = 200
"""Counted for each record in addition to its message."""


class LoggedRecord(NamedTuple):
    """One log record."""

    timestamp: int
    """Milliseconds since the epoch."""
    level: int
    logger: str
    message: str
    """Cut after 2000 characters; an exception adds its type and text, and no trace."""
    correlation_id: str


class RecentLogs(logging.Handler):
    """Keeps the latest records; older ones are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[LoggedRecord] = deque()
        self._characters = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
            if record.exc_info and (cause := record.exc_info[1]):
                message = f"{message[:_MESSAGE_CHARACTERS]}: {type(cause).__name__}: {cause}"
        except Exception:  # noqa: BLE001 boundary: a record that cannot be formatted must not stop its caller
            self.handleError(record)
            return
        kept = LoggedRecord(
            int(record.created * 1000), record.levelno, record.name, message[:_MESSAGE_CHARACTERS], correlation_id.get()
        )
        self._records.append(kept)
        self._characters += _size_of(kept)
        while len(self._records) > MAX_RECORDS or self._characters > MAX_CHARACTERS:
            self._characters -= _size_of(self._records.popleft())

    def find(self, logger: str, least_level: int, start_ms: int, end_ms: int) -> Sequence[LoggedRecord]:
        """Return the records of a time and from a level on, the oldest first.

        Args:
            logger: Name of the logger; those below it count too. Empty for all.
            least_level: As in `logging`.
        """
        self.acquire()  # threads log too
        try:
            records = [*self._records]
        finally:
            self.release()
        below = f"{logger}."
        return [
            record
            for record in records
            if record.level >= least_level
            and start_ms <= record.timestamp <= end_ms
            and (not logger or record.logger == logger or record.logger.startswith(below))
        ]


def _size_of(record: LoggedRecord) -> int:
    return len(record.message) + len(record.logger) + _RECORD_CHARACTERS
