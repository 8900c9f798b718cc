"""The state of a processor, queried by key over HTTP while its driver is killed.

The state is what a reader of its topic's table sees: exact in the end, never going back, and never long away.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

from headrace_devkit.testing import Cluster, HeadraceProcess, MakeTopic
from headrace_devkit.testing.scenario import Scenario
from tests.integration.pipelines.test_pipelines import QUICK, produce
from tests.table_process import TableProcess

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(1_200)]

KILLS = 5
LIMIT_SECONDS = 240.0
GATES = [f"gate-{number}" for number in range(20)]
CODE = """\
from headrace_pipelines.processors import Processor, ValueState


class Count(Processor):
    columns = "gate STRING, n BIGINT"
    n = ValueState("BIGINT")

    def process(self, key, row):
        n = self.n.get(0) + 1
        self.n.put(n)
        yield {"gate": key, "n": n}
"""


class Passages:
    """Sends passages, and reads their counts by key, until it is ended."""

    def __init__(self, table: TableProcess, servers: str, topic: str) -> None:
        self.sent: Counter[str] = Counter()
        self.seconds: list[float] = []
        """What each request took."""
        self.wrong: list[Any] = []
        """Counts that went back, and responses that were not a row."""
        self._seen: Counter[str] = Counter()
        self._table, self._servers, self._topic = table, servers, topic
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._read)]

    def __enter__(self) -> Passages:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def count_of(self, gate: str) -> int:
        """Return the count of a gate; 0 without a row."""
        response = self._table.send("GET", f"/tables/counts/rows/{gate}")
        self.seconds.append(response.seconds)
        if response.status not in (200, 404):
            self.wrong.append((gate, response))
        return int(response.body["n"]) if response.status == 200 else 0

    def _send(self) -> None:
        while not self._ended.wait(0.1):
            gates = random.choices(GATES, k=20)
            produce(self._servers, self._topic, (json.dumps({"gate": gate}).encode() for gate in gates))
            self.sent.update(gates)

    def _read(self) -> None:
        while not self._ended.wait(0.01):
            gate = random.choice(GATES)
            if (count := self.count_of(gate)) < self._seen[gate]:
                self.wrong.append((gate, count, self._seen[gate]))
            self._seen[gate] = count


def driver_of(table: TableProcess) -> int:
    """Return the process id of the driver once it has flows that run; 0 until then."""
    status = table.send("GET", "/adm/pipelines").body["pipelines"][0]
    return int(status["driverPid"] or 0) if status["state"] == "running" else 0


def kill_driver(table: TableProcess) -> None:
    """Kill the driver at a random moment, and wait for its successor."""
    Scenario.wait_until(lambda: driver_of(table), "a driver", LIMIT_SECONDS)
    pid = driver_of(table)
    time.sleep(random.uniform(0, 4))
    os.kill(pid, signal.SIGKILL)
    Scenario.wait_until(lambda: driver_of(table) not in (0, pid), "its successor", LIMIT_SECONDS)


def configuration(servers: str, source: str, counts: str, folder: Path) -> dict[str, Any]:
    """Write the pipeline, and return the settings that run it beside a table of its topic."""
    flow = {"processor": "gates:Count", "reads": ["passages"], "key": "gate"}
    sink = {"topic": counts, "key": "gate", "delivery": "exactly_once"}
    pipeline = {
        "name": "tolls",
        "trigger": {"interval_seconds": 0.5},
        "sources": {"passages": {"topic": source, "schema": "gate STRING"}},
        "flows": {"counts": {**flow, "sink": sink}},
        "driver": {"shuffle_partitions": 2, **QUICK},
    }
    (folder / "gates.py").write_text(CODE)
    (folder / "tolls.yaml").write_text(json.dumps(pipeline))
    return {
        "kafka": {"bootstrap_servers": servers},
        "pipelines": [str(folder / "tolls.yaml")],
        "tables": {"counts": {"topic": counts, "schema": "gate STRING, n BIGINT"}},
        "state_dir": str(folder / "state"),
    }


def test_the_state_of_a_processor_is_read_by_key_while_its_driver_is_killed(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path
) -> None:
    """Each passage is counted once, no count goes back, and each request is answered."""
    source, counts = topic(2), topic(2, cleanup_policy="compact")
    process = HeadraceProcess(configuration(kafka.bootstrap_servers, source, counts, tmp_path), tmp_path / "process")
    process.start()
    try:
        process.wait_ready(LIMIT_SECONDS)
        table = TableProcess(process)
        with Passages(table, kafka.bootstrap_servers, source) as passages:
            for _ in range(KILLS):
                kill_driver(table)
        sent = passages.sent
        Scenario.wait_until(lambda: {gate: passages.count_of(gate) for gate in sent} == sent, "all", LIMIT_SECONDS)
    finally:
        process.kill()
    assert passages.wrong == []
    parts = quantiles(passages.seconds, n=100)
    print(f"{len(passages.seconds)} requests: p50 {parts[49] * 1e3:.1f} ms, p99 {parts[98] * 1e3:.1f} ms")
