"""Projects of Spark Declarative Pipelines, as their authors wrote them, on a real Spark and a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from headrace.config.kafka import KafkaConfig
from headrace.errors import PartitionNotFound
from headrace.kafka import Admin
from headrace.runtime import SystemClock
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_pipelines.runs import PipelineRun
from headrace_pipelines.spark_project import load_project
from tests.integration.pipelines.test_pipelines import LIMIT_SECONDS, gone, in_group, produce, rows, until

pytestmark = [pytest.mark.heavy, pytest.mark.long]

PROJECTS = Path(__file__).parents[2] / "spark_projects"


def copied(name: str, folder: Path) -> Path:
    """Return the file of a copied project; only `storage` is that of this folder, as `spark-pipelines init` does it."""
    shutil.copytree(PROJECTS / name, folder / name)
    file = folder / name / "spark-pipeline.yml"
    file.write_text(file.read_text().replace("STORAGE", str(folder / "storage" / name)))
    return file


@contextlib.asynccontextmanager
async def running(file: Path, kafka: KafkaConfig, folder: Path) -> AsyncIterator[PipelineRun]:
    run = PipelineRun(load_project(file), kafka, folder, SystemClock(), Admin(kafka))
    await run.start()
    try:
        yield run
    finally:
        await run.stop()


def jvm_of(run: PipelineRun) -> int:
    pid = run.report().driver_pid
    assert pid
    return next(one for one in in_group(pid) if Path(f"/proc/{one}/exe").readlink().name == "java")


def passage(number: int) -> bytes:
    return json.dumps({"plate": f"P{number}", "cents": 1000 if number % 2 else 100}).encode()


async def test_kafka_to_kafka_over_a_kill_of_the_jvm(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each heavy passage arrives, none is invented, and a group shows what was read.

    Spark's Kafka sink is at least once, so a row may come twice.
    """
    source, out = topic(), topic()
    variables = {"KAFKA_SERVERS": kafka.bootstrap_servers, "TOLLS_PASSAGES": source, "TOLLS_HEAVY": out}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)

    async def arrived(numbers: range) -> None:
        end = time.monotonic() + 2 * LIMIT_SECONDS
        expected = {f"P{number}" for number in numbers if number % 2}
        while (found := await plates()) != expected:
            assert found <= expected and time.monotonic() < end, run.status()
            await asyncio.sleep(0.2)

    async def plates() -> set[str]:
        with contextlib.suppress(PartitionNotFound):  # the broker does not know the new topic yet
            return {row["plate"] for _, row in await rows(config, out)}
        return set()

    produce(kafka.bootstrap_servers, source, map(passage, range(100)))
    async with running(copied("tolls", tmp_path), config, tmp_path / "state") as run:
        await arrived(range(100))
        os.kill(jvm_of(run), signal.SIGKILL)
        produce(kafka.bootstrap_servers, source, map(passage, range(100, 160)))
        await arrived(range(160))
        await until(lambda: run.readiness().ready, run)
        status = run.report()
        assert (status.restarts, [*status.flows], status.state) == (1, ["passages", "to_heavy"], "running")
        assert status.flows["passages"].lag_records == 0
        await run.hold("stopped")
    assert status.driver_pid and gone(status.driver_pid)
    assert sum((await Admin(config).committed("headrace.tolls.passages")).values()) == 160


@pytest.mark.parametrize("name", ["sensors", "facts", "accounts"])
async def test_projects_of_others_run_over_a_restart(
    name: str, kafka: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new JVM knows the tables of the last one, and reads only new rows."""
    folder = tmp_path / "given"
    folder.mkdir()
    monkeypatch.setenv("FACTS_FOLDER", str(folder))
    monkeypatch.setenv("ACCOUNTS_FOLDER", str(folder))
    config = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    file, state = copied(name, tmp_path), tmp_path / "state"
    warehouse = state / load_project(file).name / "warehouse"
    give(name, folder, 0)
    async with running(file, config, state) as run:
        await until(lambda: contents(name, warehouse) == EXPECTED[name][0], run)
        await run.hold("stopped")
        give(name, folder, 1)
        run.resume()
        await until(lambda: contents(name, warehouse) == EXPECTED[name][1], run)
        await until(lambda: run.readiness().ready, run)


GIVEN: dict[str, list[list[dict[str, Any]]]] = {
    "sensors": [[], []],
    "facts": [
        [{"sensor": "a", "celsius": 31.0}, {"sensor": "b", "celsius": 22.0}],
        [{"sensor": "a", "celsius": 35.0}, {"sensor": "c", "celsius": -3.0}],
    ],
    "accounts": [
        [
            {"id": 1, "name": "new", "op": "U", "at": 2},
            {"id": 1, "name": "old", "op": "U", "at": 1},
            {"id": 2, "name": "b", "op": "U", "at": 1},
        ],
        [{"id": 2, "name": "b", "op": "D", "at": 2}, {"id": 1, "name": "older", "op": "U", "at": 0}],
    ],
}
EXPECTED: dict[str, list[Any]] = {
    "sensors": [[(0, 11.25), (1, 10.0), (2, 12.5)]] * 2,
    "facts": [([("a", 31.0)], [("b", 22.0)]), ([("a", 31.0), ("a", 35.0)], [("b", 22.0)])],
    "accounts": [[(1, "new"), (1, "old"), (2, "b")], [(1, "new"), (1, "old"), (1, "older"), (2, "b")]],
}


def give(name: str, folder: Path, step: int) -> None:
    """Write the rows of a step into a file that appears at once."""
    if rows := GIVEN[name][step]:
        draft = folder / f".{step}"
        if name == "facts":
            pq.write_table(pa.Table.from_pylist(rows), draft)
        else:
            draft.write_text("\n".join(map(json.dumps, rows)))
        draft.rename(folder / f"{step}.{'parquet' if name == 'facts' else 'json'}")


def contents(name: str, warehouse: Path) -> Any:
    """Return the rows of the project's tables; None while Spark replaces a file."""
    try:
        if name == "accounts":
            table = DeltaTable(str(warehouse / "accounts")).to_pyarrow_table().select(["id", "name"])
            return sorted(tuple(row.values()) for row in table.to_pylist())
        tables = {"sensors": ["averages"], "facts": ["hot", "warm"]}[name]
        found = [sorted(tuple(row.values()) for row in parquet(warehouse / table)) for table in tables]
    except (OSError, pa.ArrowInvalid, TableNotFoundError):
        return None
    return found[0] if name == "sensors" else tuple(found)


def parquet(folder: Path) -> list[dict[str, Any]]:
    return [row for file in folder.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
