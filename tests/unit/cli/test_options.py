"""Options that select dead letters, and the option for a rate."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from headrace.cli.dlq import dlq
from headrace.cli.options import selection_options
from headrace.runs.selection import Selection, to_bytes
from yaml_table import table


def selected(*words: str) -> Any:
    found: list[Selection] = []

    @click.command()
    @selection_options
    def command(selection: Selection) -> None:
        found.append(selection)

    done = CliRunner().invoke(command, list(words))
    return found[0] if found else (done.exit_code, done.output)


@pytest.mark.parametrize("words", table(__file__, "invalid_selections_are_wrong_usage"))
def test_invalid_selections_are_wrong_usage(words: list[str]) -> None:
    """The exit code is 2."""
    code, output = selected(*words)
    assert (code, "Error: " in output) == (2, True)


def test_keys_and_headers_are_bytes() -> None:
    """Also those that are no text: a shell gives them as they are."""
    found = selected("--key", "a", "--key", "\udcff\udcfe", "--header", "h=\udcff=1")
    assert [to_bytes(key) for key in found.keys] == [b"a", b"\xff\xfe"]
    assert to_bytes(found.headers["h"]) == b"\xff=1"


@pytest.mark.parametrize("condition", [("--key", "\udcff"), ("--header", "a=\udcff")])
@pytest.mark.parametrize("where", [(), ("--url", "http://127.0.0.1:9"), ("--to-backend", "push")])
def test_a_condition_that_cannot_be_sent_is_not_dropped(condition: tuple[str, str], where: tuple[str, ...]) -> None:
    """Otherwise dead letters would be written that were not selected."""
    done = CliRunner().invoke(dlq, ["redrive", "t.dlq", *condition, *where])
    assert (done.exit_code, "must be UTF-8 text" in done.output) == (2, True)
