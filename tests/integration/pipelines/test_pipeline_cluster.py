"""Pipelines on a standalone cluster: master and workers as processes of their own, one of which dies during a run."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyspark
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.runtime import Deadline, SystemClock
from headrace.runtime.jvm import find_java
from tests.integration.pipelines.test_pipelines import SCHEMA, produce_flights, read, rows, running, until

pytestmark = [pytest.mark.heavy, pytest.mark.long]
RECORDS = 20_000


class Standalone(NamedTuple):
    """A cluster of Spark."""

    url: str
    workers: list[subprocess.Popen[bytes]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    """A master and two workers with a core each."""
    home = Path(pyspark.__file__).parent
    environment = {**os.environ, "SPARK_HOME": str(home), "JAVA_HOME": str(find_java(17, for_spark=True).home)}
    environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(tmp_path / "work")}
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, kind: str, *words: str) -> subprocess.Popen[bytes]:
        line = [str(home / "bin/spark-class"), f"org.apache.spark.deploy.{kind}", "--host", "127.0.0.1"]
        with (tmp_path / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen([*line, "--webui-port", "0", *words], env=environment, stderr=log))
        return started[-1]

    def logged(name: str, text: str) -> None:
        end = time.monotonic() + 120
        while text not in (tmp_path / f"{name}.log").read_text():
            assert time.monotonic() < end, (tmp_path / f"{name}.log").read_text()
            time.sleep(0.1)

    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    try:
        start("master", "master.Master", "--port", str(port))
        logged("master", "I have been elected leader")
        size = ("--cores", "1", "--memory", "1g")
        workers = [start(f"worker{number}", "worker.Worker", *size, url) for number in range(2)]
        for number in range(2):
            logged(f"worker{number}", "Successfully registered with master")
        yield Standalone(url, workers)
    finally:
        for process in started:
            process.kill()
            process.wait()


def write_steps(folder: Path) -> None:
    """Make a folder with a view in Python, which imports another module of the folder."""
    folder.mkdir()
    (folder / "helpers.py").write_text("def doubled(number):\n    return number * 2\n")
    (folder / "steps.py").write_text(
        "from pyspark.sql.functions import udf\n\nfrom helpers import doubled\n\n\n"
        "def twice(flights):\n"
        "    return flights.withColumn('twice', udf(doubled, 'bigint')('id'))\n"
    )


@pytest.mark.parametrize("delivery", [{}, {"delivery": "exactly_once", "scope": "task"}], ids=["plain", "tasks"])
def test_results_are_exact_although_a_worker_dies(
    kafka: Any, topic: Any, tmp_path: Path, standalone: Standalone, delivery: dict[str, str]
) -> None:
    """An aggregate over a Python function of the pipeline's folder counts each record once, on executors of which one
    is killed in between; its state goes on in the executor that is left. Tasks that write repeat no row."""
    source, out = topic(4), topic()
    settings, folder = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), tmp_path / "pipeline"
    write_steps(folder)
    spec = {
        "name": "spread",
        "folder": str(folder),
        "trigger": {"interval_seconds": 0.1, "max_records": 1000},
        "sources": {"flights": {"topic": source, "schema": SCHEMA}},
        "views": {"doubled": {"python": "steps:twice", "reads": ["flights"]}},
        "flows": {
            "f": {
                "sql": "SELECT carrier, count(*) AS n, sum(twice) AS total FROM doubled GROUP BY carrier",
                "sink": {"topic": out, "key": "carrier", **delivery},
            }
        },
        "driver": {
            "master": standalone.url,
            "settings": {"spark.driver.host": "127.0.0.1", "spark.executor.memory": "512m"},
        },
    }

    async def main() -> None:
        async with running(spec, settings, tmp_path / "state") as run:
            await until(lambda: read(run, "f") > 0, run)
            assert read(run, "f") < RECORDS
            standalone.workers[0].kill()
            await until(lambda: read(run, "f") >= RECORDS and run.status()["flows"]["f"]["lag_records"] == 0, run)
            assert run.status()["flows"]["f"]["state_rows"] == 16
            await run.drain(Deadline(SystemClock(), 100))
        written = [row for _, row in await rows(settings, out)]
        assert not delivery or len({(row["carrier"], row["n"]) for row in written}) == len(written)
        newest = {row["carrier"]: row for row in written}
        assert sum(row["n"] for row in newest.values()) == RECORDS
        assert sum(row["total"] for row in newest.values()) == sum(range(RECORDS)) * 2

    produce_flights(kafka.bootstrap_servers, source, range(RECORDS))
    asyncio.run(main())
