"""Pushing to a backend: Headrace and a bare consume + POST loop with the same client, in turns on one broker."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

ROUNDS = 3
SINGLES = 0.2
"""Part of the records that single-record rows have."""
LATENCY_RECORDS = 500

Measured = dict[str, float]


class Sink:
    """A counting backend in a process of its own."""

    def __init__(self, records: int, mode: str = "status") -> None:
        words = [sys.executable, "-m", "bench.sink", str(records), mode]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def found(self) -> Measured:
        """Wait for the last record."""
        assert self.process.stdout
        found: Measured = json.loads(self.process.stdout.readline())
        return found

    def rate(self) -> float:
        found = self.found()
        return found["records"] / found["seconds"]


class PushTable:
    """Measures, and shows what came out."""

    def __init__(self, bench: Any, topic: str, records: int) -> None:
        self.bench, self.topic, self.records = bench, topic, records
        self.singles = int(records * SINGLES)
        self.short: str = bench.fill(self.singles)
        self.found: dict[str, list[float]] = {}
        self.latency: Measured = {}
        self.groups = 0

    def measure(self) -> None:
        """Run every row, in turns."""
        one = {"mode": "single"}
        for _ in range(ROUNDS):
            self.note("bare batches", self.bare("post", self.topic, self.records, "status"))
            self.note("status", self.push(self.topic, self.records, {"mode": "status"}, "status"))
            self.note("results", self.push(self.topic, self.records, {"mode": "results"}, "results"))
            self.note("bare singles", self.bare("post-one", self.short, self.singles, "single"))
            self.note("single", self.push(self.short, self.singles, one, "single", ordering="none"))
        self.latency = self.delay()

    def note(self, row: str, rate: float) -> None:
        self.found.setdefault(row, []).append(rate)

    def bare(self, what: str, topic: str, records: int, mode: str) -> float:
        with Sink(records, mode) as sink:
            return float(self.bench.bare(what, topic, records, sink.port))

    def push(self, topic: str, records: int, backend: Measured | dict[str, str], mode: str, **settings: Any) -> float:
        with Sink(records, mode) as sink:
            process = self.headrace(topic, sink, backend, settings)
            rate = sink.rate()
            process.terminate()
        return rate

    def headrace(self, topic: str, sink: Sink, backend: Any, settings: Any, wait: bool = False) -> Any:
        self.groups += 1
        reactive = {
            "topics": [topic],
            "group": f"push-{self.groups}",
            "backend": {"url": f"http://127.0.0.1:{sink.port}/", **backend},
            **settings,
        }
        return self.bench.headrace({"reactive_consumers": {"push": reactive}}, wait=wait)

    def delay(self) -> Measured:
        """From before a record is given to a producer until its request has arrived, one record at a time."""
        topic = self.bench.topic("latency")
        with Sink(LATENCY_RECORDS, "latency") as sink:
            process = self.headrace(topic, sink, {"mode": "single"}, {}, wait=True)
            self.bench.bare("tick", topic, LATENCY_RECORDS)
            found = sink.found()
            process.terminate()
        return found

    def lines(self) -> list[str]:
        """Return the table."""
        got = {row: statistics.median(rates) for row, rates in self.found.items()}
        rows = [
            ("100 records per POST, status only", got["status"], got["bare batches"], ">= 0.9, aim 360,000"),
            ("100 records per POST, batch results", got["results"], got["bare batches"], "beside it"),
            ("1 record per POST, 64 in flight", got["single"], got["bare singles"], ">= 30,000, aim 57,000"),
        ]
        lines = [
            "| workload | Headrace rec/s | bare loop, same client, rec/s | ratio | target |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {ours:,.0f} | {bare:,.0f} | **{ours / bare:.2f}** | {aim} |" for name, ours, bare, aim in rows
        ]
        p50, p99 = self.latency["p50_ms"], self.latency["p99_ms"]
        return [*lines, f"| produce call to POST, idle | p50 **{p50:.1f} ms**, p99 {p99:.1f} ms | | | p50 <= 3 ms |"]
