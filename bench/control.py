"""How long the status of a consumer with 1,000 partitions takes, over HTTP, each with records that wait."""

from __future__ import annotations

import statistics
import time

from bench.environment import Bench, ask
from bench.measured import table

PARTITIONS = 1000
REQUESTS = 20
TARGET_MS = 100
PATIENCE_SECONDS = 90.0
TITLES = {"status": f"status of {PARTITIONS:,} partitions", "list": "list of consumers, with the same one"}


class ControlTable:
    """Measures, and prints the results."""

    title = "Control"
    text = "Over HTTP, each partition with records that wait."

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found: dict[str, list[float]] = {row: [] for row in TITLES}

    def measure(self) -> None:
        """Ask for every row, in turns."""
        topic = self.bench.topic("wide", PARTITIONS)
        consumer = {"topics": [topic], "group": topic, "backend": {"url": "http://127.0.0.1:9/"}}
        process = self.bench.headrace({"reactive_consumers": {"wide": consumer}})
        records = [{"partition": number, "value": n} for number in range(PARTITIONS) for n in range(5)]
        ask(f"{process.url}/producers/{topic}", {"records": records})
        one = f"{process.url}/adm/reactive-consumers/wide"
        wait(one)
        for _ in range(REQUESTS):
            for row, url in (("status", one), ("list", one.removesuffix("/wide"))):
                began = time.perf_counter()
                ask(url)
                self.found[row].append((time.perf_counter() - began) * 1000)
        process.terminate()

    def lines(self) -> list[str]:
        """Return the table; median and the slowest."""
        rows = [
            f"{title}, ms | **{statistics.median(self.found[row]):.0f}** | {max(self.found[row]):.0f} | <= {TARGET_MS}"
            for row, title in TITLES.items()
        ]
        return table("question | median | slowest | target", rows)


def wait(url: str) -> None:
    """Wait until every partition is assigned, has records that wait, and its lag is known."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = ask(url)["partitions"]
        if sum(bool(one["open"] and one["lag"]) for one in found) == PARTITIONS:
            return
        time.sleep(0.5)
    raise TimeoutError(f"not every partition of {PARTITIONS} was read within {PATIENCE_SECONDS:g} s")
