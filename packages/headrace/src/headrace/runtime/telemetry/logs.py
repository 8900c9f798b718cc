"""Logging: one line per record on standard error, for people on a terminal, JSON everywhere else."""

import logging
import re
import sys
from datetime import UTC, datetime
from typing import Final

import msgspec

from headrace.runtime.telemetry.correlation import correlation_id
from headrace.runtime.telemetry.log_writer import LogWriter
from headrace.runtime.telemetry.tracing import current_span

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NOISY: Final = ("uvicorn", "aiohttp", "asyncio")


def configure_logging(level: str, form: str = "auto", process: int | None = None) -> None:
    """Log from `level` on (`debug`, `info`, `warning`, `error`) to standard error; replaces earlier settings.

    `form` is `json`, `text`, or `auto` for text on a terminal. `process` is the number of one of several processes.
    """
    is_text = sys.stderr.isatty() if form == "auto" else form == "text"
    handler = LogWriter()
    handler.setFormatter(TextFormatter(level == "debug", process) if is_text else JsonFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


class JsonFormatter(logging.Formatter):
    """One JSON object per record, with what its `as_json` has instead of the text for people and besides."""

    def __init__(self, process: int | None = None) -> None:
        """Name the number of the process, if there is one."""
        super().__init__()
        self._own = {} if process is None else {"process": process}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time_of(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._own,
        }
        if identity := correlation_id.get():
            entry["correlationId"] = identity
        if span := current_span.get():
            entry |= {"traceId": span.trace_id, "spanId": span.span_id}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry |= getattr(record, "as_json", {})
        return msgspec.json.encode(entry).decode()


class TextFormatter(logging.Formatter):
    """A line for people. Control characters are shown, not sent, so no text can pose as another line."""

    def __init__(self, with_traces: bool, process: int | None = None) -> None:
        """Append stack traces, on lines of their own, only if `with_traces`; name the process, if it has a number."""
        super().__init__()
        self._process = "" if process is None else f"[{process}]"
        self._with_traces = with_traces

    def format(self, record: logging.LogRecord) -> str:
        message = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", record.getMessage())
        identity = correlation_id.get()
        start = f"{_time_of(record).astimezone():%H:%M:%S} {record.levelname.lower():8} {record.name}{self._process}"
        line = f"{start}: {message}"
        if identity:
            line += f" [{identity}]"
        if record.exc_info and self._with_traces:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _time_of(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)
