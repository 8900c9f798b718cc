"""Commands that write a topic into a file."""

from __future__ import annotations

import os
import subprocess
import time

from bench.environment import Bench
from bench.machine import Meter, children_seconds
from bench.measured import Measured


def command(bench: Bench, records: int, *words: str) -> Measured:
    """Run a command from its start to its end, and check that it has written every record."""
    target = bench.folder / "records"
    with target.open("wb") as file:
        meter, before, start = Meter(os.getpid()), children_seconds(), time.perf_counter()
        subprocess.run(words, stdout=file, env=bench.environment(), check=True)
        seconds, cpu_seconds = time.perf_counter() - start, children_seconds() - before
    with target.open("rb") as file:
        assert sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b"")) == records
    return Measured(**{**meter.used()._asdict(), "records": records, "seconds": seconds, "cpu_seconds": cpu_seconds})
