"""A table of Iceberg while drivers are killed and an old checkpoint is put back; read by DuckDB, which wrote none."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import duckdb
import pytest
from pyiceberg.catalog import load_catalog

from headrace.runtime.failpoints import VARIABLE
from headrace_devkit.testing import Cluster, MakeTopic
from tests.faults.test_pipeline_faults import BATCH, Copying
from tests.integration.pipelines.test_pipelines import until

pytestmark = [pytest.mark.heavy, pytest.mark.long]
KILLS = int(os.environ.get("HEADRACE_TEST_KILLS", "10"))
POINTS = ["batch.produced", "batch.committed"]


@pytest.mark.timeout(900)
def test_a_table_has_each_row_once_over_kills(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills come at random moments, before a commit and between it and Spark's checkpoint. An old one is refused."""
    scenario = Copying(kafka.bootstrap_servers, topic(2), topic(2), tmp_path)
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/lake"}
    scenario.spec["flows"] = {}
    scenario.add_flow("copy", {"iceberg": "lake.copies", "catalog": catalog})
    old = tmp_path / "old"

    async def killed(number: int) -> None:
        async with scenario.running() as run:
            scenario.send(3 * BATCH)
            if number % 3:
                await until(lambda: run.status()["restarts"] > 0, run)
            else:
                await until(lambda: run.status()["flows"]["copy"]["input_records"] > 0, run)
                await asyncio.sleep(random.uniform(0, 1))
                if pid := run.status()["driver_pid"]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    async def finished() -> None:
        async with scenario.running() as run:
            await scenario.caught_up(run)

    async def refused() -> None:
        async with scenario.running() as run:
            await until(lambda: run.status()["state"] == "failed", run)
            assert "the checkpoint is an old copy" in run.readiness().reason

    for number in range(KILLS):
        monkeypatch.setenv(VARIABLE, f"{POINTS[number % 3 - 1]}=crash@2" if number % 3 else "")
        asyncio.run(killed(number))
        if number == KILLS // 2:
            shutil.copytree(tmp_path, old, ignore=shutil.ignore_patterns("lake", "catalog.db", "old"))
    monkeypatch.delenv(VARIABLE)
    asyncio.run(finished())
    with load_catalog("default", **catalog) as opened:
        table = opened.load_table("lake.copies")
        files = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
        assert table.properties["headrace.copying.copy.batch"]
    found = Counter(row[0] for row in duckdb.sql(f"SELECT id FROM read_parquet({files})").fetchall())
    assert (set(found), found.total()) == (set(range(scenario.sent)), scenario.sent)
    for name in ("checkpoints", "plans"):
        shutil.rmtree(tmp_path / name)
        shutil.copytree(old / name, tmp_path / name)
    asyncio.run(refused())
