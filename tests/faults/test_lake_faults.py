"""Lake tables while their driver is killed, old checkpoints are put back, and two drivers write.

The checks read the tables by a library of another engine.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable

from headrace.runtime.failpoints import VARIABLE
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_pipelines.runs import PipelineRun
from tests.faults.test_pipeline_faults import BATCH, Copying, kill_driver
from tests.integration.pipelines.test_pipelines import until

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.usefixtures("failpoints_of_drivers", "quick_restarts")]
POINTS = ("batch.delta.produced", "batch.delta.committed")


def ids(table: Path) -> list[int]:
    return sorted(DeltaTable(table).to_pyarrow_table(columns=["id"]).column("id").to_pylist())


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture
def scenario(kafka: Cluster, topic: MakeTopic, tmp_path: Path, table: Path) -> Copying:
    """A pipeline that copies to the table, whose first records are sent."""
    made = Copying(kafka.bootstrap_servers, topic(2), topic(2), tmp_path / "state")
    made.folder.mkdir()
    made.spec["flows"]["copy"]["sink"] = {"delta": str(table), "options": {"delta.checkpointInterval": 5}}
    made.send(BATCH)
    return made


async def caught_up(scenario: Copying) -> None:
    async with scenario.running() as run:
        await scenario.caught_up(run)


@pytest.mark.timeout(1800)
def test_a_delta_table_has_each_row_once(scenario: Copying, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is killed at a random moment, and the next one before or after its commit: 20 kills."""

    async def fall(run: PipelineRun, point: str) -> None:
        """Kill a driver, and let the next one kill itself at a point of one of its first batches."""
        scenario.send(6 * BATCH)
        restarts = run.status()["restarts"]
        monkeypatch.setenv(VARIABLE, f"{point}=crash@{random.randint(1, 2)}")
        await kill_driver(run, random.uniform(0, 1))
        await until(lambda: run.status()["driver_pid"] and run.status()["restarts"] > restarts, run)
        monkeypatch.delenv(VARIABLE)
        scenario.send(3 * BATCH)
        await until(lambda: run.status()["restarts"] >= restarts + 2, run)

    async def main() -> None:
        async with scenario.running() as run:
            for number in range(10):
                await fall(run, POINTS[number % 2])
            await scenario.caught_up(run)

    asyncio.run(main())
    assert ids(table) == [*range(scenario.sent)]


def test_an_old_checkpoint_is_refused(scenario: Copying, table: Path, tmp_path: Path) -> None:
    """With the newest one the flow continues, and nothing is repeated."""
    state, old, newest = scenario.folder / "copying", tmp_path / "old", tmp_path / "newest"

    async def refused() -> None:
        async with scenario.running() as run:
            await until(lambda: run.status()["state"] == "failed", run)
            assert "is an old copy" in run.readiness().reason

    asyncio.run(caught_up(scenario))
    shutil.copytree(state, old)
    scenario.send(3 * BATCH)
    asyncio.run(caught_up(scenario))
    state.rename(newest)
    shutil.copytree(old, state)
    scenario.send(BATCH)
    asyncio.run(refused())
    shutil.rmtree(state)
    newest.rename(state)
    asyncio.run(caught_up(scenario))
    assert ids(table) == [*range(scenario.sent)]


def test_two_drivers_with_one_checkpoint_repeat_nothing(scenario: Copying, table: Path, tmp_path: Path) -> None:
    """Both read all records. At least one goes on, and a row is written by one of them."""
    other = Copying(scenario.kafka.bootstrap_servers, scenario.source, scenario.out, tmp_path / "other")
    other.spec = scenario.spec

    def is_over(run: PipelineRun) -> bool:
        status = run.status()
        done = status["state"] == "running" and status["flows"]["copy"]["lag_records"] == 0
        return done or status["state"] == "failed"

    async def together() -> None:
        async with scenario.running() as one, other.running() as two:
            for _ in range(5):
                scenario.send(BATCH)
                await until(lambda: len(ids(table)) >= scenario.sent, one)
            await until(lambda: is_over(one) and is_over(two), one)
            assert "running" in (one.status()["state"], two.status()["state"])

    asyncio.run(caught_up(scenario))
    shutil.copytree(scenario.folder, other.folder)
    asyncio.run(together())
    assert ids(table) == [*range(scenario.sent)]
