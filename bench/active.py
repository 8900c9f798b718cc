"""Active consumers: reads and streams of one instance, the delay until a waiting read is answered, idle instances."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.environment import Bench, ask, first_to_last, pid
from bench.machine import Meter, memory_mib
from bench.measured import HEAD, Measured, cells, median_of, table
from headrace_devkit.devcluster import HeadraceProcess

ROUNDS = 3
READ_RECORDS, READ_BYTES = 100_000, 1_048_576
"""Records of 1 KB of a run, and the most bytes of one response."""
DELAYS, IDLE, STREAMS = 500, 100, 200
"""Records whose delay is measured, idle instances, and streams at a time."""
TICKS = 100
"""Records that each of the streams gets, 5 in a second at most."""
SETTLE_SECONDS, IDLE_SECONDS, PATIENCE_SECONDS = 10.0, 10.0, 60.0
ONE = "/consumers/bench-{}/instances/one"
PATH = f"{ONE}/records"
ROWS = {
    "json": ("1 KB records, JSON, 1 MiB per read", 1000, ">= 0.15"),
    "binary": ("1 KB records, binary, 1 MiB per read", 1000, ">= 0.15"),
    "events": ("100 B records, server-sent events", 100, ">= 50,000 per s"),
}


class Reader:
    """Clients in a process of their own, which read instances that `subscribe` made."""

    def __init__(self, url: str, mode: str, records: int, clients: int = 1, path: str = PATH, accept: str = "") -> None:
        words = [mode, url.rsplit(":", 1)[1], str(records), str(clients), path, accept]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.reader", *words], stdout=subprocess.PIPE, text=True
        )
        self.line()

    def line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended with {self.process.wait()}")
        return line

    def found(self) -> dict[str, float]:
        """Wait for the last record and return what was measured."""
        self.line()
        found: dict[str, float] = json.loads(self.line())
        return found


def subscribe(process: HeadraceProcess, topic: str, instances: int = 1, **settings: Any) -> None:
    """Create instances, each in a group of its own, and subscribe them."""
    for number in range(instances):
        one = f"{process.url}{ONE.format(number)}"
        ask(one.removesuffix("/instances/one"), {"name": "one", "autoOffsetReset": "earliest", **settings})
        ask(f"{one}/subscriptions", {"topics": [topic]})


def wait_assigned(process: HeadraceProcess, instances: int) -> None:
    """Wait until every instance has partitions."""
    end = time.monotonic() + PATIENCE_SECONDS
    for number in range(instances):
        while not ask(f"{process.url}{ONE.format(number)}/assignments")["partitions"]:
            if time.monotonic() > end:
                raise TimeoutError(f"not all of {instances} instances were assigned within {PATIENCE_SECONDS:g} s")
            time.sleep(0.1)


class ActiveTable:
    """Measures, and prints the results."""

    title = "Active consumers"
    text = f"""\
