"""Measure other products and Headrace, in turns on one broker, and write RESULTS.md: `python -m bench.peers`.

usage: python -m bench.peers [--rows single,push] [--rounds 3] [--scale 1.0] [--dry]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import platform
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from bench.environment import Bench
from bench.measured import Measured
from bench.page import RESULTS, Page
from bench.peers import bridge
from bench.peers.bridge import Bridge
from bench.peers.install import PEERS
from bench.peers.report import Runs, lines
from bench.peers.rows import NAMES, Row, Rows, Side
from headrace_devkit.devcluster import Cluster


class PeerTable:
    """Measures, and prints the results."""

    title = "Other products"

    def __init__(self, bench: Bench, rounds: int, chosen: list[str], stack: contextlib.ExitStack) -> None:
        self.bench, self.rounds, self.stack = bench, rounds, stack
        self.programs = {name: peer.path for name, peer in PEERS.items()}
        self.rows = {name: row for name, row in Rows(bench, self.programs, self.bridge).all().items() if name in chosen}
        self.runs: Runs = {}
        self.failed: list[str] = []
        self.warm: Bridge | None = None

    def bridge(self) -> Bridge:
        """Return Strimzi's bridge; it is started once, because the JVM is slow at first."""
        if not self.warm:
            self.warm = self.stack.enter_context(bridge.serving(self.bench, self.programs["Strimzi bridge"]))
            for mode in ("json", "binary") * bridge.WARM_READS:
                records = self.bench.records // 4
                self.warm.read(self.bench, mode, self.bench.full(records, "produce-kb"), records)
        return self.warm

    def measure(self) -> None:
        """Run every side of every row in turns. A run that fails is named below the table."""
        for turn in range(self.rounds):
            for row in self.rows.values():
                for side in reversed(row.sides) if turn % 2 else row.sides:
                    self.run(turn, row, side)

    def run(self, turn: int, row: Row, side: Side) -> None:
        start = time.monotonic()
        try:
            got = side.run()
        except Exception as cause:  # noqa: BLE001 the other rows are worth having
            self.failed.append(
                f"Round {turn + 1} of {row.title}, {side.name} failed: {type(cause).__name__} {cause}"[:300]
            )
            print(self.failed[-1], flush=True)
            return
        self.runs.setdefault((row.title, side.name), []).append(got)
        print(f"round {turn + 1}, {row.title}, {side.name}: {shown(got)}; {time.monotonic() - start:.0f} s", flush=True)

    @property
    def text(self) -> str:
        tool = subprocess.run([self.programs["kcat"], "-V"], capture_output=True, text=True, check=True).stdout
        kcat = next(line.split(" (")[0].split()[1] for line in tool.splitlines() if line.startswith("Version"))
        native = "with" if importlib.util.find_spec("headrace.kafka._columns") else "without"
        own = f"CPython {platform.python_version()}, confluent-kafka {version('confluent-kafka')}"
        tree = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
        own += f", Headrace {tree.stdout.strip()} {native} its compiled module"
        others = [f"{peer.name} {kcat if peer.name == 'kcat' else peer.version}" for peer in PEERS.values()]
        return TEXT.format(rounds=self.rounds, versions=", ".join([own, *others]))

    def lines(self) -> list[str]:
        """Return the tables."""
        return [*lines(self.rows, self.runs), *([""] if self.failed else []), *self.failed]


def shown(got: Measured) -> str:
    times = f", p50 {got.p50_ms:.2f} p99 {got.p99_ms:.1f} max {got.longest_ms:.0f} ms" if got.longest_ms else ""
    share = f", stolen {got.stolen:.0%}, others {got.others:.0%}"
    return f"{got.rate:,.0f} per s, {got.cpu_us:.1f} us{times}{share}"


TEXT = """\
{versions}.

Medians of {rounds} rounds in turns on one broker. Writing is acknowledged by all in-sync replicas on all sides.
Where a product has several ways, the ratio is to the fastest. Dapr takes single records as the body itself or as a
CloudEvent, and many by bulk publish. It pushes one record of each partition at a time, its only order, and 100 by bulk
subscribe. FastStream takes batches of 500 values as bytes.
The bridge of Strimzi reads up to 1,000 records at a time, is warm, and is built without OAuth and its metrics reporter.
FastStream's client fetches again after 10 ms, as Headrace's does. The bare server and the bare loops are Python
without checks, ids, retries or limits.

"Max" is the longest of all rounds, "n" the rounds that ended, "least" what the connection with the fewest responses
had of the mean. "Others" is the share of one processor that processes took which this run did not start. That and
"stolen" are the largest of the rounds."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Measure other products and Headrace.")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="1.0 is 4 seconds per load, a million records per read"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="", help=f"some of {','.join(NAMES)}")
    parser.add_argument("--dry", action="store_true", help="print, do not write RESULTS.md")
    found = parser.parse_args()
    found.rows = found.rows.split(",") if found.rows else list(NAMES)
    if unknown := [row for row in found.rows if row not in NAMES]:
        parser.error(f"--rows: {', '.join(unknown)} is not one of {', '.join(NAMES)}")
    return found


def main() -> None:
    chosen = options()
    if missing := [f"{peer.name} {peer.version}" for peer in PEERS.values() if not peer.path.exists()]:
        raise SystemExit(f"Not installed: {', '.join(missing)}. Run `python -m bench.peers.install`.")
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder) / "kafka") as cluster,
        contextlib.ExitStack() as stack,
    ):
        peers = PeerTable(Bench(cluster, Path(folder), chosen.scale), chosen.rounds, chosen.rows, stack)
        peers.measure()
        page = Page(RESULTS.read_text())
        page.put(peers, chosen.scale)
    print(page.sections[peers.title])
    if not chosen.dry:
        RESULTS.write_text(page.text())


if __name__ == "__main__":
    main()
