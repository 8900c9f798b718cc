"""Processor time per record over records, partitions and connections; draws docs/cost.svg."""

from __future__ import annotations

import json
import math
import os
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
from bench.produce import VALUE
from bench.push import Sink, consumer
from bench.sizing import tree
from headrace_devkit.devcluster import HeadraceProcess

PLOT = Path(__file__).parents[1] / "docs" / "cost.svg"
ROUNDS, SECONDS = 3, 4.0
RUN = 1000
"""Records that go into one partition before the next one gets some, so that stored batches are equally large."""
QUIET_SECONDS = 1.0
COUNTING = """\
seen = 0
def handler(context, event):
    global seen
    seen += 1
    if seen == {records}:
        open({pipe!r}, "w").close()
"""
"""A handler that opens a named pipe at the last record."""


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
Microseconds of the processor, of Headrace and its workers: the least of {ROUNDS} rounds in turns, as other work on the
machine only adds; one round for the most records. The process is idle until the records are written, so the time of
its start is not in it. Values have 100 bytes; a topic has {PARTITIONS} partitions where no number is given. With
`docs/cost.svg` as the plot."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.topics: dict[int, str] = {}
        self.found: Curves = {}

    def topic(self, partitions: int) -> str:
        if partitions not in self.topics:
            self.topics[partitions] = self.bench.topic("curve", partitions)
        return self.topics[partitions]

    def measure(self) -> None:
        """Measure each point of each curve, and draw them unless the run is dry."""
        for turn in range(ROUNDS):
            for curve in CURVES:
                points = self.found.setdefault(curve.panel, {}).setdefault(curve.name, {})
                for x in curve.points:
                    if not turn or x < RECORDS[-1]:
                        points[x] = min(points.get(x, math.inf), curve.cost_us(self, x))
                        print(f"round {turn + 1}, {curve.panel}, {curve.name}, {x:,}: {points[x]:.2f} us", flush=True)
        if not self.bench.dry:
            PLOT.write_text(drawing(self.found))

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
        pipe = self.bench.folder / f"pipe-{time.time_ns()}"
        os.mkfifo(pipe)
        code = COUNTING.format(records=records, pipe=str(pipe))
        file = definition(self.bench, self.topic(PARTITIONS), code, 1, initialOffset="latest")
        return self.cost(self.bench.headrace({"functions": [str(file)]}), PARTITIONS, records, pipe.read_bytes)

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
