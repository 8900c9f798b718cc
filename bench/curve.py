"""Processor time per record over records, partitions and connections: draws docs/cost.svg, and writes RESULTS.md.

usage: python -m bench.curve [--panels records,partitions] [--rounds 3] [--scale 1.0] [--dry]
A point is left out if the rate of the one before says that it would take longer than five minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench import bare
from bench.cost_plot import Curves, drawing
from bench.environment import PARTITIONS, Bench, pid
from bench.function import definition
from bench.load import Load, measure
from bench.measured import table
from bench.page import RESULTS, Page
from bench.produce import VALUE
from bench.push import Sink, consumer
from bench.sizing import tree
from headrace_devkit.devcluster import Cluster, HeadraceProcess

LIMIT_SECONDS = 300.0
"""The longest that a point may take, and may be expected to take."""
PLOT = Path(__file__).parents[1] / "docs" / "cost.svg"
SECONDS = 4.0
RUN = 1000
"""Records that go into one partition before the next one gets some, so that stored batches are equally large."""
QUIET_SECONDS = 1.0
COUNTING = """\
seen = 0
def handler(context, event):
    global seen
    seen += 1
    if seen == {records}:
        open({last!r}, "w").close()
"""
"""A handler that creates a file at the last record."""


class Curve(NamedTuple):
    """A line of the plot."""

    panel: str
    name: str
    points: tuple[int, ...]
    cost_us: Callable[[CurveTable, int], float]
    """Measures one point: microseconds of the processor per record."""


def processor_seconds(process: HeadraceProcess) -> float:
    """Return the processor time of a process and its children so far.

    In nanoseconds, where /proc/PID/stat has hundredths of a second: these are the clocks of clock_getcpuclockid(3).
    """
    return sum(time.clock_gettime(~one << 3 | 2) for one in tree(pid(process)))


def wait_until_quiet(process: HeadraceProcess) -> None:
    """Wait until it has joined its group: it takes less than a twentieth of a processor."""
    used, before = 1.0, 0.0
    while used > QUIET_SECONDS / 20:
        before = processor_seconds(process)
        time.sleep(QUIET_SECONDS)
        used = processor_seconds(process) - before


class CurveTable:
    """Measures, prints the results, and draws them."""

    title = "Cost per record"
    text = f"""\
