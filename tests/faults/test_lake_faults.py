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

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.usefixtures("failpoints_of_drivers")]
POINTS = ("batch.delta.produced", "batch.delta.committed")


def ids(table: Path) -> list[int]:
    return sorted(DeltaTable(table).to_pyarrow_table(columns=["id"]).column("id").to_pylist())


@pytest.mark.timeout(1800)
def test_a_delta_table_has_each_row_once(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A driver is killed at a random moment, and the next one before or after its commit: 20 kills with `--all`.

    Then also an old checkpoint is refused, and a second driver with a copy of the newest one repeats nothing.
    """
    often = request.config.getoption("--all")
    table = tmp_path / "table"
    scenario = Copying(kafka.bootstrap_servers, topic(2), topic(2), tmp_path / "state")
    scenario.folder.mkdir()
    scenario.spec["flows"]["copy"]["sink"] = {"delta": str(table), "options": {"delta.checkpointInterval": 5}}
    state, old = scenario.folder / "copying", tmp_path / "old"

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
            for number in range(10 if often else 1):
                await fall(run, POINTS[number % 2])
            await scenario.caught_up(run)

    async def further() -> None:
        shutil.copytree(state, old)
        scenario.send(3 * BATCH)
        async with scenario.running() as run:
            await scenario.caught_up(run)
        newest = tmp_path / "newest"
        state.rename(newest)
        shutil.copytree(old, state)
        scenario.send(BATCH)
        async with scenario.running() as run:
            await until(lambda: run.status()["state"] == "failed", run)
            assert "is an old copy" in run.readiness().reason
        shutil.rmtree(state)
        newest.rename(state)

    async def together() -> None:
        other = Copying(kafka.bootstrap_servers, scenario.source, scenario.out, tmp_path / "other")
        other.spec, other.folder = scenario.spec, tmp_path / "other"
        shutil.copytree(scenario.folder, other.folder)
        async with scenario.running() as one, other.running() as two:
            runs = (one, two)
            for _ in range(5):
                scenario.send(BATCH)
                await asyncio.sleep(1)

            def is_over(run: PipelineRun) -> bool:
                status = run.status()
                done = status["state"] == "running" and status["flows"]["copy"]["lag_records"] == 0
                return done or status["state"] == "failed"

            await until(lambda: all(map(is_over, runs)), one)
            assert any(run.status()["state"] == "running" for run in runs)

    scenario.send(BATCH)
    asyncio.run(main())
    assert ids(table) == [*range(scenario.sent)]
    if often:
        asyncio.run(further())
        asyncio.run(together())
        assert ids(table) == [*range(scenario.sent)]
