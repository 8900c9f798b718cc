"""Pushing to a backend that counts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

from bench.environment import Bench, first_to_last, pid
from bench.load import GO, program
from bench.measured import Measured
from headrace_devkit.devcluster import HeadraceProcess

SINGLES = 0.2
"""Part of the records that single-record rows have."""
DELAYS = 500
"""Records whose delay is measured."""
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
        try:
            return sink.measure(process)
        finally:
            process.terminate()


def delays(bench: Bench) -> Measured:
    """Measure from before a record is given to a producer until its request has arrived, one record at a time."""
    topic = bench.topic("latency")
    with Sink(DELAYS, "latency") as sink:
        process = consumer(bench, topic, sink, "single", wait=True)
        try:
            return ticked(bench, topic, sink, pid(process))
        finally:
            process.terminate()


def ticked(bench: Bench, topic: str, sink: Sink, server: int) -> Measured:
    """Write a record every 20 ms, and return the delays that the backend found."""
    with bench.loop("tick", topic, DELAYS):
        return first_to_last(sink.line, server)
