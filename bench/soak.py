"""Everything at once under load, with memory, files and threads of each minute: `python -m bench.soak`.

One process has a reactive consumer, a function that writes to another topic, a table, and an active consumer that is
read; all take the topic that is written over HTTP as fast as it can be, while rows of the table are requested.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.active import PATH, Reader, subscribe
from bench.environment import Bench, ask, metrics, pid
from bench.function import ECHO, definition
from bench.load import Load, Target, measure
from bench.measured import Measured, delivered_records, table
from bench.page import RESULTS, Page
from bench.push import Sink
from bench.sizing import megabytes, tree
from headrace_devkit.devcluster import Cluster

ENDLESS = 10**12
"""More records than a client ever counts."""
RECORDS, SAMPLE_SECONDS, PATIENCE_SECONDS = 10, 5.0, 60.0


class Sample(NamedTuple):
    """What a process and its children take."""

    megabytes: float
    files: int
    threads: int


def sample(root: int) -> Sample:
    """Add up a process and all below it."""
    found = [(megabytes(one), count(one, "fd"), count(one, "task")) for one in tree(root)]
    return Sample(sum(one[0] for one in found), sum(one[1] for one in found), sum(one[2] for one in found))


def count(process: int, what: str) -> int:
    return len(list(Path(f"/proc/{process}/{what}").iterdir()))


class SoakTable:
    """Measures, and prints the results."""

    title = "Everything for some minutes"
    text = """\
One process and its workers: a reactive consumer, a function that writes to another topic, a table, and an active
consumer that is read all the time, all of the topic that is written over HTTP as fast as it can be, while a row of the
table is requested again and again. Each row has the most of one minute."""

    def __init__(self, bench: Bench, minutes: int) -> None:
        self.bench, self.minutes = bench, minutes
        self.found: list[Sample] = []
        self.loads: dict[str, Measured] = {}
        self.delivered = 0.0

    def measure(self) -> None:
        """Run everything, and take samples until the load ends."""
        topic = self.bench.topic("soak")
        seconds = 60.0 * self.minutes
        with contextlib.ExitStack() as stack, Sink(ENDLESS) as sink:
            process = self.bench.headrace(self.config(topic, sink))
            stack.callback(process.terminate)
            port = int(process.url.rsplit(":", 1)[1])
            subscribe(process, topic)
            reader = Reader(process.url, "json", ENDLESS, path=PATH.format(0))
            stack.callback(reader.process.kill)
            entries = [{"key": f"k{n}", "value": {"n": n}} for n in range(RECORDS)]
            body = json.dumps({"records": entries}).encode()
            loads = {
                "written": Load(f"/producers/{topic}", body, RECORDS, 8),
                "rows": Load("/tables/stock/rows/k1", b"", 1, 1, method="GET"),
            }
            ask(f"{process.url}/producers/{topic}", json.loads(body))
            self.wait_for_row(process.url)
            target = Target(port, pid(process))
            running = [self.load(name, load, target, seconds) for name, load in loads.items()]
            while any(one.is_alive() for one in running):
                self.found.append(sample(target.pid))
                time.sleep(SAMPLE_SECONDS)
            self.delivered = delivered_records(metrics(process))

    def config(self, topic: str, sink: Sink) -> dict[str, Any]:
        """Return the file of the process."""
        function = definition(self.bench, topic, ECHO, 1, outputTopic=self.bench.topic("soak-output"))
        push = {"topics": [topic], "group": f"{topic}-push", "backend": {"url": f"http://127.0.0.1:{sink.port}/"}}
        return {
            "reactive_consumers": {"push": push},
            "functions": [str(function)],
            "tables": {"stock": {"topic": topic, "schema": "n BIGINT"}},
            "state_dir": str(self.bench.folder / "state"),
        }

    def load(self, name: str, load: Load, target: Target, seconds: float) -> threading.Thread:
        def run() -> None:
            folder = self.bench.folder / name
            folder.mkdir()
            self.loads[name] = measure(load, target, folder, seconds)

        thread = threading.Thread(target=run, name=name)
        thread.start()
        return thread

    def wait_for_row(self, url: str) -> None:
        """Wait until the table has the first record."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                ask(f"{url}/tables/stock/rows/k1")
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
            else:
                return

    def lines(self) -> list[str]:
        """Return a row for each minute, and what was done meanwhile."""
        in_minute = round(60 / SAMPLE_SECONDS)
        parts = [self.found[at : at + in_minute] for at in range(0, len(self.found), in_minute)]
        most = [[max(column) for column in zip(*part, strict=True)] for part in parts if len(part) == in_minute]
        rows = [f"{n} | {mib:,.0f} | {files} | {threads}" for n, (mib, files, threads) in enumerate(most, 1)]
        done = [f"{one.rate:,.0f} {name} per s, {one.errors:,.0f} not" for name, one in self.loads.items()]
        done.append(f"{self.delivered:,.0f} delivered to the backend and the function")
        return [*table("minute | MiB | files | threads", rows), "", f"Meanwhile: {'; '.join(done)}."]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run everything at once, and watch what it takes.")
    parser.add_argument("--minutes", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="do not write RESULTS.md")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "broker") as cluster:
        made = SoakTable(Bench(cluster, Path(folder), 1.0), chosen.minutes)
        made.measure()
    print("\n".join(made.lines()))
    if not chosen.dry:
        page = Page(RESULTS.read_text())
        page.put(made, 1.0)
        RESULTS.write_text(page.text())


if __name__ == "__main__":
    main()
