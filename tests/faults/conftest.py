"""The fixtures of fault tests."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from headrace.runtime import child_environment, failpoints
from headrace_devkit.testing import Cluster, StartHeadrace
from headrace_pipelines import driver_process, runs
from tests.faults.ledger import Ledger
from tests.faults.push_scenario import PushScenario

_LONG_REPETITIONS = 3


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The cluster of a test: of three brokers, if it asks for them."""
    found: Cluster = request.getfixturevalue("kafka_three" if "kafka_three" in request.fixturenames else "kafka")
    return found


@pytest.fixture
def ledger(cluster: Cluster, tmp_path: Path) -> Ledger:
    """The topics and offsets of the cluster."""
    return Ledger(cluster, tmp_path)


@pytest.fixture
def scenario(
    cluster: Cluster, headrace: StartHeadrace, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[PushScenario]:
    """A topic, a backend with a journal, and what starts processes of the group."""
    made = PushScenario(cluster, headrace, tmp_path, **getattr(request, "param", {}))
    made.backend.start()
    yield made
    made.backend.stop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With `--all` run every short fault test several times: each time the fault hits another moment."""
    if metafunc.config.getoption("--all") and not metafunc.definition.get_closest_marker("long"):
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(1, _LONG_REPETITIONS + 1))


@pytest.fixture
def failpoints_of_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Spark drivers have the failpoints of this process: a child sees no variable of Headrace otherwise."""

    def environment(hidden: Collection[str]) -> dict[str, str]:
        points = os.environ.get(failpoints.VARIABLE)
        return child_environment(hidden) | ({failpoints.VARIABLE: points} if points else {})

    monkeypatch.setattr(driver_process, "child_environment", environment)


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a driver again at once: the pauses of a driver that dies again and again are most of a test otherwise."""
    monkeypatch.setattr(runs, "_LONGEST_PAUSE_SECONDS", 0.2)
