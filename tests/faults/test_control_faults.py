"""Partitions are sought and paused and records skipped while processes die and rebalance under load; the ledger judges.

Everything is asked for over HTTP, of a process that may have the partition or not, and may die of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.api import Api
from headrace.errors import HeadraceError
from headrace.records import OutgoingRecord, TopicPartition
from headrace_devkit.testing import (
    Cluster,
    HeadraceProcess,
    Operation,
    PlannedResponse,
    Seek,
    StartHeadrace,
    check_pushed,
)
from tests.faults.push_scenario import SHORT_SESSION, PushScenario

CONSUMER = "/adm/reactive-consumers/push"


class Steered(PushScenario):
    """A topic, a backend with a journal, and processes of one deployment that push to it."""

    def __init__(self, cluster: Any, start: Callable[..., HeadraceProcess], folder: Path, partitions: int) -> None:
        super().__init__(cluster, start, folder, partitions=partitions)
        self.backend.response = PlannedResponse(delay_seconds=0.02)
        self.settings = {"ordering": "key", "batch": {"max_records": 10}, "max_in_flight": 8, "consumer": SHORT_SESSION}
        self.operations: dict[int, list[Operation]] = {number: [] for number in range(partitions)}

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of a process of the deployment."""
        return {**super().config, "control": {"topic": f"_headrace-control-{self.topic}"}}

    def fill_each(self, records: int, keys: int = 7) -> None:
        """Write this many records of this many keys to each partition."""
        made = (
            OutgoingRecord(self.topic, b"k%d" % (n % keys), b"%d-%d" % (p, n), None, p)
            for n in range(records)
            for p in self.operations
        )
        self.write(self.topic, *made)

    def check(self, but: str = "") -> list[str]:
        """Ask the ledger."""
        runs = self.recording()
        assert [run.log[0].partition for run in runs] == [*self.operations]
        judged = zip(runs, self.operations.values(), strict=True)
        return [
            text for run, done in judged for text in check_pushed(run, self.settings["ordering"], self.faults, done)
        ]


def ask(process: HeadraceProcess, action: str, **body: Any) -> None:
    """Ask a process for something; it may die before it answers, and need not do it at once."""
    with contextlib.suppress(HeadraceError, OSError):
        Api(process.url).request("POST", f"{CONSUMER}/{action}?waitSeconds=0", body)


def details(process: HeadraceProcess) -> dict[str, Any]:
    """Return the state of the consumer in a process; nothing while it cannot be asked."""
    try:
        return Api(process.url).request("GET", CONSUMER)
    except (HeadraceError, OSError):
        return {"commands": [{}], "partitions": [], "paused": None}


def wait_obeyed(scenario: Steered, process: HeadraceProcess) -> None:
    """Wait until no command waits for a process any more."""
    scenario.wait_until(lambda: not details(process)["commands"], "every command to be done")


@pytest.fixture
def scenario(
    kafka: Cluster, headrace: StartHeadrace, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Steered]:
    """A topic of one partition, or as many as the test asks for, a backend, and what starts processes."""
    made = Steered(kafka, headrace, tmp_path, getattr(request, "param", 1))
    made.backend.start()
    yield made
    made.backend.stop()


QUICK = {"heartbeat.interval.ms": 300}
"""So that a member hears at once that others come and go."""


@pytest.mark.timeout(500)
@pytest.mark.parametrize("scenario", [3], indirect=True)
@pytest.mark.parametrize(
    "membership",
    [
        QUICK,
        pytest.param({**QUICK, "partition.assignment.strategy": "range"}, marks=pytest.mark.long),
        pytest.param({"group.protocol": "consumer"}, marks=pytest.mark.long),
    ],
    ids=["cooperative", "eager", "kip-848"],
)
def test_seeks_under_load_are_exact(scenario: Steered, membership: dict[str, Any]) -> None:
    """Back, forward and twice, with deliveries in flight: nothing comes twice or too early, and nothing is lost."""
    scenario.settings |= {"ordering": "partition", "consumer": {"properties": membership}}
    process = scenario.run()
    scenario.fill_each(400)
    scenario.wait_more(60)

    def seek(partition: int, offset: int) -> None:
        begin, body = time.time(), {"partitions": [partition], "offset": offset}
        [done] = Api(process.url).request("POST", f"{CONSUMER}/seek?waitSeconds=60", body)["results"]
        assert done["outcome"] == "sought"
        scenario.operations[partition].append(Seek(begin, time.time(), offset))

    with ThreadPoolExecutor(3) as callers:
        both = [callers.submit(seek, 0, 3), callers.submit(seek, 1, 380)]
        seek(2, 90)
        seek(2, 7)
        for done in both:
            done.result()
    assert scenario.committed(scenario.group)[TopicPartition(scenario.topic, 1)] >= 380
    scenario.wait_done()
    seek(0, 395)
    scenario.check_done()
    assert process.terminate() == 0


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "point",
    [
        pytest.param("seek.before", marks=pytest.mark.long),
        pytest.param("seek.committed", marks=pytest.mark.long),
        "seek.after",
    ],
)
def test_a_process_dies_of_a_seek(scenario: Steered, point: str) -> None:
    """Before the new offset is committed, before it begins there, or before it says so: the next process goes on."""
    process = scenario.run(f"{point}=crash")
    scenario.fill_each(300)
    scenario.wait_more(120)
    begin = time.time()
    with scenario.fault():
        ask(process, "seek", partitions=[0], offset=30)
        scenario.crashed(process, point)
        if point != "seek.before":
            assert scenario.committed(scenario.group) == {TopicPartition(scenario.topic, 0): 30}
        process = scenario.run()
        wait_obeyed(scenario, process)
        scenario.operations[0].append(Seek(begin, time.time(), 30))
    scenario.check_done()
    assert process.terminate() == 0
