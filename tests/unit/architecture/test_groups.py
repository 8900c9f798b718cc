"""Tests of a group run in one worker: a version of the test runner that ignores groups must not go unnoticed."""

import pytest


@pytest.mark.xdist_group("alone")
def test_a_group_is_known_to_its_worker(request: pytest.FixtureRequest) -> None:
    """The plug-in tells the scheduler by the end of the test's id; without it three tests would share two cores."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@alone")
