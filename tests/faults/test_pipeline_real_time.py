"""Exactly once in real-time mode, while its driver is killed and its broker is frozen or killed.

Each record makes two or three rows, so that a kill may fall between the rows of one record. The checks read the result
at read_committed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headrace_devkit.testing import Cluster
from headrace_pipelines.runs import PipelineRun
from tests.faults.test_pipeline_faults import Copying
from tests.integration.pipelines.test_pipelines import until

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("quick_restarts")]

SQL = """\
WITH parts AS (SELECT id, part FROM a LATERAL VIEW explode(array(0, 1, 2)) AS part)
SELECT id, part FROM parts WHERE part < 2 OR id % 2 = 0"""
LIMIT_SECONDS = 180.0


@contextmanager
def fed(scenario: Copying) -> Iterator[None]:
    """Send records while a block runs."""
    ended = threading.Event()

    def feed() -> None:
        while not ended.wait(0.05):
            scenario.send(5)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def break_once(number: int, run: PipelineRun, kafka: Cluster) -> None:
    """Kill the driver at a random moment of its life; now and then freeze or kill the broker before that."""
    await until(lambda: run.status()["state"] == "running", run, LIMIT_SECONDS)
    await asyncio.sleep(random.uniform(0, 4))
    if number % 10 == 3:
        kafka.pause(1)
        await asyncio.sleep(8)
        kafka.resume(1)
    if number % 10 == 7:
        kafka.kill(1)
        await asyncio.to_thread(kafka.restart, 1)
    if pid := run.status()["driver_pid"]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: run.status()["driver_pid"] != pid, run)


def producers(driver: int) -> int:
    """Return how many producers the JVM of a driver has, by their threads."""
    jvms = Path(f"/proc/{driver}/task/{driver}/children").read_text().split()
    names = (file.read_text() for jvm in jvms for file in Path(f"/proc/{jvm}/task").glob("*/comm"))
    return sum(name.startswith("kafka-producer") for name in names)


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.timeout(2_400)
def test_rows_of_real_time_mode_are_there_once_and_in_order(tmp_path: Path, kills: int) -> None:
    """Nothing is lost, nothing is twice, and the rows of a source partition are in order.

    The next task of a partition uses its producer again, otherwise each micro-batch would leave one.
    """

    def rows(scenario: Copying) -> list[tuple[int, int]]:
        return [(row["id"], row["part"]) for row in scenario.rows("out")]

    async def main(kafka: Cluster, scenario: Copying) -> list[tuple[int, int]]:
        async with scenario.running() as run:
            with fed(scenario):
                for number in range(kills):
                    await break_once(number, run, kafka)
                await until(lambda: run.status()["state"] == "running", run, LIMIT_SECONDS)
                before = run.status()["flows"]["copy"]["batch_id"]
                await until(lambda: run.status()["flows"]["copy"]["batch_id"] > before + 2, run, LIMIT_SECONDS)
                assert producers(run.status()["driver_pid"] or 0) == 2
            end = time.monotonic() + LIMIT_SECONDS
            while (scenario.sent - 1, 0) not in await asyncio.to_thread(rows, scenario):
                assert time.monotonic() < end, run.status()
            await asyncio.sleep(1)  # for the other partition, and for what a defect would write twice
            assert run.status()["restarts"] >= kills
            return await asyncio.to_thread(rows, scenario)

    with Cluster(tmp_path / "kafka") as kafka:  # of its own: other tests need theirs meanwhile
        for name in ("source", "out"):
            kafka.create_topic(name)
        scenario = Copying(kafka.bootstrap_servers, "source", "out", tmp_path, delivery="exactly_once")
        scenario.spec["trigger"] = {"realtime": True, "checkpoint_seconds": 5}
        scenario.spec["flows"]["copy"]["sql"] = SQL
        found = asyncio.run(main(kafka, scenario))
    expected = [(number, part) for number in range(scenario.sent) for part in range(3) if part < 2 or number % 2 == 0]
    assert found == expected
