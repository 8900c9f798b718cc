"""Loads a server with one request again and again: by `bench/native` where Go is installed, else by Python.

A program of Go takes a small share of what a server in Python takes, so more of the machine is left for the server.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench.machine import Meter, children_seconds
from bench.measured import Measured

GO = shutil.which("go")
NAME = "bench/native" if GO else "bench.generator in two processes"
WARM_SECONDS = 1
SOURCE = Path(__file__).parent / "native" / "main.go"
JSON_TYPE = "Content-Type: application/json"


class Target(NamedTuple):
    """A server under load."""

    port: int
    pid: int
    headers: tuple[str, ...] = ()


class Load(NamedTuple):
    """What is sent."""

    path: str
    body: bytes
    records: int
    """Records in each request."""
    connections: int
    content_type: str = JSON_TYPE
    method: str = "POST"

    def words(self, target: Target, folder: Path) -> list[str]:
        """Write the body into a file and return method, file and headers."""
        file = folder / "body"
        file.write_bytes(self.body)
        return [self.method, str(file), self.content_type, *target.headers]


def measure(load: Load, target: Target, folder: Path, seconds: float, native: bool = True) -> Measured:
    """Warm the server up, load it, and return what was answered in time."""
    run = _by_go if GO and native else _by_python
    words = load.words(target, folder)
    run(load, target, words, WARM_SECONDS)
    meter, before = Meter(target.pid), children_seconds()
    responses = run(load, target, words, max(1, round(seconds)))
    used = meter.used()
    got = merged(responses)
    got |= {**used._asdict(), "load": (children_seconds() - before) / got["seconds"]}
    return Measured(records=got["requests"] * load.records, **got)


def merged(responses: list[dict[str, float]]) -> dict[str, float]:
    """Return what several generators found together: sums of counts, the worst of times and shares."""
    merging = dict.fromkeys(("requests", "errors", "refused"), sum) | {"least": min}
    return {name: merging.get(name, max)(one[name] for one in responses) for name in responses[0]}


@functools.cache
def program() -> str:
    """Return the generator and backend in Go; it is built once."""
    built = SOURCE.parents[2] / "build" / "bench-native"
    subprocess.run([str(GO), "build", "-o", str(built), str(SOURCE)], check=True)
    return str(built)


def _by_go(load: Load, target: Target, words: list[str], seconds: int) -> list[dict[str, float]]:
    options = [load.path, str(target.port), str(load.connections), str(seconds), *words]
    done = subprocess.run([program(), "load", *options], stdout=subprocess.PIPE, check=True)
    return [json.loads(done.stdout)]


def _by_python(load: Load, target: Target, words: list[str], seconds: int) -> list[dict[str, float]]:
    processes: list[subprocess.Popen[Any]] = []
    shares = [load.connections - load.connections // 2, load.connections // 2]
    for connections in filter(None, shares):
        command = [sys.executable, "-m", "bench.generator", load.path, str(target.port), str(connections)]
        processes.append(subprocess.Popen([*command, str(seconds), *words], stdout=subprocess.PIPE))
    return [json.loads(one.communicate()[0]) for one in processes]