Microseconds of the processor, of Headrace and its workers: the least of the rounds in turns, as other work on the
machine only adds; one round for the most records. The process is idle until the records are written, so the time of
its start is not in it. Values have 100 bytes; a topic has {PARTITIONS} partitions where no number is given. With
`docs/cost.svg` as the plot."""

    def __init__(self, bench: Bench, rounds: int, panels: list[str]) -> None:
        self.bench, self.rounds = bench, rounds
        self.curves = [curve for curve in CURVES if curve.panel in panels]
        self.topics: dict[int, str] = {}
        self.found: Curves = {}

    def topic(self, partitions: int) -> str:
        if partitions not in self.topics:
            self.topics[partitions] = self.bench.topic("curve", partitions)
        return self.topics[partitions]

    def measure(self) -> None:
        """Measure each point of each curve."""
        for turn in range(self.rounds):
            for curve in self.curves:
                points, rate = self.found.setdefault(curve.panel, {}).setdefault(curve.name, {}), 0.0
                for x in curve.points:
                    by_records = curve.points is RECORDS
                    if turn and by_records and x == RECORDS[-1]:
                        continue
                    where, start = f"round {turn + 1}, {curve.panel}, {curve.name}, {x:,}", time.monotonic()
                    if by_records and rate and x / rate > LIMIT_SECONDS:
                        print(f"{where}: left out, it would take {x / rate:.0f} s", flush=True)
                        continue
                    points[x] = min(points.get(x, math.inf), curve.cost_us(self, x))
                    took = time.monotonic() - start
                    rate = x / took
                    print(f"{where}: {points[x]:.2f} us, {took:.0f} s", flush=True)

    def lines(self) -> list[str]:
        """Return a table for each panel."""
        found: list[str] = []
        for panel, curves in self.found.items():
            points = sorted({x for curve in curves.values() for x in curve})
            head = " | ".join([panel, *(f"{x:,}" for x in points)])
            rows = [" | ".join([name, *(f"{curve[x]:.1f}" for x in points)]) for name, curve in curves.items()]
            found += [*table(head, rows), ""]
        return found[:-1]

    def push(self, partitions: int, records: int) -> float:
        """Push in requests of 100, as soon as records are written."""
        topic = self.topic(partitions)
        with Sink(records) as sink:
            process = consumer(self.bench, topic, sink, "status", wait=True, auto_offset_reset="latest")
            return self.cost(process, partitions, records, sink.found)

    def function(self, records: int) -> float:
        """Call a handler that only counts."""
        last = self.bench.folder / f"last-{time.time_ns()}"
        code = COUNTING.format(records=records, last=str(last))
        file = definition(self.bench, self.topic(PARTITIONS), code, 1, initialOffset="latest")

        def wait() -> None:
            end = time.monotonic() + LIMIT_SECONDS
            while not last.exists():
                if time.monotonic() > end:
                    raise TimeoutError(f"the last of {records} records did not come")
                time.sleep(0.01)

        return self.cost(self.bench.headrace({"functions": [str(file)]}), PARTITIONS, records, wait)

    def cost(self, process: HeadraceProcess, partitions: int, records: int, wait: Callable[[], object]) -> float:
        """Write records as fast as possible until the last one is through; return the cost of one."""
        topic = self.topic(partitions)
        writer = bare.producer(self.bench.cluster.bootstrap_servers, topic)
        try:
            wait_until_quiet(process)
            before = processor_seconds(process)
            for run in range(records // RUN):
                for _ in range(RUN):
                    writer.produce(topic, f'"{VALUE}"', partition=run % partitions)
                while writer.poll(0) or len(writer) > 100 * RUN:
                    time.sleep(0.001)
            writer.flush()
            wait()
            return 1e6 * (processor_seconds(process) - before) / records
        finally:
            process.terminate()

    def produce(self, entries: list[dict[str, object]], connections: int = 16, partitions: int = PARTITIONS) -> float:
        """Write over HTTP for some seconds."""
        body = json.dumps({"records": entries}).encode()
        load = Load(f"/producers/{self.topic(partitions)}", body, len(entries), connections)
        with self.bench.serving({"http": {"max_connections": CONNECTIONS[-1] + 100}}) as target:
            got = measure(load, target, self.bench.folder, SECONDS * self.bench.scale)
        assert not got.errors, got
        return got.cpu_us

    def spread(self, partitions: int) -> float:
        """Write to every partition with each request."""
        return self.produce([{"value": VALUE, "partition": n % partitions} for n in range(RUN)], partitions=partitions)


def entries(count: int) -> list[dict[str, object]]:
    return [{"value": VALUE}] * count


MILLION = 1_000_000
RECORDS = (10_000, 100_000, MILLION, 10 * MILLION)
PARTITION_COUNTS = (1, 10, 100, 1_000)
CONNECTIONS = (1, 10, 100, 1_000, 5_000)
CURVES = (
    Curve("records", "push, 100 per request", RECORDS, lambda one, x: one.push(PARTITIONS, x)),
    Curve("records", "function", RECORDS, CurveTable.function),
    Curve("partitions", "push, 100 per request", PARTITION_COUNTS, lambda one, x: one.push(x, MILLION)),
    Curve("partitions", "produce, any partition", PARTITION_COUNTS, lambda one, x: one.produce(entries(100), 16, x)),
    Curve("partitions", "produce, all partitions", PARTITION_COUNTS, CurveTable.spread),
    Curve("connections", "produce, 1 per request", CONNECTIONS, lambda one, x: one.produce(entries(1), x)),
    Curve("connections", "produce, 100 per request", CONNECTIONS, lambda one, x: one.produce(entries(100), x)),
)
PANELS = list(dict.fromkeys(curve.panel for curve in CURVES))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.curve", description="Measure and draw what a record costs.")
    parser.add_argument("--scale", type=float, default=1.0, help="1.0 is 4 seconds per load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--panels", default=",".join(PANELS), help=f"some of {','.join(PANELS)}")
    parser.add_argument("--dry", action="store_true", help="print, write neither RESULTS.md nor docs/cost.svg")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        table = CurveTable(Bench(cluster, Path(folder), chosen.scale), chosen.rounds, chosen.panels.split(","))
        table.measure()
    page = Page(RESULTS.read_text())
    page.put(table, chosen.scale)
    print(page.sections[table.title])
    if not chosen.dry:
        RESULTS.write_text(page.text())
        PLOT.write_text(drawing(table.found))


if __name__ == "__main__":
    main()
