"""Measure other products and Headrace, in turns on one broker: `python -m bench.peers`.

usage: python -m bench.peers [--scale 1.0] [--rounds 3] [--dry]
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.__main__ import RESULTS
from bench.environment import Bench, first_to_last
from bench.function import function
from bench.measured import Measured, cells, median_of, table
from bench.page import Page
from bench.peers import install
from bench.peers.dapr import Dapr
from bench.produce import Shape, loaded
from bench.push import push
from headrace_devkit.devcluster import Cluster

SHAPES = (
    Shape("1 x 100 B as JSON, 64 connections", 1, 64),
    Shape("1 x 100 B as the body itself, 64 connections", 1, 64, raw=True),
    Shape("1 x 100 B as the body itself, one connection", 1, 1, raw=True),
    Shape("1 x 100 B as the body itself, 1,000 connections", 1, 1000, raw=True),
    Shape("100 x 100 B, 16 connections", 100, 16),
    Shape("100 x 1 KB, 16 connections", 100, 16, size=1000),
)
PART = 0.1
"""Part of the records of a run that is pushed or handled one by one."""
APP = Path(__file__).with_name("faststream_app.py")
PEERS: dict[str, Callable[[], Path]] = {
    f"Dapr {install.DAPR}": install.dapr,
    f"FastStream {install.FASTSTREAM}": install.faststream,
    f"Strimzi bridge {install.BRIDGE}": install.bridge,
    f"Nuclio processor {install.NUCLIO}": install.nuclio,
}
Run = Callable[[], Measured]


class PeerTable:
    """Measures, and prints the results."""

    title = "Other products"
    text = """\
Medians in turns, one broker, this machine. Writing is acknowledged by all in-sync replicas on both sides; Dapr takes
single records as the body itself. The function does nothing, in one process on both sides."""

    def __init__(self, bench: Bench, rounds: int) -> None:
        self.bench, self.rounds = bench, rounds
        self.found: dict[tuple[str, str], list[Measured]] = {}
        self.missing: dict[str, str] = {}

    def measure(self) -> None:
        """Run every row, in turns."""
        rows = self.rows()
        for _ in range(self.rounds):
            for row, sides in rows.items():
                for side, run in sides.items():
                    got = run()
                    self.found.setdefault((row, side), []).append(got)
                    print(f"{row}, {side}: {got.rate:,.0f} per s, {got.cpu_us:.1f} us", flush=True)

    def rows(self) -> dict[str, dict[str, Run]]:
        """Return what is run by row and product; what cannot be installed is missing."""
        bench, topic, records = self.bench, self.bench.topic("http"), int(self.bench.records * PART)
        full = bench.full(records)
        rows: dict[str, dict[str, Run]] = {}
        for peer, get in PEERS.items():
            try:
                program = get()
            except install.NotInstalledError as cause:
                self.missing[peer] = str(cause)
                continue
            if get is install.dapr:
                rows |= self.dapr_rows(peer, Dapr(program), topic, full, records)
            else:
                headrace = partial(function, bench, bench.full(bench.records), bench.records)
                theirs = partial(handled, bench, program, full, records)
                rows["a handler that does nothing"] = {"Headrace": headrace, peer: theirs}
        return rows

    def dapr_rows(self, peer: str, dapr: Dapr, topic: str, full: str, records: int) -> dict[str, dict[str, Run]]:
        bench = self.bench

        def produced(shape: Shape) -> dict[str, Run]:
            return {"Headrace": partial(self.producing, shape, topic), peer: partial(dapr.produce, bench, topic, shape)}

        def pushed(mode: str, **settings: Any) -> dict[str, Run]:
            count = records if mode == "single" else bench.records
            headrace = partial(push, bench, bench.full(count), count, mode, **settings)
            return {"Headrace": headrace, peer: partial(dapr.push, bench, full, records)}

        return {shape.title: produced(shape) for shape in SHAPES} | {
            "push, 1 record per POST, in the order of partitions": pushed("single"),
            "push, 1 record per POST, order `key`, records without keys": pushed("single", ordering="key"),
            "push, 100 records per POST (Dapr: 1)": pushed("status"),
        }

    def producing(self, shape: Shape, topic: str) -> Measured:
        with self.bench.serving({}) as target:
            return loaded(shape.load(topic), target, self.bench)

    def lines(self) -> list[str]:
        """Return the table, and what is missing with the reason."""
        rows = []
        for (row, side), runs in self.found.items():
            headrace = self.found[row, "Headrace"]
            rate, cpu = (median_of(field, runs) / median_of(field, headrace) for field in ("rate", "cpu_us"))
            p50, p99 = (f"{median_of(field, runs):.2f}" if runs[0].p50_ms else "" for field in ("p50_ms", "p99_ms"))
            rows.append(f"{row} | {side} | {cells(runs)} | {p50} | {p99} | {rate:.2f} | {cpu:.2f}")
        head = "workload | product | records per s | processor us each | generator | stolen | p50 ms | p99 ms"
        missing = [f"Not measured: {peer}, because {cause}." for peer, cause in self.missing.items()]
        return [*table(f"{head} | rate, of Headrace's | processor time, of Headrace's", rows), "", *missing]


def handled(bench: Bench, python: Path, topic: str, records: int) -> Measured:
    """Run the application of FastStream over a topic."""
    words = [str(python), str(APP), bench.cluster.bootstrap_servers, topic, str(records)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        return first_to_last(process.stdout.readline, process.pid)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Measure other products and Headrace.")
    parser.add_argument("--scale", type=float, default=1.0, help="1.0 is 4 seconds per load, 100,000 records pushed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="print, do not write RESULTS.md")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        peers = PeerTable(Bench(cluster, Path(folder), chosen.scale), chosen.rounds)
        peers.measure()
    page = Page(RESULTS.read_text())
    page.put(peers, chosen.scale)
    print(page.sections[peers.title])
    if not chosen.dry:
        RESULTS.write_text(page.text())


if __name__ == "__main__":
    main()
