"""A handler that is called in this process."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from headrace.cli.main import main
from tests.function_workers import Write
from yaml_table import table

HANDLER = table(__file__, "handler")


def call(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """Run `headrace function test`, check its exit code, and return what it prints."""
    sys.modules.pop("main", None)
    with pytest.raises(SystemExit) as ended:
        main(("function", "test", *words))
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == code, printed.err
    return printed


def test_a_handler_is_called_in_the_foreground(write_function: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Its end, outputs and log lines are printed; a plain handler may run an event loop of its own."""
    write_function(HANDLER, outputTopic="out")
    done = call(capsys, "--value", "ä", "--key", "k")
    lines = ["output: seen key=k headers=[] none", "output: out key=k headers=[] ä", "succeeded"]
    assert done.out.splitlines() == lines
    assert "info called worker_id='0' thing=5 event_id='flights-0-0'" in done.err
    assert call(capsys, "--value", "raise", code=1).out == "failed: ValueError: no\n"
    assert call(capsys, "--value", "refuse", code=1).out == "failed: status 422: bad\n"
    found = json.loads(call(capsys, "--value", "ä", "--output", "json").out)
    assert (found["ok"], found["outputs"][1]["value"]) == (True, "ä")
    assert (
        "--record flights is not valid: write TOPIC:PARTITION:OFFSET" in call(capsys, "--record", "flights", code=1).err
    )
