"""The program `headrace` in the process of a test."""

from __future__ import annotations

import pytest

from headrace.cli.main import main


def headrace(*arguments: str) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)
