"""A table of Iceberg while drivers are killed and an old checkpoint is put back; read by DuckDB, which wrote none."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import duckdb
import pytest
from pyiceberg.catalog import load_catalog

from headrace.runtime.failpoints import VARIABLE
from headrace_devkit.testing import Cluster, MakeTopic
from tests.faults.test_pipeline_faults import BATCH, Copying, kill_driver
from tests.integration.pipelines.test_pipelines import until

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.usefixtures("failpoints_of_drivers", "quick_restarts")]
KILLS = int(os.environ.get("HEADRACE_TEST_KILLS", "10"))
LIVES = ["", "batch.iceberg.produced=crash@2", "batch.iceberg.committed=crash@2"]
"""Where a driver is killed: at a random moment, before the commit, or between it and Spark's checkpoint."""
FOLDERS = ["checkpoints", "plans"]


@pytest.mark.timeout(900)
def test_a_table_has_each_row_once_over_kills(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills come at random moments, before a commit and between it and Spark's checkpoint. An old one is refused."""
    scenario = Copying(kafka.bootstrap_servers, topic(2), topic(2), tmp_path)
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/lake"}
    scenario.spec["flows"] = {}
    scenario.add_flow("copy", {"iceberg": "lake.copies", "catalog": catalog})

    async def caught_up() -> None:
        scenario.send(2 * BATCH)
        async with scenario.running() as run:
            await scenario.caught_up(run)

    async def killed() -> None:
        async with scenario.running() as run:
            for life in range(KILLS):
                await until(lambda life=life: run.status()["restarts"] >= life and run.readiness().ready, run)
                monkeypatch.setenv(VARIABLE, LIVES[(life + 1) % len(LIVES)])
                scenario.send(3 * BATCH)
                if not LIVES[life % len(LIVES)]:
                    await kill_driver(run, random.uniform(0, 1))
                await until(lambda life=life: run.status()["restarts"] > life, run)
            await scenario.caught_up(run)

    async def refused() -> None:
        async with scenario.running() as run:
            await until(lambda: run.status()["state"] == "failed", run)
            assert "the checkpoint is an old copy" in run.readiness().reason

    asyncio.run(caught_up())
    for name in FOLDERS:
        shutil.copytree(tmp_path / "copying" / name, tmp_path / "old" / name)
    asyncio.run(killed())
    with load_catalog("default", **catalog) as opened:
        table = opened.load_table("lake.copies")
        files = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
        assert table.properties["headrace.copying.copy.batch"]
    found = Counter(row[0] for row in duckdb.sql(f"SELECT id FROM read_parquet({files})").fetchall())
    assert (set(found), found.total()) == (set(range(scenario.sent)), scenario.sent)
    for name in FOLDERS:
        shutil.rmtree(tmp_path / "copying" / name)
        shutil.copytree(tmp_path / "old" / name, tmp_path / "copying" / name)
    asyncio.run(refused())