Medians in turns, first record to last, through one instance; the bare loop consumes the same topic, 500 records at a
time. "Generator" is `bench/reader.py`, the client, on the same 2 cores. The delay is from before a record is given to a
producer until the response of a waiting read arrived, one record at a time. The idle instances are in groups of their
own and read 8 partitions without new records. The streams are in groups of their own and read one partition, which gets
a record every 200 ms: {STREAMS} x 5 records per s. Their queue grows if the delays of the last quarter are longer."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found: dict[str, list[Measured]] = {row: [] for row in ROWS}
        self.loops: dict[int, list[float]] = {1000: [], 100: []}

    def measure(self) -> None:
        """Run every row; those of one instance in turns."""
        small, large = max(READ_RECORDS, int(self.bench.records * 0.5)), READ_RECORDS
        topics = {1000: self.bench.full(large, "produce-kb"), 100: self.bench.full(small)}
        for _ in range(ROUNDS):
            self.loops[1000].append(self.bench.bare("consume", topics[1000], large).rate)
            self.loops[100].append(self.bench.bare("consume", topics[100], small).rate)
            for row, (_title, size, _target) in ROWS.items():
                self.found[row].append(self.read(row, topics[size], large if size == 1000 else small))
        self.delay = self.delays(self.bench.topic("waiting"))
        self.idle = self.idling(self.bench.topic("idle"))
        self.streams = self.streaming(self.bench.topic("streamed", 1))

    @contextmanager
    def serving(self, topic: str, instances: int, assigned: bool = True, **settings: Any) -> Iterator[HeadraceProcess]:
        """Run Headrace with instances."""
        process = self.bench.headrace({"active_consumers": {"max_instances": STREAMS}})
        try:
            subscribe(process, topic, instances, **settings)
            if assigned:
                wait_assigned(process, instances)
            yield process
        finally:
            process.terminate()

    def read(self, mode: str, topic: str, records: int) -> Measured:
        """Read a topic through one instance, from the first record to the last."""
        query = "" if mode == "events" else f"?max_bytes={READ_BYTES}&timeout=30000"
        kind = "binary" if mode == "binary" else "json"
        with self.serving(topic, 1, assigned=False, valueFormat=kind) as process:
            reader = Reader(process.url, mode, records, path=PATH + query)
            return first_to_last(reader.line, pid(process))

    def delays(self, topic: str) -> dict[str, float]:
        """Measure how long a waiting read takes to be answered."""
        with self.serving(topic, 1) as process:
            reader = Reader(process.url, "delays", DELAYS, path=f"{PATH}?timeout=30000")
            self.bench.bare("tick", topic, DELAYS)
            return reader.found()

    def idling(self, topic: str) -> dict[str, float]:
        """Measure what instances take that have nothing to read: memory, and share of a processor."""
        with self.serving(topic, 0) as process:
            before = memory_mib(pid(process))
            subscribe(process, topic, IDLE)
            wait_assigned(process, IDLE)
            time.sleep(SETTLE_SECONDS)
            meter = Meter(pid(process))
            time.sleep(IDLE_SECONDS)
            cpu_seconds = meter.used().cpu_seconds
            return {"mib": memory_mib(pid(process)) - before, "share": cpu_seconds / IDLE_SECONDS}

    def streaming(self, topic: str) -> dict[str, float]:
        """Measure the delays of streams at the same time."""
        with self.serving(topic, STREAMS) as process:
            before = memory_mib(pid(process))
            reader = Reader(process.url, "event-delays", STREAMS * TICKS, STREAMS)
            meter = Meter(pid(process))
            self.bench.bare("tick-slowly", topic, TICKS)
            found = reader.found()
            cpu_seconds = meter.used().cpu_seconds
            return {**found, "mib": memory_mib(pid(process)) - before, "share": cpu_seconds / found["seconds"]}

    def lines(self) -> list[str]:
        """Return the tables."""
        rows = []
        for row, (title, size, target) in ROWS.items():
            bare, runs = statistics.median(self.loops[size]), self.found[row]
            rate = median_of("rate", runs)
            rows.append(f"{title} | {cells(runs)} | {bare:,.0f} | **{rate / bare:.2f}** | {target}")
        delay, idle, streams = self.delay, self.idle, self.streams
        growth = "grows" if streams["late_ms"] > max(5.0, streams["p50_ms"]) else "does not grow"
        others = [
            f"produce call to the response of a waiting read, idle | p50 **{delay['p50_ms']:.1f} ms**, p99 "
            f"{delay['p99_ms']:.1f} ms | p50 <= 2.4 ms",
            f"{IDLE} idle instances | **{idle['mib']:.0f} MiB** more than without, **{idle['share']:.0%}** of a core | "
            "<= 150 MiB, <= 25 %",
            f"{STREAMS} streams | delay p50 {streams['p50_ms']:.1f} ms, p99 {streams['p99_ms']:.1f} ms, **{growth}**; "
            f"{streams['share']:.0%} of a core, {streams['mib']:.0f} MiB more | does not grow",
        ]
        head = f"workload | {HEAD} | bare loop | ratio | target"
        return [*table(head, rows), "", *table("what | found | target", others)]
