"""A window replayed to a backend, compared with the same records delivered by the group: same backend and settings."""

from __future__ import annotations

import time

from bench.environment import Bench, ask
from bench.measured import HEAD, Measured, cells, median_of, table
from bench.push import Sink, consumer, push

ROUNDS = 3
PATIENCE_SECONDS = 60.0


def replay(bench: Bench, topic: str, records: int) -> Measured:
    """Replay a whole topic to the backend of a consumer that has nothing else to do."""
    with Sink(records) as sink:
        process = consumer(bench, topic, sink, "status", wait=True, auto_offset_reset="latest")
        began = ask(f"{process.url}/adm/replays", {"topic": topic, "to": {"consumer": "push"}})
        got = sink.measure(process)
        end = time.monotonic() + PATIENCE_SECONDS
        while ask(f"{process.url}/adm/jobs/{began['id']}")["state"] != "done":
            assert time.monotonic() < end, f"the replay is not done {PATIENCE_SECONDS:g} s after its last record"
            time.sleep(0.1)
        process.terminate()
    return got


class ReplayTable:
    """Measures, and prints the results."""

    title = "Replay"
    text = "Medians in turns. A window through a replay, and the same records through the group."

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found: dict[str, list[Measured]] = {"group": [], "replay": []}

    def measure(self) -> None:
        """Run both, in turns."""
        records = self.bench.records
        topic = self.bench.full(records)
        for _ in range(ROUNDS):
            self.found["group"].append(push(self.bench, topic, records, "status"))
            self.found["replay"].append(replay(self.bench, topic, records))

    def lines(self) -> list[str]:
        """Return the table."""
        rate, cpu = (
            median_of(field, self.found[over]) / median_of(field, self.found[under])
            for field, over, under in (("rate", "group", "replay"), ("cpu_us", "replay", "group"))
        )
        rows = [
            f"replay, 100 records per POST | {cells(self.found['replay'])} | **{rate:.2f}** ({cpu:.2f}) | <= 1.1",
            f"the group, 100 records per POST | {cells(self.found['group'])} | | ",
        ]
        return table(f"workload | {HEAD} | time to the group's (processor time) | target", rows)
