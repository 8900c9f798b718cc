"""Measure `headrace consume` to a file against a bare loop over the client, in turns on the same topic.

usage: python -m bench.consume [RECORDS] [TURNS]

Prints per turn the load of the machine, and records per second: of the loop, and of the whole command. The command
prints text, and then JSON; its ratios to the loop follow, and at the end their medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.environment import Bench
from headrace_devkit.devcluster import Cluster


def command_seconds(bench: Bench, topic: str, target: Path, *words: str) -> float:
    """Return the time of the whole command, and check that it has written every record."""
    with target.open("wb") as file:
        start = time.perf_counter()
        command = [sys.executable, "-m", "headrace.cli.main", "consume", topic, *words]
        command += ["-b", bench.cluster.bootstrap_servers]
        subprocess.run(command, stdout=file, env=bench.environment(), check=True)
        seconds = time.perf_counter() - start
    with target.open("rb") as file:
        assert sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b"")) == bench.records
    return seconds


def main(records: int = 1_000_000, turns: int = 5) -> None:
    ratios: dict[str, list[float]] = {"text": [], "json": []}
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        bench = Bench(cluster, Path(folder), records / 1_000_000)
        topic = bench.full(records)
        for turn in range(turns):
            rate = bench.bare("consume", topic, records)
            line = f"turn {turn + 1}, load {os.getloadavg()[0]:.1f}: loop {rate:,.0f}/s"
            for output, found in ratios.items():
                seconds = command_seconds(bench, topic, Path(folder) / "records", "--output", output)
                found.append(records / seconds / rate)
                line += f", {output} {records / seconds:,.0f}/s ({found[-1]:.2f})"
            print(line, flush=True)
    print("medians: " + ", ".join(f"{output} {statistics.median(found):.2f}" for output, found in ratios.items()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
