"""Output of workers and exceptions of handlers, in the log of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any

import msgspec

from headrace.functions import wire
from headrace.functions.wire import LOG_MARK
from headrace.lifecycle import Clock
from headrace.records import Record

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
        self._transport: asyncio.BaseTransport | None = None

    @property
    def tail(self) -> str:
        """The last lines that were not the logger's."""
        return "\n".join(self._tail)

    def close(self) -> None:
        """Read no more."""
        if self._transport:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

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


_PAUSE_SECONDS = 60.0
_MAX_KINDS = 100


class FailureLog:
    """Logs the exceptions of one function. A kind is a class of exception and the line that raised it."""

    def __init__(self, name: str, clock: Clock) -> None:
        """Log under this name."""
        self._name, self._clock = name, clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """When a kind was logged last, and how many followed."""

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
