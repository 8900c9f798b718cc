"""Run every measurement once and write bench/RESULTS.md: `make bench`.

Each row sets Headrace against a bare loop over the same client, on the same broker, in the same run, since machines
differ and their speed drifts. The ratio is what counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench.audit import AuditTable
from bench.control import ControlTable
from bench.dead_letters import DeadLetterTable
from bench.produce import ROUNDS, ProduceTable
from bench.push import PushTable
from bench.replay import ReplayTable
from headrace.devcluster import Cluster
from headrace.testing import HeadraceProcess

RESULTS = Path(__file__).with_name("RESULTS.md")
PARTITIONS = 8


class Row(NamedTuple):
    """One workload: records per second, ours and bare, and what else there is to say."""

    name: str
    ours: float
    bare: float
    target: float | None
    note: str = ""


class Bench:
    """A broker, and measurements on it."""

    def __init__(self, cluster: Cluster, folder: Path, scale: float) -> None:
        self.cluster, self.folder, self.scale = cluster, folder, scale

    def run(self) -> list[Row]:
        records = int(1_000_000 * self.scale)
        full = self.fill(records)
        bare_consume = self.bare("consume", full, records)
        function = self.function(full, records)
        self.pushing = PushTable(self, full, records)
        # The table with a topic of 1,000 partitions comes last, because the broker keeps them.
        tables = (ReplayTable(self, full, records), AuditTable(self, full, records), DeadLetterTable(self))
        self.operating = [*tables, ControlTable(self)]
        for table in (self.pushing, *self.operating):
            table.measure()
        return [
            Row("function, no-op handler, 1 worker", function, bare_consume, 0.1, "bare: consume(500), value read"),
        ]

    def function(self, topic: str, records: int) -> float:
        folder = self.folder / "noop"
        folder.mkdir()
        (folder / "noop.py").write_text("def handler(context, event):\n    pass\n")
        (folder / "function.yaml").write_text(
            f"metadata: {{name: noop}}\nspec:\n  handler: noop:handler\n  triggers:\n    t:\n      kind: kafka\n"
            f"      attributes: {{topics: [{topic}], consumerGroup: noop}}\n"
        )
        process = self.headrace({"functions": [str(folder / "function.yaml")]}, wait=False)
        rate = self.rate_by_metrics(process, records)
        process.terminate()
        return rate

    def rate_by_metrics(self, process: HeadraceProcess, records: int) -> float:
        """Watch the counter of ended records go from its first value to the last record."""
        first: tuple[float, float] | None = None
        while True:
            now, count = time.perf_counter(), self.delivered(process)
            if count and first is None:
                first = now, count
            if first and count >= records:
                return (count - first[1]) / (now - first[0])
            time.sleep(0.02)

    def delivered(self, process: HeadraceProcess) -> float:
        try:
            with urllib.request.urlopen(f"{process.url}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return 0.0
        found = re.findall(r'^headrace_ended_records_total\{.*outcome="delivered"\} (\S+)$', text, re.MULTILINE)
        return sum(map(float, found))

    def headrace(self, config: dict[str, Any], wait: bool = True) -> HeadraceProcess:
        settings = {"kafka": {"bootstrap_servers": self.cluster.bootstrap_servers}, "log_level": "warning", **config}
        process = HeadraceProcess(settings, self.folder / f"headrace-{time.time_ns()}")
        process.start()
        if wait:
            process.wait_ready()
        return process

    def topic(self, name: str) -> str:
        unique = f"{name}-{time.time_ns()}"
        self.cluster.create_topic(unique, PARTITIONS)
        return unique

    def fill(self, records: int) -> str:
        topic = self.topic("full")
        self.bare("produce", topic, records)
        return topic

    def bare(self, what: str, topic: str, records: int, port: int = 0) -> float:
        words = [what, self.cluster.bootstrap_servers, topic, str(records), str(port)]
        got = self.module("bench.bare", *words)
        return float(got["records"] / got["seconds"])

    def module(self, name: str, *words: str) -> dict[str, Any]:
        done = subprocess.run([sys.executable, "-m", name, *words], stdout=subprocess.PIPE, check=True)
        result: dict[str, Any] = json.loads(done.stdout)
        return result


def table(rows: list[Row]) -> str:
    lines = ["| workload | Headrace rec/s | bare rec/s | ratio | first target | |", "|---|---|---|---|---|---|"]
    for row in rows:
        target = f">= {row.target:g}" if row.target else ""
        ratio = row.ours / row.bare
        lines.append(f"| {row.name} | {row.ours:,.0f} | {row.bare:,.0f} | **{ratio:.2f}** | {target} | {row.note} |")
    return "\n".join(lines)


def core(scale: float) -> str:
    """Measure the delivery core, in a process of its own, with nothing beside it."""
    words = [sys.executable, "-m", "bench.core", str(int(2_000_000 * scale))]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout


def operating(bench: Bench) -> str:
    replay, audit, letters, control = ("\n".join(part.lines()) for part in bench.operating)
    return f"""\
## Replay

Medians in turns. A window through a replay beside the same records through the group: same process, backend, settings.

{replay}

## Audit

Medians in turns, with `audit.records: all` and without an audit section.

{audit}

## Dead letters

Medians in turns. The bare loop reads letters and produces them as they are, with the same client.

{letters}

## Control

Over HTTP, each partition with records that wait.

{control}

"""


def page(produce: str, bench: Bench, core_rows: str, rows: str) -> str:
    names = ("confluent-kafka", "uvicorn", "httptools", "msgspec")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    push = "\n".join(bench.pushing.lines())
    return f"""\
# Measured

`make bench` on {datetime.now(UTC):%Y-%m-%d}: CPython {platform.python_version()}, {versions}; Apache Kafka 4.3.1, one
KRaft broker with the dev cluster's ordinary flags, {PARTITIONS} partitions, broker, load generator and backend on the
same 2 cores; {int(1_000_000 * bench.scale):,} records of 100 bytes per run. Ratios within one run bind, absolute
figures drift.

## Producing over HTTP

Medians of {ROUNDS} rounds in turns. "Bare server": `bench/bare_server.py`, a parser, a producer and a delivery thread
without checks, ids, record headers, limits or errors. "FastAPI": `bench/fastapi_server.py`, a model and a future per
record. Every row of Headrace has the whole edge before it (Host, Origin, sizes, counts, deadlines, connections).

{produce}

## Pushing to a backend

Medians in turns. The bare loop consumes, writes JSON and posts with the client of the reactive consumer, 8 requests of
100 records or 64 of one in flight. The backend is `bench/sink.py`, a parser and a counter on the same 2 cores.

{push}

{operating(bench)}
## The delivery core

`bench/core.py`, no Kafka and no HTTP: medians of three runs, the second half of each, when slow keys are known.

{core_rows}

## Functions

One run.

{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure Headrace against bare loops.")
    parser.add_argument("--scale", type=float, default=1.0, help="1.0 is a million records per run")
    parser.add_argument("--dry", action="store_true", help="print, do not write RESULTS.md")
    options = parser.parse_args()
    core_rows = core(options.scale)
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        bench = Bench(cluster, Path(folder), options.scale)
        produce = ProduceTable(bench)
        produce.measure()
        rows = table(bench.run())
        text = page("\n".join(produce.lines()), bench, core_rows, rows)
    print(text)
    if not options.dry:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
