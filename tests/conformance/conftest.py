"""The fixtures of tests on a broker with one process per module."""

from __future__ import annotations

import pytest

from headrace_devkit.testing import MakeTopic, SharedHeadrace
from headrace_devkit.testing.scenario import Scenario


@pytest.fixture
def url(site: Scenario, module_headrace: SharedHeadrace) -> str:
    """The process that the tests of a module share; an empty read ends soon."""
    audit = {"to": "topic", "topic": "_audit-active"}
    return module_headrace({**site.config, "audit": audit}).url


@pytest.fixture
def source(topic: MakeTopic) -> str:
    """A topic of the test with two partitions."""
    return topic(2)
