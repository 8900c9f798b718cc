"""Pipelines on a Spark Connect server: a process of its own. It or the driver is killed during a run."""

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.consumers.lag import lag_of
from headrace.kafka import Admin
from headrace.runtime import Deadline, SystemClock
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.secured import SecuredCluster
from headrace_jvm import ensure_artifacts
from tests.integration.pipelines.test_pipeline_cluster import spark_process, write_steps
from tests.integration.pipelines.test_pipelines import (
    SCHEMA,
    gone,
    in_group,
    produce_flights,
    read,
    rows,
    running,
    until,
)
from tests.integration.pipelines.test_pipelines_secured import rights_of_the_page

pytestmark = [pytest.mark.heavy, pytest.mark.long]
FLOWS = ("totals", "even", "odd")
RECORDS, BATCH = 20_000, 1000
PASSWORD = "c4nary-of-the-server"


class ConnectServer:
    """The server of the installed pyspark, with the jars of Spark's Kafka connector."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        (folder / "statements").mkdir()
        self.port = free_ports(1)[0]

    def start(self) -> None:
        # The log of events has the statements of the clients, as the pages of Spark show them.
        settings = {
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": f"file://{self._folder}/statements",
            "spark.ui.enabled": "false",
        }
        jars = ",".join(map(str, ensure_artifacts("spark").glob("*.jar")))
        line = ["spark-submit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
        line += ["--master", "local[2]", "--jars", jars]
        line += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        self._starts += 1
        name, started = f"server{self._starts}", "Spark Connect server started"
        self.process = spark_process(
            name, self._folder, [*line, "spark-internal"], started, PYSPARK_PYTHON=sys.executable
        )

    @property
    def command_line(self) -> str:
        assert self.process.id
        return Path(f"/proc/{self.process.id.pid}/cmdline").read_text()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ConnectServer]:
    made = ConnectServer(tmp_path)
    made.start()
    yield made
    made.process.kill()


def pipeline_of(
    folder: Path, source: str, totals: str, even: str, handled: str, server: ConnectServer
) -> dict[str, Any]:
    """Return a pipeline with an aggregate over a function of its folder, a filter and a handler."""
    write_steps(folder)
    (folder / "main.py").write_text(
        "def odd(context, event):\n    return {'id': event.body['id']} if event.body['id'] % 2 else None\n"
    )
    return {
        "name": "remote",
        "folder": str(folder),
        "trigger": {"interval_seconds": 0.1, "max_records": BATCH},
        "sources": {"flights": {"topic": source, "schema": SCHEMA}},
        "views": {"doubled": {"python": "steps:twice", "reads": ["flights"]}},
        "flows": {
            "totals": {
                "sql": "SELECT carrier, count(*) AS n, sum(twice) AS total FROM doubled GROUP BY carrier",
                "sink": {"topic": totals, "key": "carrier"},
                "rules": {"small": {"check": "n < 0"}},
            },
            "even": {"sql": "SELECT id FROM flights WHERE id % 2 = 0", "sink": {"topic": even}},
            "odd": {"handler": "main:odd", "reads": ["flights"], "sink": {"topic": handled}},
        },
        "driver": {"remote": f"sc://127.0.0.1:{server.port}", "settings": {"spark.sql.ansi.enabled": True}},
    }


async def check_results(
    settings: KafkaConfig, source: str, totals: str, even: str, handled: str, expected: int
) -> None:
    """The sinks have what an exact count, a filter and a handler make of the first records."""
    newest = {row["carrier"]: row for _, row in await rows(settings, totals)}
    assert sum(row["n"] for row in newest.values()) == expected
    assert sum(row["total"] for row in newest.values()) == sum(range(expected)) * 2
    for sink, first in ((even, 0), (handled, 1)):
        ids = [row["id"] for _, row in await rows(settings, sink)]
        assert {*ids} == {*range(first, expected, 2)}
        assert len(ids) - expected // 2 <= BATCH // 2
    for flow in FLOWS:
        found = await lag_of(Admin(settings), f"headrace.remote.{flow}")
        lag = [each for each in found if each.partition.topic == source]  # the group is that of all such tests
        assert (sum(each.lag for each in lag), sum(each.committed or 0 for each in lag)) == (0, expected)


async def end(killed: str, server: ConnectServer, run: Any) -> None:
    """Kill the server and start it again, or kill the driver."""
    if killed == "server":
        server.process.kill()
        await until(lambda: "Spark Connect server was lost" in run.readiness().reason, run)
        server.start()
    else:
        driver = run.status()["driver_pid"]
        os.kill(driver, signal.SIGKILL)
        await until(lambda: "exit code -9" in run.readiness().reason, run)
        assert gone(driver)


@pytest.mark.parametrize("killed", ["server", "driver"])
def test_results_are_exact_although_a_process_is_killed(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path, server: ConnectServer, killed: str
) -> None:
    """An aggregate over a Python function of the pipeline's folder counts each record once, a filter and a handler
    lose none and repeat at most a micro-batch. The driver has no JVM; it waits for the server, and continues from the
    checkpoints. A new driver takes the place of queries that the server still runs for a killed one. A stop ends the
    queries after their micro-batches, so the next run continues exactly."""
    source, totals, even, handled = topic(4), topic(), topic(), topic()
    settings, folder = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), tmp_path / "pipeline"
    spec = pipeline_of(folder, source, totals, even, handled, server)
    check = functools.partial(check_results, settings, source, totals, even, handled)

    async def main() -> None:
        async with running(spec, settings, tmp_path / "state") as run:

            def caught_up() -> bool:
                # Not by their counts: the report of a micro-batch that ended before the kill may be lost.
                return all(flow["lag_records"] == 0 for flow in run.status()["flows"].values())

            await until(lambda: all(read(run, flow) > 0 for flow in FLOWS), run)
            assert min(read(run, flow) for flow in FLOWS) < RECORDS
            assert len(in_group(run.status()["driver_pid"])) == 1
            await end(killed, server, run)
            await until(caught_up, run)
            assert run.readiness().ready
            status = run.status()
            assert status["restarts"] >= 1
            assert status["flows"]["totals"]["state_rows"] == 16
            assert status["flows"]["totals"]["broken_rules"]["small"] > 0
            await run.drain(Deadline(SystemClock(), 100))
        await check(RECORDS)
        before = len(await rows(settings, even))
        produce_flights(kafka.bootstrap_servers, source, range(RECORDS, RECORDS + 100))
        await asyncio.sleep(3)
        assert len(await rows(settings, even)) == before  # the server runs no query any more
        async with running({**spec, "trigger": {"once": True}}, settings, tmp_path / "state") as run:
            await until(lambda: run.status()["state"] == "finished", run)
            assert sum(read(run, flow) for flow in FLOWS) == 300
            await run.drain(Deadline(SystemClock(), 100))  # it publishes the last positions
        await check(RECORDS + 100)
        assert len(await rows(settings, even)) == before + 50

    produce_flights(kafka.bootstrap_servers, source, range(RECORDS))
    asyncio.run(main())


def test_a_password_is_seen_nowhere_on_the_server(
    kafka_secured: SecuredCluster, tmp_path: Path, server: ConnectServer
) -> None:
    """Source, sink and handler log in over TLS. The password is in the secrets file only, and goes with the driver."""
    servers, user, source, out = kafka_secured.cluster.bootstrap_servers, "remote", "connect-in", "connect-out"
    for name in (source, out):
        kafka_secured.cluster.create_topic(name, 2)
    kafka_secured.set_password(user, PASSWORD)
    kafka_secured.grant(*rights_of_the_page(user, source, out, "headrace.remote."))
    produce_flights(servers, source, range(100))
    login = kafka_secured.login("SCRAM-SHA-512", user)
    login["security"]["sasl"]["password"] = PASSWORD
    (tmp_path / "main.py").write_text("def same(context, event):\n    return {'id': event.body['id']}\n")
    spec = {
        "name": "remote",
        "folder": str(tmp_path),
        "sources": {"flights": {"topic": source, "schema": SCHEMA}},
        "flows": {
            "copy": {"sql": "SELECT id FROM flights", "sink": {"topic": out}},
            "handled": {"handler": "main:same", "reads": ["flights"], "sink": {"topic": out}, "on_error": "fail"},
        },
        "driver": {"remote": f"sc://127.0.0.1:{server.port}"},
    }
    secrets = tmp_path / "state/remote/secrets.properties"

    async def main() -> None:
        async with running(spec, KafkaConfig.model_validate(login), tmp_path / "state") as run:
            await until(lambda: read(run, "copy") == read(run, "handled") == 100, run)
            assert "c4nary" in secrets.read_text().encode().decode("unicode_escape")
            driver = Path("/proc", str(run.status()["driver_pid"]))
            assert "c4nary" not in server.command_line + (driver / "cmdline").read_text()
            assert b"c4nary" not in (driver / "environ").read_bytes()
            await run.drain(Deadline(SystemClock(), 100))
        found = [row["id"] for _, row in await rows(KafkaConfig(bootstrap_servers=servers), out)]
        assert sorted(found) == sorted([*range(100)] * 2)

    asyncio.run(main())
    server.process.kill()
    assert not secrets.exists()
    texts = {file: file.read_bytes().decode("latin-1") for file in tmp_path.rglob("*") if file.is_file()}
    assert any(source in text for file, text in texts.items() if "statements" in file.parts)
    assert [file for file, text in texts.items() if "c4nary" in text] == []
