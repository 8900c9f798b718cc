"""Tables that are kept from topics: catching up, rows by key while the table is written, memory and restart."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.bare_table import COLUMNS
from bench.environment import Bench, ask, pid
from bench.machine import Meter, Used, memory_mib, running_processes
from bench.measured import HEAD, Measured, cells, median_of, table
from headrace_devkit.devcluster import HeadraceProcess

ROUNDS = 3
SECONDS = 8.0
PATIENCE_SECONDS = 300.0
ROWS = {
    "new": ("`kind: latest`, a new key in each record", "latest", 1, ">= 0.5"),
    "again": ("`kind: latest`, each key ten times", "latest", 10, ">= 0.5"),
    "log": ("`kind: log`", "log", 1, ">= 0.5"),
}
"""Label, kind, records per key and target of a topic that is read into a table."""
WRITTEN = "10,000 records/s written"
REQUESTS = {
    ("row", 16, False): ("GET of a row, 16 connections", ">= 3,000 per s"),
    ("query", 16, False): ("POST /query with a parameter, 16 connections", ">= 2,000 per s"),
    ("row", 1, True): (f"GET of a row, one connection, {WRITTEN}", "p50 <= 2 ms, p99 <= 10 ms"),
    ("query", 1, True): (f"POST /query with a parameter, one connection, {WRITTEN}", "p50 <= 2 ms"),
    ("row", 16, True): (f"GET of a row, 16 connections, {WRITTEN}", ""),
    ("query", 16, True): (f"POST /query with a parameter, 16 connections, {WRITTEN}", ""),
}
"""Label and target of requests by how they are made, the number of connections, and whether records are written."""


class SqlTable:
    """Measures, and prints the results."""

    title = "Tables and SQL"
    text = """\
