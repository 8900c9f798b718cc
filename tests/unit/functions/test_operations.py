"""What an operator and a developer meet: environment of workers, readiness, reload, fairness, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


async def test_workers_do_not_get_the_settings_of_headrace(
    write_function: Callable[..., Any], running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`HEADRACE__...` may be a password; the other variables, and those of the file, are there."""
    monkeypatch.setenv("HEADRACE__KAFKA__SECURITY__SASL__PASSWORD", "hush")
    monkeypatch.setenv("HEADRACE_TOKEN", "hush too")
    monkeypatch.setenv("AIRPORT", "JFK")
    code = """
        import os

        def handler(context, event):
            return sorted(name for name in os.environ if name.startswith(("HEADRACE", "AIRPORT", "GATE")))
    """
    folder = write_function(code, spec={"env": [{"name": "GATE", "value": "7"}]}, outputTopic="out")
    async with running(folder) as function:
        await function.deliver(b"")
        assert [record.value for record in function.written] == [b"AIRPORT", b"GATE"]
