"""How long liveness takes during the worst bodies that are allowed, and with many connections."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from typing import Any, NamedTuple

from bench.environment import Bench
from bench.load import Load, Target, measure
from bench.machine import forget_peak_memory, memory_mib
from bench.measured import Measured, table

SECONDS = 8.0
BACK_SECONDS, BACK_PART = 60.0, 1.2
"""After a load, resident memory must fall to this part of what it was before, within that time."""
TARGET_MS, FIRST_TARGET_MS = 100, 1000
REGISTRATIONS = {"registrations": {"backends": ["http://127.0.0.1:9/"]}}


class LoadRow(NamedTuple):
    """What loads the server while liveness is requested."""

    name: str
    path: str = ""
    body: bytes = b""
    connections: int = 0
    content_type: str = "application/json"
    method: str = "POST"
    config: dict[str, Any] = {}
    native: bool = True


class Found(NamedTuple):
    """One row."""

    probe: dict[str, float]
    load: Measured | None
    before_mib: float
    peak_mib: float
    back_seconds: float


def rows(topic: str) -> list[LoadRow]:
    """Return what is measured: bodies are at most as large as `http.max_body_bytes` allows."""
    path = f"/producers/{topic}"
    value = {"value": "x" * 60}
    many = {"records": [value] * 9999}
    headers = {"records": [{**value, "headers": [["h", "v"]] * 6000}] * 10}
    empty = b'{"records":[' + b",".join([b"{}"] * 340_000) + b"]}"
    names = {"topics": [f"t{n}" for n in range(8000)], "group": "g", "backend": {"url": "http://127.0.0.1:9/"}}
    small = json.dumps({"records": [value]}).encode()
    return [
        LoadRow("nothing"),
        LoadRow("9,999 records in a request, 30 connections", path, json.dumps(many).encode(), 30),
        LoadRow("10 records with 60,000 headers, 30 connections", path, json.dumps(headers).encode(), 30),
        LoadRow("340,000 empty records in a request, 30 connections", path, empty, 30),
        LoadRow("100,000 bad lines in a stream, 3 connections", path, b"{]\n" * 100_000, 3, "application/x-ndjson"),
        LoadRow(
            "a registration of 8,000 topics, 4 connections",
            "/reactive-consumers/wide",
            json.dumps(names).encode(),
            4,
            method="PUT",
            config=REGISTRATIONS,
        ),
        LoadRow("1,000 connections, one record each", path, small, 1000, native=False),
        LoadRow(
            "5,000 connections, one record each, `http.max_connections` 6,000",
            path,
            small,
            5000,
            config={"http": {"max_connections": 6000}},
            native=False,
        ),
    ]


class LivenessTable:
    """Measures, and prints the results."""

    title = "Liveness under load"
    text = """\
One run each. `GET /health/liveness` every 10 ms over a new connection each time, with clients that send one request
after the other. Requests that were not sent because one took long count with the time that they would have waited.
"First response": from the start until each connection, all opened at once, had one. "Back": until resident memory is
within 20 % of what it was before. Load, broker and prober share the same processors."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found: dict[str, Found] = {}

    def measure(self) -> None:
        """Run every row in a process of its own."""
        for load_row in rows(self.bench.topic("live")):
            with self.bench.serving(load_row.config) as target:
                self.found[load_row.name] = self.one(load_row, target)

    def one(self, load_row: LoadRow, target: Target) -> Found:
        before = memory_mib(target.pid)
        forget_peak_memory(target.pid)
        probe = subprocess.Popen(
            [sys.executable, "-m", "bench.probe", str(target.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        got = None
        if load_row.connections:
            content = f"Content-Type: {load_row.content_type}"
            load = Load(load_row.path, load_row.body, 1, load_row.connections, content, load_row.method)
            got = measure(load, target, self.bench.folder, SECONDS, load_row.native)
        else:
            time.sleep(SECONDS)
        probed = json.loads(probe.communicate()[0])
        return Found(probed, got, before, memory_mib(target.pid, "VmHWM"), self.back(target.pid, before))

    def back(self, pid: int, before: float) -> float:
        """Return the seconds until memory is back, infinity if it does not come back in time."""
        start = time.monotonic()
        while time.monotonic() < start + BACK_SECONDS:
            if memory_mib(pid) <= BACK_PART * before:
                return time.monotonic() - start
            time.sleep(0.25)
        return math.inf

    def lines(self) -> list[str]:
        """Return the table."""
        return table(
            "load | p50 ms | p99 ms | slowest ms | target | not 200 | requests per s | first response | "
            "memory before, peak, MiB | back",
            [row(name, found) for name, found in self.found.items()],
        )


def row(name: str, found: Found) -> str:
    """Return the cells of one row."""
    probe, load = found.probe, found.load
    rate = f"{load.rate:,.0f}" if load else ""
    first = f"{load.first_ms:,.0f} ms (<= {FIRST_TARGET_MS:,})" if load and load.first_ms else ""
    back = f"after {found.back_seconds:.0f} s" if found.back_seconds < math.inf else f"not within {BACK_SECONDS:.0f} s"
    times = f"{probe['p50_ms']:.1f} | **{probe['p99_ms']:.1f}** | {probe['longest_ms']:.1f} | <= {TARGET_MS}"
    memory = f"{found.before_mib:.0f}, {found.peak_mib:.0f} | {back}"
    return f"{name} | {times} | {probe['errors']:.0f} of {probe['requests']:.0f} | {rate} | {first} | {memory}"
