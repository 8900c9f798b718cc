"""What a log line looks like."""

from __future__ import annotations

import json
import logging
import os
import sys

import pytest

from headrace.runtime.telemetry import log_writer
from headrace.runtime.telemetry.correlation import correlation_id
from headrace.runtime.telemetry.logs import JsonFormatter, TextFormatter, configure_logging


def record(message: str, *args: object, failed: bool = False) -> logging.LogRecord:
    info = None
    if failed:
        try:
            raise ValueError("broken")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("headrace.http", logging.ERROR, __file__, 1, message, args, info)


def test_json_is_one_line_with_the_id_of_the_request() -> None:
    """Also with a stack trace and line ends in the message."""
    token = correlation_id.set("abc")
    try:
        line = JsonFormatter().format(record("a\nb %s", "c", failed=True))
    finally:
        correlation_id.reset(token)
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["level"], entry["logger"], entry["message"], entry["correlationId"]) == (
        "error",
        "headrace.http",
        "a\nb c",
        "abc",
    )
    assert "ValueError: broken" in entry["exception"]


def test_text_shows_control_characters_instead_of_sending_them() -> None:
    """A topic name from outside cannot look like another log line, nor move the cursor; traces need `--debug`."""
    broken = record("topic %s", "x\nERROR fake\x1b[2J", failed=True)
    assert TextFormatter(with_traces=False).format(broken).endswith("headrace.http: topic x\\x0aERROR fake\\x1b[2J")
    assert "Traceback" in TextFormatter(with_traces=True).format(broken)


@pytest.mark.parametrize("form", ["auto", "json", "text"])
def test_configured_logging_has_its_form_and_keeps_noise_out(capfd: pytest.CaptureFixture[str], form: str) -> None:
    """One line per record of the wanted level; JSON to a pipe by default. The server's chatter is not among them."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logging("info", form)
        logging.getLogger("headrace.x").info("shown")
        logging.getLogger("headrace.x").debug("hidden")
        logging.getLogger("uvicorn.error").info("hidden too")
        root.handlers[0].flush()
        lines = capfd.readouterr().err.splitlines()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = lines
    assert line.endswith("headrace.x: shown") if form == "text" else json.loads(line)["message"] == "shown"


def test_lines_wait_for_a_reader_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at a descriptor that does not block; further ones are dropped and counted."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    monkeypatch.setattr(log_writer, "_STANDARD_ERROR", sink)
    writer, mebibytes = log_writer.LogWriter(), "x" * 7 * 2**20
    for _ in range(3):
        writer.handle(record(mebibytes))
    with os.fdopen(source) as lines:
        assert [len(next(lines)) for _ in range(2)] == [len(mebibytes) + 1] * 2
        assert next(lines) == "dropped 1 log lines that standard error did not take in time\n"
    writer.close()
    os.close(sink)
