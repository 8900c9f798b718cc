"""`headrace console`: what the command hands to the process that serves."""

import pytest

from headrace_console import serve
from tests.command_line import headrace


def test_the_token_of_the_environment_is_for_all_who_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, each logs in."""
    found: list[serve.ConsoleSettings] = []
    monkeypatch.setattr(serve, "serve", lambda settings, announce: found.append(settings))
    for token in ("", "t0ken"):
        monkeypatch.setenv("HEADRACE_TOKEN", token)
        assert headrace("console", "--url", "http://h:1/", "--port", "0") == 0
    assert [(one.urls, one.management, one.token, one.port) for one in found] == [
        (["http://h:1"], "", "", 0),
        (["http://h:1"], "", "t0ken", 0),
    ]
