"""The option `--long`; what it runs is in tests/LONG.md."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# How long an example takes says nothing of whether it is right.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

# Whoever starts the tests in the background may have it ignored, and the programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the long tests (tests/LONG.md)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="a long test: run it with --long")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)