Catching up: medians in turns, values of 200 bytes; the bare loop (`bench/bare_table.py`) consumes, makes Arrow and
inserts into a file of DuckDB, without positions, headers, counts of what does not fit, or questions meanwhile.
Rows by key: random keys, one run each; "written": another process writes records with random keys meanwhile, and
"behind" are those that the table does not have at the end. "Others" is the share of one processor that processes took
which the run did not start."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.runs: dict[str, list[Measured]] = {row: [] for row in ROWS}
        self.loops: dict[str, list[float]] = {row: [] for row in ROWS}
        self.requested: dict[tuple[str, int, bool], Measured] = {}
        self.behind: dict[tuple[str, int, bool], int] = {}

    def measure(self) -> None:
        """Run catching up in turns, then the requests on the last table with a key per record."""
        topics = {row: self.topic(row) for row in ROWS}
        for _ in range(ROUNDS):
            for row, (_, kind, _, _) in ROWS.items():
                self.loops[row].append(self.bare(kind, topics[row]))
                self.runs[row].append(self.catch_up(kind, topics[row])[1])
        process, _ = self.catch_up("latest", topics["new"], keep=True)
        wait(process)
        self.request_rows(process, topics["new"])
        self.restart = {
            "kill -9 of the engine": self.again(process, lambda: os.kill(engine(process), signal.SIGKILL)),
            "stop and start of Headrace": self.again(process, process.terminate),
            "kill -9 and start of Headrace": self.again(process, process.kill),
        }
        process.terminate()

    def request_rows(self, process: HeadraceProcess, topic: str) -> None:
        """Request rows by key of a table that has its topic, while nothing is written and then while records are."""
        process.wait_ready()
        writing = [*self.words("steady", topic), str(int(PATIENCE_SECONDS * 10_000)), str(self.bench.records)]
        for written in (False, True):
            writer = subprocess.Popen(writing if written else ["true"], stdout=subprocess.DEVNULL)
            try:
                for row in (row for row in REQUESTS if row[2] == written):
                    self.request(process, *row[:2], 1.0)
                    self.requested[row] = self.request(process, *row[:2], SECONDS)
                    self.behind[row] = state(process)["lag"]
                self.memory = memory_mib(engine(process))
            finally:
                writer.kill()
                writer.wait()
            wait(process)

    def words(self, what: str, topic: str) -> list[str]:
        return [sys.executable, "-m", "bench.bare_table", what, self.bench.cluster.bootstrap_servers, topic]

    def topic(self, row: str) -> str:
        topic = self.bench.topic(f"table-{row}")
        records = self.bench.records
        subprocess.run(
            [*self.words("fill", topic), str(records), str(records // ROWS[row][2])],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return topic

    def bare(self, kind: str, topic: str) -> float:
        file = self.bench.folder / f"bare-{time.time_ns()}.duckdb"
        records = self.bench.records
        words = (kind, self.bench.cluster.bootstrap_servers, topic, str(records), "1", str(file))
        got = self.bench.module("bench.bare_table", *words)
        file.unlink()
        return float(got["records"] / got["seconds"])

    def catch_up(self, kind: str, topic: str, keep: bool = False) -> tuple[HeadraceProcess, Measured]:
        """Read a topic into a new table; the state of a table is seen twice a second."""
        config = {"tables": {"t": {"topic": topic, "kind": kind, "schema": COLUMNS}}}
        process = self.bench.headrace(config, wait=False)
        lag = waiting(process, 0)
        meter, first, start = Meter(pid(process)), lag, time.perf_counter()
        last, seconds, used = lag, 0.0, Used(0.0, 0.0, 0.0)
        while lag := state(process)["lag"]:
            if lag != last:
                last, seconds, used = lag, time.perf_counter() - start, meter.used()
            time.sleep(0.02)
        if not keep:
            process.terminate()
        return process, Measured(first - last, seconds, *used)

    def request(self, process: HeadraceProcess, how: str, connections: int, seconds: float) -> Measured:
        meter = Meter(pid(process))
        port = process.url.rsplit(":", 1)[1]
        words = (how, port, "t", str(self.bench.records), str(connections), str(seconds))
        got = self.bench.module("bench.row_requests", *words)
        return Measured(**got, **meter.used()._asdict())

    def again(self, process: HeadraceProcess, end: Callable[[], object]) -> float:
        """End Headrace or its engine, and return the seconds until it has sent a row again."""
        end()
        start = time.perf_counter()
        if process.exit_code is not None:
            process.start()
        while True:
            try:
                with urllib.request.urlopen(f"{process.url}/tables/t/rows/key-1", timeout=5):
                    return time.perf_counter() - start
            except (urllib.error.URLError, ConnectionError):
                assert time.perf_counter() < start + PATIENCE_SECONDS
                time.sleep(0.01)

    def lines(self) -> list[str]:
        """Return the tables."""
        rows = []
        for row, (label, _, _, target) in ROWS.items():
            bare = statistics.median(self.loops[row])
            ratio = median_of("rate", self.runs[row]) / bare
            per_core = 1e6 / median_of("cpu_us", self.runs[row])
            rows.append(
                f"{label} | {cells(self.runs[row])} | **{per_core:,.0f}** (>= 150,000) | {bare:,.0f} | "
                f"**{ratio:.2f}** | {target}"
            )
        found = table(f"catching up | {HEAD} | per s of one processor | bare loop | ratio | target", rows)
        requested = [
            f"{REQUESTS[row][0]} | {got.rate:,.0f} | {got.p50_ms:.2f} | {got.p99_ms:.1f} | {got.longest_ms:.0f} | "
            f"{got.errors:.0f} | {self.behind[row]:,} | {got.stolen:.0%} | {got.others:.0%} | {REQUESTS[row][1]}"
            for row, got in self.requested.items()
        ]
        head = "requests per s | p50 ms | p99 ms | longest ms | not 200 | behind | stolen | others | target"
        found += ["", *table(f"rows by key | {head}", requested)]
        others = [f"memory of the engine, MiB | **{self.memory:.0f}** | <= 450"]
        others += [f"first row after {how}, s | **{took:.1f}** | <= 2" for how, took in self.restart.items()]
        return [*found, "", *table("a table of as many rows as a run has records | | target", others)]


def state(process: HeadraceProcess) -> dict[str, Any]:
    """Return the state of the table."""
    found: dict[str, Any] = ask(f"{process.url}/tables/t")
    return found


def waiting(process: HeadraceProcess, rows: int) -> int:
    """Wait until the table has more rows than that, and return its lag."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        try:
            found = state(process)
        except (OSError, RuntimeError):  # it is starting
            time.sleep(0.02)
            continue
        if found["rows"] > rows:
            return int(found["lag"])
        time.sleep(0.02)
    raise TimeoutError(f"the table has at most {rows} rows after {PATIENCE_SECONDS:g} s")


def wait(process: HeadraceProcess) -> None:
    """Wait until the table has every record."""
    end = time.monotonic() + PATIENCE_SECONDS
    while state(process)["lag"]:
        assert time.monotonic() < end, "the table does not catch up"
        time.sleep(0.2)


def engine(process: HeadraceProcess) -> int:
    """Return the process that keeps the tables."""
    children = [one.pid for one in running_processes() if one.parent == pid(process)]
    words = {number: Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0") for number in children}
    return next(n for n, each in words.items() if b"headrace_queries.engine" in each and b"statements" not in each)
