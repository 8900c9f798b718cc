"""Output of workers and exceptions of handlers, in the log of this process."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from headrace.functions import protocol
from headrace.functions.protocol import LOG_MARK
from headrace.records import Record
from headrace.runtime import Clock

log = logging.getLogger(__name__)

_TAIL_LINES = 20
_LINE_BYTES = 16_384
_LINES_PER_SECOND = 1000
"""Of one worker; further lines are counted and dropped, because logging them would delay all other workers."""
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def logger_of(about: Mapping[str, str]) -> logging.Logger:
    """Return the logger of the function and trigger in these fields; its level is that of the file, if it has one."""
    return logging.getLogger(
        ".".join(["headrace.function", *(about[n] for n in ("function", "trigger") if n in about)])
    )


class WorkerOutput(asyncio.Protocol):
    """The reading end of a worker's standard output and error. It is always read, so no handler blocks on it."""

    def __init__(self, label: str, about: Mapping[str, str] = MappingProxyType({})) -> None:
        """Prepare; `about` are fields that each line has in a log of JSON."""
        self.ended = asyncio.Event()
        """Set when every process that could write has ended."""
        self._label = label
        self._about = about
        self._logger = logger_of(about)
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._held = b""
        self._lines = _LINES_PER_SECOND
        """The lines that may still be logged in this second."""
        self._dropped = 0
        self._second: asyncio.TimerHandle | None = None
        self._transport: asyncio.BaseTransport | None = None

    @property
    def tail(self) -> str:
        """The last lines that were not the logger's."""
        held = [line for line in self._held.split(b"\n") if line and not line.startswith(LOG_MARK)]
        return "\n".join([*self._tail, *(_text(line) for line in held)][-_TAIL_LINES:])

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._log_lines()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._second:
            self._second.cancel()
        self._next_second()
        if self._held and self._lines:
            self._log(self._held)
        elif self._held:
            self._dropped = self._held.count(b"\n") + 1
            self._report()
        self.ended.set()

    def _log_lines(self) -> None:
        *lines, self._held = self._held.split(b"\n", self._lines)
        if len(self._held) > _LINE_BYTES and len(lines) < self._lines:
            lines.append(self._held)  # a line without an end
            self._held = b""
        for line in lines:
            self._log(line)
        self._lines -= len(lines)
        if not self._second and lines:
            self._second = asyncio.get_running_loop().call_later(1, self._next_second)
        if len(self._held) > _LINE_BYTES:
            self._dropped += self._held.count(b"\n", 0, -_LINE_BYTES) or b"\n" not in self._held
            self._held = self._held[-_LINE_BYTES:]

    def _next_second(self) -> None:
        self._second = None
        self._report()
        self._lines = _LINES_PER_SECOND
        self._log_lines()

    def _report(self) -> None:
        if self._dropped:
            text = "%s: dropped lines=%d from the log; the limit is %d a second for each worker"
            log.warning(text, self._label, self._dropped, _LINES_PER_SECOND)
            self._dropped = 0

    def _log(self, line: bytes) -> None:
        if line.startswith(LOG_MARK):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                level, message, fields = msgspec.json.decode(line[1:], type=tuple[str, str, dict[str, Any]])
                text = message + "".join(f" {name}={value!r}" for name, value in fields.items())
                own = {"event_id": fields.pop("event_id")} if "event_id" in fields else {}
                fields.pop("worker_id", None)
                self._write(_LEVELS.get(level, logging.INFO), text, message, **own, fields=fields)
                return
        self._tail.append(_text(line))
        self._write(logging.INFO, self._tail[-1], self._tail[-1])

    def _write(self, level: int, text: str, message: str, **fields: Any) -> None:
        as_json = {"message": message, **self._about, **fields}
        self._logger.log(level, "%s: %s", self._label, text, extra={"as_json": as_json})


def _text(line: bytes) -> str:
    return line[:_LINE_BYTES].decode(errors="replace")


_PAUSE_SECONDS = 60.0
_MAX_KINDS = 100


class FailureLog:
    """Logs the exceptions of one function, one of a kind a minute: a class of exception and the line that raised it."""

    def __init__(self, function: str, trigger: str, clock: Clock) -> None:
        self._label = f"function {function}.{trigger}"
        self._about = {"function": function, "trigger": trigger}
        self._clock = clock
        self._silent_until: dict[tuple[str, str], float] = {}

    def add(self, record: Record, result: protocol.Result, request: str = "") -> None:
        """Log the failure of a record, or of a request by its id, unless its kind was logged in the last minute."""
        frames = [line.strip() for line in result.stack.splitlines() if line.lstrip().startswith('File "')]
        kind, now = (result.error, frames[-1] if frames else ""), self._clock.monotonic()
        if now < self._silent_until.get(kind, now):
            return
        if len(self._silent_until) >= _MAX_KINDS:
            self._silent_until.clear()
        self._silent_until[kind] = now + _PAUSE_SECONDS
        where = f"in request {request}" if request else f"at {record.topic_partition} offset {record.offset}"
        event_id = request or f"{record.topic_partition}-{record.offset}"
        text = f"the handler raised {result.reason} {where}"
        as_json = {"message": text, **self._about, "event_id": event_id, "exception": result.stack}
        logger_of(self._about).warning("%s: %s\n%s", self._label, text, result.stack, extra={"as_json": as_json})
