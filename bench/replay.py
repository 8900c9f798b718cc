"""A window replayed to a backend, and the same records delivered by the group: the same process, backend and settings.

usage: python -m bench.replay [RECORDS]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.push import Sink
from headrace.devcluster import Cluster

ROUNDS = 3


class ReplayTable:
    """Measures, and shows what came out."""

    def __init__(self, bench: Any, topic: str, records: int) -> None:
        self.bench, self.topic, self.records = bench, topic, records
        self.found: dict[str, list[float]] = {"group": [], "replay": []}
        self.runs = 0

    def measure(self) -> None:
        """Run both, in turns."""
        for _ in range(ROUNDS):
            self.found["group"].append(self.by_the_group())
            self.found["replay"].append(self.by_a_replay())

    def by_the_group(self) -> float:
        with Sink(self.records) as sink:
            process = self.headrace(sink, "earliest")
            rate = sink.rate()
            process.terminate()
        return rate

    def by_a_replay(self) -> float:
        with Sink(self.records) as sink:
            process = self.headrace(sink, "latest")
            began = ask(f"{process.url}/adm/replays", {"topic": self.topic, "to": {"consumer": "push"}})
            rate = sink.rate()
            while ask(f"{process.url}/adm/jobs/{began['id']}")["state"] != "done":
                time.sleep(0.1)
            process.terminate()
        return rate

    def headrace(self, sink: Sink, begins: str) -> Any:
        self.runs += 1
        reactive = {
            "topics": [self.topic],
            "group": f"replay-{self.runs}",
            "auto_offset_reset": begins,
            "backend": {"url": f"http://127.0.0.1:{sink.port}/", "mode": "status"},
        }
        return self.bench.headrace({"reactive_consumers": {"push": reactive}}, wait=begins == "latest")

    def lines(self) -> list[str]:
        """Return the table."""
        group, replay = (statistics.median(self.found[name]) for name in ("group", "replay"))
        return [
            "| workload | replay rec/s | by the group rec/s | cost | target |",
            "|---|---|---|---|---|",
            f"| a window to a backend, 100 records per POST | {replay:,.0f} | {group:,.0f} | **{group / replay:.2f}** "
            "| <= 1.1 |",
        ]


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def main() -> None:
    from bench.__main__ import Bench

    records = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        bench = Bench(cluster, Path(folder), 1.0)
        table = ReplayTable(bench, bench.fill(records), records)
        table.measure()
        print(table.found)
        print("\n".join(table.lines()))


if __name__ == "__main__":
    main()
