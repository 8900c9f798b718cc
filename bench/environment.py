"""A broker, the processes that are measured on it, and the bare loops to compare with."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from bench.load import Target
from bench.machine import Meter
from bench.measured import Measured
from headrace_devkit.devcluster import Cluster, HeadraceProcess

PARTITIONS = 8
BUSY_SECONDS = 30.0
_LIMIT_SECONDS = 600.0
ROOT = Path(__file__).parents[1]


class Table(Protocol):
    """A part of the page that is measured by itself."""

    title: str

    @property
    def text(self) -> str: ...

    def measure(self) -> None: ...

    def lines(self) -> list[str]: ...


class Bench:
    """What every measurement needs."""

    def __init__(self, cluster: Cluster, folder: Path, scale: float) -> None:
        self.cluster, self.folder, self.scale = cluster, folder, scale
        self.kafka: dict[str, Any] = {"bootstrap_servers": cluster.bootstrap_servers}
        """The section `kafka` of what is measured; bare loops use the listener without login."""
        self.sources = sources_of(ROOT)
        """The folders with the packages whose processes are measured."""
        self._full: dict[tuple[int, str], str] = {}

    @property
    def records(self) -> int:
        """Records of a run."""
        return int(1_000_000 * self.scale)

    def headrace(self, config: dict[str, Any], wait: bool = True) -> HeadraceProcess:
        settings = {"kafka": self.kafka, "log_level": "warning", **config}
        folder = self.folder / f"headrace-{time.time_ns()}"
        process = HeadraceProcess(settings, folder, self.environment())
        process.start()
        if wait:
            process.wait_ready()
        return process

    def environment(self) -> dict[str, str]:
        """Return the variables of a process that is measured: these packages go before the installed ones.

        It may keep its bytecode, as an installed package does; otherwise each start would compile all files.
        """
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self.sources)), "PYTHONDONTWRITEBYTECODE": ""}

    @contextlib.contextmanager
    def serving(self, config: dict[str, Any], *headers: str) -> Iterator[Target]:
        """Run Headrace under load."""
        process = self.headrace(config)
        try:
            yield Target(int(process.url.rsplit(":", 1)[1]), pid(process), headers)
        finally:
            process.terminate()

    @contextlib.contextmanager
    def other(self, *command: str) -> Iterator[Target]:
        """Run another server, which prints its port."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout
            yield Target(int(process.stdout.readline()), process.pid)
        finally:
            process.kill()
            process.wait()

    def topic(self, name: str, partitions: int = PARTITIONS, suffix: str = "", appended: bool = False) -> str:
        """Create a topic with a name of its own; `appended`: its timestamps are those of the broker."""
        unique = f"{name}-{time.time_ns()}{suffix}"
        self.cluster.create_topic(unique, partitions, {"message.timestamp.type": "LogAppendTime"} if appended else None)
        return unique

    def full(self, records: int, loop: str = "produce") -> str:
        """Return a topic with this many records of a bare loop; it is filled once."""
        if (records, loop) not in self._full:
            self._full[records, loop] = self.topic("full")
            self.bare(loop, self._full[records, loop], records)
        return self._full[records, loop]

    def bare(self, what: str, topic: str, records: int) -> Measured:
        """Run a bare loop."""
        meter = Meter(os.getpid())
        got = self.module("bench.bare", what, self.cluster.bootstrap_servers, topic, str(records))
        return Measured(**{**meter.used()._asdict(), **got})

    @contextlib.contextmanager
    def loop(self, what: str, topic: str, records: int) -> Iterator[None]:
        """Run a bare loop meanwhile, and wait for its end."""
        words = ["bench.bare", what, self.cluster.bootstrap_servers, topic, str(records)]
        process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.DEVNULL)
        try:
            yield
            process.wait(_LIMIT_SECONDS)
        finally:
            process.kill()
            process.wait()

    def module(self, name: str, *words: str) -> dict[str, Any]:
        """Run a module of this package in a process of its own and return the JSON that it prints."""
        done = subprocess.run([sys.executable, "-m", name, *words], stdout=subprocess.PIPE, check=True)
        result: dict[str, Any] = json.loads(done.stdout)
        return result


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any], limit_seconds: float = _LIMIT_SECONDS / 5) -> Iterator[subprocess.Popen[Any]]:
    """Kill a process at the end, or when it takes too long."""
    limit = threading.Timer(limit_seconds, process.kill)
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        process.kill()
        process.wait()


def sources_of(root: Path) -> list[Path]:
    """Return the folders with the packages of a tree; before the packages had folders of their own it was one."""
    return sorted(root.glob("packages/*/src")) or [root / "src"]


def first_to_last(line: Callable[[], str], server: int) -> Measured:
    """Wait for the line of the first record, and for that of the last one, which is JSON; return what lies between."""
    line()
    meter = Meter(server)
    found = json.loads(line())
    used = meter.used()
    known = {name: number for name, number in found.items() if name in Measured._fields}
    return Measured(**{**known, **used._asdict()})


def pid(process: HeadraceProcess) -> int:
    assert process.server.id
    return process.server.id.pid


def metrics(process: HeadraceProcess) -> str:
    with urllib.request.urlopen(f"{process.url}/metrics", timeout=5) as response:
        text: str = response.read().decode()
    return text


def ask(url: str, body: Any = None) -> Any:
    """Return the JSON that answers a GET, or a POST of a body, None without JSON; 503 is retried for a while."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as cause:
            if cause.code != 503 or time.monotonic() > end:
                raise RuntimeError(f"{url} answered {cause.code}: {cause.read().decode()}") from cause
        time.sleep(0.2)
