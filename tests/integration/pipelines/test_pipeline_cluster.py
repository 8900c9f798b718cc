"""Pipelines on a standalone cluster: master and workers as processes of their own, one of which dies during a run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyspark
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.runtime import Deadline, SystemClock
from headrace_devkit.devcluster.jvm_server import Server
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_jvm import find_java
from tests.integration.pipelines.test_pipelines import SCHEMA, produce_flights, read, rows, running, until

pytestmark = [pytest.mark.heavy, pytest.mark.long]
RECORDS = 20_000


def spark_process(name: str, folder: Path, command: Sequence[str], started: str, **env: str) -> Server:
    """Start a program of the installed pyspark, and wait until its log says that it has started."""
    home = Path(pyspark.__file__).parent
    java = str(find_java(17, for_spark=True).home)
    environment = {**os.environ, "SPARK_HOME": str(home), "JAVA_HOME": java, "SPARK_LOCAL_IP": "127.0.0.1", **env}
    made = Server(name, folder / f"{name}.log")
    made.start([str(home / "bin" / command[0]), *command[1:]], detached=False, cwd=folder, env=environment)
    made.wait_until(lambda: started in made.log.read_text(), 120)
    return made


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[tuple[str, list[Server]]]:
    """The address of a master, and two workers with a core each."""
    port = str(free_ports(1)[0])
    url = f"spark://127.0.0.1:{port}"

    def deployed(name: str, kind: str, started: str, *words: str) -> Server:
        line = ("spark-class", f"org.apache.spark.deploy.{kind}", "--host", "127.0.0.1", "--webui-port", "0", *words)
        made = spark_process(name, tmp_path, line, started, SPARK_WORKER_DIR=str(tmp_path / "work"))
        stack.callback(made.kill)
        return made

    with contextlib.ExitStack() as stack:
        deployed("master", "master.Master", "I have been elected leader", "--port", port)
        size = ("--cores", "1", "--memory", "1g", url)
        registered = "Successfully registered with master"
        yield url, [deployed(f"worker{n}", "worker.Worker", registered, *size) for n in range(2)]


def write_steps(folder: Path) -> None:
    """Make a folder with a view in Python, which imports another module of the folder."""
    folder.mkdir()
    (folder / "helpers.py").write_text("def doubled(number):\n    return number * 2\n")
    (folder / "steps.py").write_text(
        "from pyspark.sql.functions import udf\n\nfrom helpers import doubled\n\n\n"
        "def twice(flights):\n"
        "    return flights.withColumn('twice', udf(doubled, 'bigint')('id'))\n"
    )


def test_results_are_exact_although_a_worker_dies(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path, standalone: tuple[str, list[Server]]
) -> None:
    """An aggregate over a Python function of the pipeline's folder counts each record once, on executors of which one
    is killed in between; its state goes on in the executor that is left. Tasks that write repeat no row."""
    source, out = topic(4), topic()
    url, workers = standalone
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
                "sink": {"topic": out, "key": "carrier", "delivery": "exactly_once", "scope": "task"},
            }
        },
        "driver": {"master": url, "settings": {"spark.driver.host": "127.0.0.1", "spark.executor.memory": "512m"}},
    }

    async def main() -> None:
        async with running(spec, settings, tmp_path / "state") as run:
            await until(lambda: read(run, "f") > 0, run)
            assert read(run, "f") < RECORDS
            workers[0].kill()
            await until(lambda: read(run, "f") >= RECORDS and run.status()["flows"]["f"]["lag_records"] == 0, run)
            assert run.status()["flows"]["f"]["state_rows"] == 16
            await run.drain(Deadline(SystemClock(), 100))
        written = [row for _, row in await rows(settings, out)]
        assert len({(row["carrier"], row["n"]) for row in written}) == len(written)
        newest = {row["carrier"]: row for row in written}
        assert sum(row["n"] for row in newest.values()) == RECORDS
        assert sum(row["total"] for row in newest.values()) == sum(range(RECORDS)) * 2

    produce_flights(kafka.bootstrap_servers, source, range(RECORDS))
    asyncio.run(main())
