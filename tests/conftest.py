"""The option `--long`; what it runs is in tests/LONG.md."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the long tests (tests/LONG.md)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="a long test: run it with --long")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)
