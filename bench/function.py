"""Functions, compared with bare loops that read the same records, and what else a user of them waits for."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.environment import PARTITIONS, Bench, metrics, pid
from bench.machine import PROC, Meter, running_processes
from bench.measured import HEAD, Measured, cells, delivered_records, median_of, table
from headrace_devkit.devcluster import HeadraceProcess

ROUNDS = 3
POLL_SECONDS, START_SECONDS = 0.25, 0.02
"""A look at the counter takes the loop of Headrace ten milliseconds."""
PATIENCE_SECONDS = 180.0
NOOP = "def handler(context, event):\n    pass\n"
JSON = "import json\ndef handler(context, event):\n    json.loads(event.body)\n"
ECHO = "def handler(context, event):\n    return event.body\n"
DELAYS = """\
import json, os, time
delays = []
def init_context(context):
    context.platform.set_termination_callback(report)
def report():
    with open(f"delays-{os.getpid()}.json", "w") as file:
        json.dump(delays, file)
def handler(context, event):
    delays.append(1000 * time.time() - event.timestamp_ms)
"""
"""Writes the milliseconds from append to handler when it ends."""
STEADY_RECORDS, WARM_RECORDS = 12_000, 2_000
"""At 1,000 a second; the first ones are not counted."""
MEMORY_WORKERS = 4


class Row(NamedTuple):
    """A throughput."""

    label: str
    code: str
    loop: str
    """The bare loop that it is compared with."""
    target: str
    workers: int = 1
    topic: str = "many"
    output: bool = False
    once: bool = False
    """Whether outputs and offsets are committed together."""


ROWS = (
    Row("no-op handler, workers=1", NOOP, "call", "not above two workers"),
    Row("no-op handler, workers=2", NOOP, "call", ">= 0.40", 2),
    Row("no-op handler, one partition, strict order", NOOP, "call", ">= 0.15", topic="one"),
    Row("json.loads, workers=1", JSON, "consume-json", "compared only"),
    Row("json.loads, workers=2", JSON, "consume-json", ">= 0.75, aim 0.9", 2),
    Row("output topic, workers=1", ECHO, "relay", "not above two workers", output=True),
    Row("output topic, workers=2", ECHO, "relay", ">= 0.25", 2, output=True),
    Row("output topic, workers=2, exactly once", ECHO, "relay", "compared below", 2, output=True, once=True),
)


def definition(bench: Bench, topic: str, code: str, workers: int, **attributes: Any) -> Path:
    """Write a function with a group of its own and return its `function.yaml`."""
    name = f"f{time.time_ns()}"
    folder = bench.folder / name
    folder.mkdir()
    (folder / "work.py").write_text(code)
    trigger = {
        "kind": "kafka",
        "numWorkers": workers,
        "attributes": {"topics": [topic], "consumerGroup": name, **attributes},
    }
    spec = {"handler": "work:handler", "triggers": {"t": trigger}}
    file = folder / "function.yaml"
    file.write_text(json.dumps({"metadata": {"name": name}, "spec": spec}))
    return file


def function(bench: Bench, topic: str, records: int, workers: int = 1, code: str = NOOP, **attributes: Any) -> Measured:
    """Call a handler with every record of a topic."""
    file = definition(bench, topic, code, workers, **attributes)
    process = bench.headrace({"functions": [str(file)]}, wait=False)
    try:
        return measure(process, records)
    finally:
        process.terminate()


def measure(process: HeadraceProcess, records: int) -> Measured:
    """Return the rate between the first look at the counter that finds records and the last one before the end."""
    wait_for(process, 1, START_SECONDS)
    first, start, meter = delivered_records(metrics(process)), time.perf_counter(), Meter(pid(process))
    count = last = first
    while count < records:
        last, seconds, used = count, time.perf_counter() - start, meter.used()
        time.sleep(POLL_SECONDS)
        count = wait_for(process, last)
    assert count == records, f"{records} records were counted as {count}"
    if last == first:  # no look between the first one and the end, so the end counts with the pause before it
        last, seconds, used = count, time.perf_counter() - start, meter.used()
    assert last > first, "every record was delivered before the first look: measure with a larger --scale"
    return Measured(last - first, seconds, *used)


def wait_for(process: HeadraceProcess, records: float, pause_seconds: float = POLL_SECONDS) -> float:
    end = time.monotonic() + PATIENCE_SECONDS
    count = 0.0
    while time.monotonic() < end:
        try:
            count = delivered_records(metrics(process))
        except OSError:  # it does not listen yet
            count = 0.0
        if count >= records:
            return count
        time.sleep(pause_seconds)
    raise TimeoutError(f"{count} of {records} records were delivered within {PATIENCE_SECONDS:g} s")


class FunctionTable:
    """Measures, and prints the results."""

    title = "Functions"
    text = """\
