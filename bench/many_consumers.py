"""What 200 reactive consumers in one process take, and how fast they start: `python -m bench.many_consumers`."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.environment import Bench, ask, metrics, pid
from bench.machine import Meter
from bench.measured import table
from bench.sizing import megabytes, reactive
from headrace_devkit.devcluster import Cluster

COUNTS = (0, 50, 200)
PARTITIONS, SETTLED_SECONDS, REST_SECONDS = 4, 10.0, 20.0
LIMIT_SECONDS = 120.0
RUNNING = re.compile(r'^headrace_placed_consumers\{(?:[^}]*,)?state="running"(?:,[^}]*)?\} (\S+)$', re.MULTILINE)


def row(bench: Bench, topic: str, count: int, placed: bool) -> str:
    """Measure one process; with `placed`, the time also counts the choice of its consumers."""
    config: dict[str, Any] = {**reactive(topic, count), **({"placement": {"process": "p0"}} if placed else {})}
    config["state_dir"] = str(bench.folder / f"state-{time.time_ns()}")
    begun = time.monotonic()
    process = bench.headrace(config, wait=False)
    try:
        process.wait_ready(LIMIT_SECONDS)
        ready = time.monotonic() - begun
        while len(assigned(process)) < count:
            if time.monotonic() - begun > LIMIT_SECONDS:
                raise RuntimeError(f"{len(assigned(process))} of {count} consumers have partitions")
            time.sleep(0.2)
        all_at = time.monotonic() - begun
        time.sleep(SETTLED_SECONDS)
        own = pid(process)
        meter = Meter(own)
        time.sleep(REST_SECONDS)
        cores = meter.used()[0] / REST_SECONDS
        threads = re.search(r"^Threads:\s+(\d+)", Path(f"/proc/{own}/status").read_text(), re.MULTILINE)
        files = len(list(Path(f"/proc/{own}/fd").iterdir()))
        memory = megabytes(own)
        assert threads
        assert not placed or float(RUNNING.findall(metrics(process))[0]) == count
    finally:
        process.terminate()
    name = f"{count} consumers" + (", placed" if placed else "")
    return f"{name} | {ready:.1f} s | {all_at:.1f} s | {threads[1]} | {files} | {memory:.0f} MB | {cores * 1000:.0f}"


def assigned(process: Any) -> list[str]:
    """Return the consumers that have partitions."""
    found = ask(f"{process.url}/adm/reactive-consumers")["consumers"]
    return [one["name"] for one in found if one["partitionsAssigned"]]


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        bench = Bench(cluster, Path(folder), 1.0)
        topic = bench.topic("many", PARTITIONS)
        for count, placed in [*((count, False) for count in COUNTS), (COUNTS[-1], True)]:
            rows.append(row(bench, topic, count, placed))
            sys.stderr.write(rows[-1] + "\n")
    head = "process | ready | all have partitions | threads | files | memory | processor at rest, ms/s"
    print("\n".join(table(head, rows)))


if __name__ == "__main__":
    main()
