"""The fixtures of tests on a broker with one process per module."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.testing import HeadraceProcess
from headrace.testing.scenario import Scenario


@pytest.fixture
def url(site: Scenario, module_headrace: Callable[..., HeadraceProcess]) -> str:
    """The process that the tests of a module share; an empty read ends soon."""
    audit = {"to": "topic", "topic": "_audit-active"}
    return module_headrace({**site.config, "audit": audit}).url


@pytest.fixture
def source(topic: Callable[..., str]) -> str:
    """A topic of the test with two partitions."""
    return topic(2)
