"""Pipelines while their driver is killed, batches come again, Kafka is away, and old checkpoints are put back.

The checks read the topics themselves, at read_committed. Each test sends records with running ids through a copying
flow; so lost and repeated ones can be counted.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.consumers.lag import lag_of
from headrace.kafka import Admin
from headrace.runtime import Deadline, SystemClock
from headrace.runtime.failpoints import VARIABLE
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.secured import kafka_settings
from headrace_pipelines.runs import PipelineRun
from headrace_pipelines.spec import PipelineSpec
from tests.integration.pipelines.test_pipelines import QUICK, gone, produce, rows, until
from tests.postgres_server import PostgresServer, postgres_server

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("failpoints_of_drivers", "quick_restarts")]

BATCH = 2_000
PAD = b"x" * 100
EXACT: dict[str, dict[str, Any]] = {
    "batch": {"delivery": "exactly_once"},
    "task": {"delivery": "exactly_once", "scope": "task"},
}
"""Sinks that repeat nothing, by what one transaction has."""


class Copying:
    """A pipeline that copies records of one topic to another, and what a reader finds there."""

    def __init__(self, servers: str, source: str, out: str, folder: Path, **sink: Any) -> None:
        self.kafka = kafka_settings(servers)
        self.admin = Admin(self.kafka)
        self.source, self.out, self.folder = source, out, folder
        self.sent = 0
        self.spec: dict[str, Any] = {
            "name": "copying",
            "trigger": {"interval_seconds": 0.5, "max_records": BATCH},
            "sources": {"a": {"topic": source, "schema": "id INT, pad STRING"}},
            "flows": {},
            "driver": {"shuffle_partitions": 1, **QUICK},
        }
        self.add_flow("copy", {"topic": out, "key": "id", **sink})

    def add_flow(self, name: str, sink: dict[str, Any], sql: str = "SELECT id, pad FROM a") -> None:
        """Copy the source to another sink too, with the same driver."""
        self.spec["flows"][name] = {"sql": sql, "sink": sink}
        if sink.get("scope"):
            self.spec["driver"]["shuffle_partitions"] = 2

    def send(self, count: int) -> None:
        numbers = range(self.sent, self.sent + count)
        produce(self.kafka.bootstrap_servers, self.source, (b'{"id":%d,"pad":"%s"}' % (n, PAD) for n in numbers))
        self.sent += count

    @asynccontextmanager
    async def running(self) -> AsyncIterator[PipelineRun]:
        spec = PipelineSpec.model_validate(self.spec)
        run = PipelineRun(spec, self.kafka, self.folder, SystemClock(), self.admin)
        await run.start()
        try:
            yield run
        finally:
            await run.stop()

    async def caught_up(self, run: PipelineRun) -> None:
        """Wait until all that was sent is read, and finish the micro-batch."""

        def has_read_all() -> object:
            flows = run.status()["flows"].values()
            return all(flow["lag_records"] == 0 for flow in flows) and run.status()["state"] == "running"

        await until(has_read_all, run)
        await run.drain(Deadline(SystemClock(), 100))

    def rows(self, topic: str) -> list[dict[str, Any]]:
        """Return the rows in a topic, for readers that see committed records only."""
        return [row for _, row in asyncio.run(rows(self.kafka, topic))]

    def check(self, topic: str = "", most_repeats: int = 0) -> None:
        """Each id that was sent is in a result topic, and no more of them are repeated."""
        found = Counter(row["id"] for row in self.rows(topic or self.out))
        assert set(found) == set(range(self.sent))
        print(f"{found.total() - self.sent} repeats of {self.sent}")
        assert found.total() - self.sent <= most_repeats


async def kill_driver(run: PipelineRun, after_seconds: float) -> None:
    """Kill the driver that runs after it has written at least one batch."""
    before = run.status()["flows"]["copy"]["input_records"]
    await until(lambda: run.status()["flows"]["copy"]["input_records"] > before, run)
    await asyncio.sleep(after_seconds)
    print(f"killed {after_seconds:.3f} s after a batch")
    if pid := run.status()["driver_pid"]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: run.status()["driver_pid"] != pid, run)
        assert gone(pid)


@pytest.fixture
def copying(kafka: Cluster, topic: MakeTopic, tmp_path: Path) -> Callable[..., Copying]:
    def make(**sink: Any) -> Copying:
        return Copying(kafka.bootstrap_servers, topic(2), topic(2), tmp_path, **sink)

    return make


@pytest.mark.timeout(900)
def test_a_driver_is_killed_at_random_moments(
    copying: Callable[..., Copying], topic: MakeTopic, request: pytest.FixtureRequest
) -> None:
    """Every sink loses nothing; exactly-once repeats nothing, at-least-once one batch per kill at most.

    Rows are added to the table, not replaced; so each repeated one would be there twice. A drain leaves no process and
    no lag. With `--all` the driver is killed often, and PostgreSQL is restarted once. Then there are also transactions
    per task, and an aggregate whose state goes on.
    """
    often = request.config.getoption("--all")
    scenario = copying(**EXACT["batch"])
    tasks, plain, sums = topic(2), topic(2), topic()
    scenario.add_flow("plain", {"topic": plain, "key": "id"})
    if often:
        scenario.add_flow("tasks", {"topic": tasks, "key": "id", **EXACT["task"]})
        scenario.add_flow(
            "sums", {"topic": sums, "key": "id"}, "SELECT id % 16 AS id, count(*) AS n FROM a GROUP BY id % 16"
        )

    async def main(server: PostgresServer) -> int:
        async with scenario.running() as run:
            for number in range(10 if often else 1):
                scenario.send((10 if often else 4) * BATCH)
                await kill_driver(run, random.uniform(0, 2 if often else 1))
                if number == 0 and often:
                    server.stop()
                    await asyncio.sleep(2)  # the sink finds it stopped
                    server.start()
            await until(lambda: run.readiness().ready, run)
            last = run.status()["driver_pid"]
            await scenario.caught_up(run)
            assert gone(last)
            for group in run.groups.values():
                known = await lag_of(scenario.admin, group)
                lags = [each for each in known if each.partition.topic == scenario.source]  # others had this group
                assert (sum(each.lag for each in lags), sum(each.committed or 0 for each in lags)) == (0, scenario.sent)
            return run.status()["restarts"]

    with postgres_server() as server:
        server.execute("CREATE TABLE copies (id int, pad text)")
        scenario.add_flow("table", server.sink("copies"))
        restarts = asyncio.run(main(server))
        counts = "SELECT count(*), count(DISTINCT id), min(id), max(id) FROM copies"
        assert server.execute(counts) == [(scenario.sent, scenario.sent, 0, scenario.sent - 1)]
    scenario.check()
    scenario.check(plain, restarts * BATCH)
    if often:
        scenario.check(tasks)
        newest = {row["id"]: row["n"] for row in scenario.rows(sums)}
        assert newest == Counter(number % 16 for number in range(scenario.sent))


@pytest.mark.long
@pytest.mark.parametrize("scope", EXACT)
@pytest.mark.parametrize("how", ["crash", "raise"])
@pytest.mark.timeout(900)
def test_a_batch_is_cut_at_each_point_of_its_transaction(
    copying: Callable[..., Copying], monkeypatch: pytest.MonkeyPatch, how: str, scope: str
) -> None:
    """Before its number, between number and commit, and right after the commit: the batch comes again each time.

    With a transaction per task each worker fails at its second one, and the driver with the number of the second batch.
    """
    scenario = copying(**EXACT[scope])
    points = ["batch.produced", "batch.numbered", "batch.committed"]

    async def main() -> None:
        monkeypatch.setenv(VARIABLE, f"{points[0]}={how}@2")
        async with scenario.running() as run:
            for life, point in enumerate([*points[1:], "none"]):  # a driver takes what is set at its start
                await until(lambda life=life: run.status()["driver_pid"] and run.status()["restarts"] >= life, run)
                monkeypatch.setenv(VARIABLE, f"{point}={how}@2")
            await until(lambda: run.status()["restarts"] >= len(points), run)
            await scenario.caught_up(run)
            assert run.status()["restarts"] == len(points)

    scenario.send(10 * BATCH)
    asyncio.run(main())
    scenario.check()


@pytest.mark.long
@pytest.mark.parametrize("seconds", [8, 90])
@pytest.mark.parametrize("scope", EXACT)
@pytest.mark.timeout(900)
def test_kafka_is_away(tmp_path: Path, seconds: float, scope: str) -> None:
    """A short while passes unnoticed; after a longer one the driver starts again. Nothing is lost or repeated."""

    async def main(kafka: Cluster, scenario: Copying) -> int:
        async with scenario.running() as run:
            scenario.send(20 * BATCH)
            await until(lambda: run.status()["flows"]["copy"]["input_records"] >= 2 * BATCH, run)
            kafka.pause(1)
            try:
                await asyncio.sleep(seconds)
            finally:
                kafka.resume(1)
            await scenario.caught_up(run)
            return int(run.status()["restarts"])

    with Cluster(tmp_path / "kafka") as kafka:  # of its own: other tests need theirs meanwhile
        for name in ("source", "out"):
            kafka.create_topic(name, 2)
        scenario = Copying(kafka.bootstrap_servers, "source", "out", tmp_path, **EXACT[scope])
        restarts = asyncio.run(main(kafka, scenario))
        scenario.check()
    assert restarts == 0 or seconds > 60
