"""Loads a server with one request again and again: by `wrk` where it is installed, else by processes of Python.

`wrk` is written in C (Debian: `apt-get install wrk`), so it takes a small share of what a server in Python takes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench.machine import Meter, children_seconds
from bench.measured import Measured

WRK = shutil.which("wrk")
NAME = "wrk" if WRK else "bench.generator in two processes"
WARM_SECONDS = 1
SCRIPT = Path(__file__).with_name("wrk.lua")
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
    run = _by_wrk if WRK and native else _by_python
    words = load.words(target, folder)
    run(load, target, words, WARM_SECONDS)
    meter, before = Meter(target.pid), children_seconds()
    responses = run(load, target, words, max(1, round(seconds)))
    cpu_seconds, stolen = meter.used()
    got = merged(responses)
    got |= {"cpu_seconds": cpu_seconds, "stolen": stolen, "load": (children_seconds() - before) / got["seconds"]}
    return Measured(records=got["requests"] * load.records, **got)


def merged(responses: list[dict[str, float]]) -> dict[str, float]:
    """Return what several generators found together: sums of counts, the worst of times."""
    sums = ("requests", "errors", "refused")
    return {name: (sum if name in sums else max)(one[name] for one in responses) for name in responses[0]}


def _by_wrk(load: Load, target: Target, words: list[str], seconds: int) -> list[dict[str, float]]:
    url = f"http://127.0.0.1:{target.port}{load.path}"
    options = ["-t", "1", "-c", str(load.connections), "-d", f"{seconds}s", "--timeout", "60s", "-s", str(SCRIPT)]
    done = subprocess.run([str(WRK), *options, url, "--", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"wrk ended with {done.returncode}: {done.stderr or done.stdout}")
    return [json.loads(done.stderr.splitlines()[-1])]


def _by_python(load: Load, target: Target, words: list[str], seconds: int) -> list[dict[str, float]]:
    processes: list[subprocess.Popen[Any]] = []
    shares = [load.connections - load.connections // 2, load.connections // 2]
    for connections in filter(None, shares):
        command = [sys.executable, "-m", "bench.generator", load.path, str(target.port), str(connections)]
        processes.append(subprocess.Popen([*command, str(seconds), *words], stdout=subprocess.PIPE))
    return [json.loads(one.communicate()[0]) for one in processes]
