"""What a worker writes: lines of print and of the logger, logged under the worker's name; the last are kept."""

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any

import msgspec

from headrace.functions.wire import LOG_MARK

log = logging.getLogger(__name__)

_TAIL_LINES = 20
_LINE_BYTES = 16_384
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class WorkerOutput(asyncio.Protocol):
    """The reading end of a worker's standard output and error."""

    def __init__(self, label: str) -> None:
        """Log under this label."""
        self.ended = asyncio.Event()
        """Set when every process that could write has ended."""
        self._label = label
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._held = b""

    @property
    def tail(self) -> str:
        """The last lines that were not the logger's."""
        return "\n".join(self._tail)

    def data_received(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > _LINE_BYTES:
            lines.append(self._held)
            self._held = b""
        for line in lines:
            self._log(line)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._held:
            self._log(self._held)
        self.ended.set()

    def _log(self, line: bytes) -> None:
        if line.startswith(LOG_MARK):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                level, message, fields = msgspec.json.decode(line[1:], type=tuple[str, str, dict[str, Any]])
                extra = "".join(f" {name}={value!r}" for name, value in fields.items())
                log.log(_LEVELS.get(level, logging.INFO), "%s: %s%s", self._label, message, extra)
                return
        text = line[:_LINE_BYTES].decode(errors="replace")
        self._tail.append(text)
        log.info("%s: %s", self._label, text)
