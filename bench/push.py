"""Pushing to a backend: Headrace and a bare consume + POST loop with the same client, in turns on one broker."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from bench.environment import Bench, first_to_last, pid
from bench.load import GO, program
from bench.measured import HEAD, Measured, cells, median_of, table
from headrace_devkit.devcluster import HeadraceProcess

ROUNDS = 3
SINGLES = 0.2
"""Part of the records that single-record rows have."""
LATENCY_RECORDS = 500
ROWS = {
    "status": ("100 records per POST, status only", "batches", ">= 0.9, aim 360,000"),
    "results": ("100 records per POST, batch results", "batches", "compared only"),
    "single": ("1 record per POST, 64 in flight", "singles", ">= 30,000, aim 57,000"),
}


LIMIT_SECONDS = 600.0
"""The longest wait for a line of a backend."""


class Sink:
    """A counting backend in a process of its own: of Go where it is installed."""

    def __init__(self, records: int, mode: str = "status") -> None:
        python = [sys.executable, "-m", "bench.sink"]
        words = [*(python if mode == "latency" or not GO else (program(), "sink")), str(records), mode]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.port = int(self.line())

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def line(self, limit_seconds: float = LIMIT_SECONDS) -> str:
        """Wait for the next line. The backend is killed, and this fails, after the limit."""
        assert self.process.stdout
        limit = threading.Timer(limit_seconds, self.process.kill)
        limit.start()
        line = self.process.stdout.readline()
        limit.cancel()
        if not line:
            raise RuntimeError(f"the backend ended with {self.process.wait()}")
        return line

    def measure(self, process: HeadraceProcess) -> Measured:
        return first_to_last(self.line, pid(process))

    def found(self) -> dict[str, float]:
        """Wait for the last record and return what the backend found."""
        self.line()
        found: dict[str, float] = json.loads(self.line())
        return found


def consumer(
    bench: Bench, topic: str, sink: Sink, mode: str, config: Any = None, wait: bool = False, **settings: Any
) -> HeadraceProcess:
    """Start Headrace with a reactive consumer of a new group, and what else is configured."""
    reactive = {
        "topics": [topic],
        "group": f"push-{time.time_ns()}",
        "backend": {"url": f"http://127.0.0.1:{sink.port}/", "mode": mode},
        **settings,
    }
    return bench.headrace({"reactive_consumers": {"push": reactive}, **(config or {})}, wait=wait)


def push(bench: Bench, topic: str, records: int, mode: str, **settings: Any) -> Measured:
    """Push a topic to a backend."""
    with Sink(records, mode) as sink:
        process = consumer(bench, topic, sink, mode, **settings)
        got = sink.measure(process)
        process.terminate()
    return got


class PushTable:
    """Measures, and prints the results."""

    title = "Pushing to a backend"
    text = """\
Medians in turns. The bare loop consumes, writes JSON and posts with the client of the reactive consumer, 8 requests of
100 records or 64 of one in flight. The backend is `bench/native`, or `bench/sink.py` without Go: a parser and a counter
on the same 2 cores. Its share of a processor stands as "generator"."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.singles = int(bench.records * SINGLES)
        self.found: dict[str, list[Measured]] = {row: [] for row in ROWS}
        self.loops: dict[str, list[float]] = {"batches": [], "singles": []}

    def measure(self) -> None:
        """Run every row, in turns."""
        records = self.bench.records
        topic, short = self.bench.full(records), self.bench.full(self.singles)
        for _ in range(ROUNDS):
            self.loops["batches"].append(self.bare("post", topic, records, "status"))
            self.found["status"].append(push(self.bench, topic, records, "status"))
            self.found["results"].append(push(self.bench, topic, records, "results"))
            self.loops["singles"].append(self.bare("post-one", short, self.singles, "single"))
            self.found["single"].append(push(self.bench, short, self.singles, "single", ordering="none"))
        self.latency = self.delay()

    def bare(self, what: str, topic: str, records: int, mode: str) -> float:
        with Sink(records, mode) as sink:
            return self.bench.bare(what, topic, records, sink.port)

    def delay(self) -> dict[str, float]:
        """From before a record is given to a producer until its request has arrived, one record at a time."""
        topic = self.bench.topic("latency")
        with Sink(LATENCY_RECORDS, "latency") as sink:
            process = consumer(self.bench, topic, sink, "single", wait=True)
            self.bench.bare("tick", topic, LATENCY_RECORDS)
            found = sink.found()
            process.terminate()
        return found

    def lines(self) -> list[str]:
        """Return the table."""
        rows = []
        for row, (name, loop, target) in ROWS.items():
            bare, runs = statistics.median(self.loops[loop]), self.found[row]
            ratio = median_of("rate", runs) / bare
            rows.append(f"{name}, records | {cells(runs)} | {bare:,.0f} | **{ratio:.2f}** | {target}")
        delay = f"p50 **{self.latency['p50_ms']:.1f} ms**, p99 {self.latency['p99_ms']:.1f} ms"
        rows.append(f"produce call to POST, idle | | | | | | {delay} | p50 <= 3 ms")
        return table(f"workload | {HEAD} | bare loop, same client | ratio | target", rows)
