"""How long the status of a consumer with 1,000 partitions takes, over HTTP, each with records that wait.

usage: python -m bench.control
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

PARTITIONS = 1000
ASKED = 20
TARGET_MS = 100
PATIENCE_SECONDS = 90.0


class ControlTable:
    """Measures, and shows what came out."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.found: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Ask for every row, in turns."""
        topic = f"wide-{time.time_ns()}"
        self.bench.cluster.create_topic(topic, PARTITIONS)
        consumer = {"topics": [topic], "group": topic, "backend": {"url": "http://127.0.0.1:9/"}}
        process = self.bench.headrace({"reactive_consumers": {"wide": consumer}})
        records = [{"partition": number, "value": n} for number in range(PARTITIONS) for n in range(5)]
        self.ask(f"{process.url}/producers/{topic}", json.dumps({"records": records}).encode())
        one = f"{process.url}/adm/reactive-consumers/wide"
        self.wait(one)
        for _ in range(ASKED):
            for row, url in (("status", one), ("list", one.removesuffix("/wide"))):
                began = time.perf_counter()
                self.ask(url)
                self.found.setdefault(row, []).append((time.perf_counter() - began) * 1000)
        process.terminate()

    def wait(self, url: str) -> None:
        """Wait until every partition is here, has records that wait, and its lag is known."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            found = json.loads(self.ask(url))["partitions"]
            if sum(bool(one["open"] and one["lag"]) for one in found) == PARTITIONS:
                return
            time.sleep(0.5)
        raise TimeoutError(f"not every partition of {PARTITIONS} was read within {PATIENCE_SECONDS:g} s")

    def ask(self, url: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            said: bytes = answer.read()
        return said

    def lines(self) -> list[str]:
        """Return the table; median and the slowest."""
        lines = ["| question | median | slowest | target |", "|---|---|---|---|"]
        titles = {"status": f"status of {PARTITIONS:,} partitions", "list": "list of consumers, with the same one"}
        for row, title in titles.items():
            took = self.found[row]
            lines.append(f"| {title}, ms | **{statistics.median(took):.0f}** | {max(took):.0f} | <= {TARGET_MS} |")
        return lines


def main() -> None:
    from bench.__main__ import Bench
    from headrace.devcluster import Cluster

    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        table = ControlTable(Bench(cluster, Path(folder), 1.0))
        table.measure()
        print("\n".join(table.lines()))


if __name__ == "__main__":
    main()
