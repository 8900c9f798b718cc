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


def configure_logging(level: str, form: str = "auto") -> None:
    """Log from `level` on (`debug`, `info`, `warning`, `error`) to standard error; replaces earlier settings.

    `form` is `json`, `text`, or `auto` for text on a terminal.
    """
    is_text = sys.stderr.isatty() if form == "auto" else form == "text"
    handler = LogWriter()
    handler.setFormatter(TextFormatter(level == "debug") if is_text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


class JsonFormatter(logging.Formatter):
    """One JSON object per record, with what its `as_json` has instead of the text for people and besides."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time_of(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
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

    def __init__(self, with_traces: bool) -> None:
        """Append stack traces, on lines of their own, only if `with_traces`."""
        super().__init__()
        self._with_traces = with_traces

    def format(self, record: logging.LogRecord) -> str:
        message = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", record.getMessage())
        identity = correlation_id.get()
        line = f"{_time_of(record).astimezone():%H:%M:%S} {record.levelname.lower():8} {record.name}: {message}"
        if identity:
            line += f" [{identity}]"
        if record.exc_info and self._with_traces:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _time_of(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)