Medians in turns; "processor" is that of Headrace and its workers. The bare loops are one process: they consume 500
records at a time and call a function with each value, parse it, or write it to another topic. They commit nothing.
"Pool" parses them in two processes of `multiprocessing.Pool`. Values are JSON objects of 100 bytes. The longest delay
is of records at 1,000 a second while a second process joins the group and leaves it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found: dict[str, list[Measured]] = {row.label: [] for row in ROWS}
        self.loops: dict[tuple[str, str], list[float]] = {}
        self.facts: list[str] = []

    def measure(self) -> None:
        """Run each row after its bare loop, in turns."""
        bench, records = self.bench, self.bench.records
        topics = {"many": bench.full(records, "produce-json"), "one": bench.topic("one", 1)}
        bench.cluster.create_topic(f"{topics['many']}-out", PARTITIONS)
        bench.bare("produce-json", topics["one"], records)
        for _ in range(ROUNDS):
            for loop, topic in dict.fromkeys([("pool", "many"), *((row.loop, row.topic) for row in ROWS)]):
                self.loops.setdefault((loop, topic), []).append(bench.bare(loop, topics[topic], records).rate)
            for row in ROWS:
                output = {"outputTopic": bench.topic("outputs")} if row.output else {}
                output |= {"delivery": "exactly_once"} if row.once else {}
                found = function(bench, topics[row.topic], records, row.workers, row.code, **output)
                self.found[row.label].append(found)
        self.facts = [self.exactly_once(), self.delay(), self.joining(), self.memory_and_end()]

    def exactly_once(self) -> str:
        once, before = (median_of("rate", self.found[row.label]) for row in (ROWS[-1], ROWS[-2]))
        return f"exactly once, rate against that of at least once | **{once / before:.2f}** | >= 0.6"

    def delay(self) -> str:
        delays = self.delays(joins=False)
        p50, p99 = (delays[int(len(delays) * part)] for part in (0.5, 0.99))
        return f"append to handler at 1,000 per s | p50 **{p50:.1f} ms**, p99 **{p99:.1f} ms** | p50 <= 5, p99 <= 25"

    def joining(self) -> str:
        longest = self.delays(joins=True)[-1]
        return f"longest delay while a process joins and leaves, idle handlers | **{longest:,.0f} ms** | <= 1,000"

    def delays(self, *, joins: bool) -> list[float]:
        """Return the delays of records at 1,000 a second, in milliseconds, the shortest first."""
        topic = self.bench.topic("steady", appended=True)
        file = definition(self.bench, topic, DELAYS, 1)
        process = self.bench.headrace({"functions": [str(file)]})
        self.bench.bare("steady", topic, WARM_RECORDS)
        wait_for(process, WARM_RECORDS)
        with self.bench.loop("steady", topic, STEADY_RECORDS):
            if joins:
                self.bench.headrace({"functions": [str(file)]}).terminate()
        found: list[float] = []
        wait_until_idle(process)
        process.terminate()
        for report in file.parent.glob("delays-*.json"):
            found += json.loads(report.read_text())
        # A worker that is stopped in the middle of a frame reports nothing, as that of the process that leaves may be.
        assert joins or len(found) >= STEADY_RECORDS + WARM_RECORDS, f"the handlers saw {len(found)} records"
        return sorted(found[0 if joins else WARM_RECORDS :])

    def memory_and_end(self) -> str:
        file = definition(self.bench, self.bench.topic("idle"), NOOP, MEMORY_WORKERS)
        process = self.bench.headrace({"functions": [str(file)]})
        wait_until_idle(process)
        sizes = [pss_mib(one.pid) for one in running_processes() if one.parent == pid(process)]
        assert len(sizes) == MEMORY_WORKERS, f"{len(sizes)} processes are below Headrace"
        start = time.perf_counter()
        process.terminate()
        milliseconds = 1000 * (time.perf_counter() - start)
        memory = f"{MEMORY_WORKERS} idle workers, PSS | **{sum(sizes):,.0f} MiB** | <= 200 MiB"
        return f"{memory} |\n| SIGTERM to exit, idle | **{milliseconds:,.0f} ms** | <= 1,000"

    def lines(self) -> list[str]:
        """Return the tables."""
        bare = {key: statistics.median(rates) for key, rates in self.loops.items()}
        rows = []
        for row in ROWS:
            loop, found = bare[row.loop, row.topic], self.found[row.label]
            ratio = median_of("rate", found) / loop
            rows.append(f"{row.label}, records | {cells(found)} | {loop:,.0f} | **{ratio:.2f}** | {row.target}")
        pool = f"Pool: {bare['pool', 'many']:,.0f} records per s."
        throughput = table(f"workload | {HEAD} | bare loop | ratio | target", rows)
        return [*throughput, "", pool, "", *table("what | found | target", self.facts)]


def wait_until_idle(process: HeadraceProcess) -> None:
    """Wait until nothing more is delivered for a second."""
    count, end = -1.0, time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        before, count = count, delivered_records(metrics(process))
        if count == before:
            return
        time.sleep(1)
    raise TimeoutError("records are delivered without an end")


def pss_mib(process_id: int) -> float:
    """Return the proportional resident memory of a process."""
    lines = (PROC / str(process_id) / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
