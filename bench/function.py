"""A function that does nothing, compared with a bare loop that reads the same records."""

from __future__ import annotations

import statistics
import time

from bench.environment import Bench, metrics, pid
from bench.machine import Meter
from bench.measured import HEAD, Measured, cells, delivered_records, median_of, table
from headrace.devcluster import HeadraceProcess

ROUNDS = 3
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 180.0


def function(bench: Bench, topic: str, records: int, workers: int = 1) -> Measured:
    """Call a handler with every record of a topic."""
    name = f"noop{time.time_ns()}"
    folder = bench.folder / name
    folder.mkdir()
    (folder / "noop.py").write_text("def handler(context, event):\n    pass\n")
    (folder / "function.yaml").write_text(
        f"metadata: {{name: {name}}}\nspec:\n  handler: noop:handler\n  triggers:\n    t:\n      kind: kafka\n"
        f"      numWorkers: {workers}\n      attributes: {{topics: [{topic}], consumerGroup: {name}}}\n"
    )
    process = bench.headrace({"functions": [str(folder / "function.yaml")]}, wait=False)
    got = measure(process, records)
    process.terminate()
    return got


def measure(process: HeadraceProcess, records: int) -> Measured:
    """Watch the counter of delivered records go from its first value to the last record."""
    wait_for(process, 1)
    first, start, meter = delivered_records(metrics(process)), time.perf_counter(), Meter(pid(process))
    last = wait_for(process, records)
    seconds = time.perf_counter() - start
    cpu_seconds, stolen = meter.used()
    assert last == records, f"{records} records were counted as {last}"
    return Measured(last - first, seconds, cpu_seconds, stolen)


def wait_for(process: HeadraceProcess, records: int) -> float:
    end = time.monotonic() + PATIENCE_SECONDS
    count = 0.0
    while time.monotonic() < end:
        try:
            count = delivered_records(metrics(process))
        except OSError:  # it does not listen yet
            count = 0.0
        if count >= records:
            return count
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"{count} of {records} records were delivered within {PATIENCE_SECONDS:g} s")


class FunctionTable:
    """Measures, and prints the results."""

    title = "Functions"
    text = """\
Medians in turns: a handler that does nothing, in one worker and in two; "processor" is that of Headrace and its
workers. The bare loop consumes 500 records at a time and reads their values."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found: dict[int, list[Measured]] = {1: [], 2: []}
        self.loops: list[float] = []

    def measure(self) -> None:
        """Run both, in turns."""
        records = self.bench.records
        topic = self.bench.full(records)
        for _ in range(ROUNDS):
            self.loops.append(self.bench.bare("consume", topic, records))
            for workers, found in self.found.items():
                found.append(function(self.bench, topic, records, workers))

    def lines(self) -> list[str]:
        """Return the table."""
        bare = statistics.median(self.loops)
        rows = []
        for workers, found in self.found.items():
            ratio, target = median_of("rate", found) / bare, ">= 0.40" if workers == 2 else "not above two workers"
            label = f"no-op handler, workers={workers}, records"
            rows.append(f"{label} | {cells(found)} | {bare:,.0f} | **{ratio:.2f}** | {target}")
        return table(f"workload | {HEAD} | bare loop | ratio | target", rows)
