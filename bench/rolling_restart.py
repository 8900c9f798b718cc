"""A rolling restart: two processes of one group, each stopped and started again while records arrive."""

from __future__ import annotations

import json
import time
from typing import Any

from bench.environment import Bench
from bench.measured import table
from bench.push import Sink, consumer
from headrace_devkit.devcluster import HeadraceProcess

SECONDS = 20
LIMIT_SECONDS = 60
"""For all records of one kind of members to arrive; the row ends with an error after it."""
SETTLED_SECONDS = 3.0
"""Between the restarts, before the first one, and before the first record."""
MEMBERS: dict[str, dict[str, Any]] = {
    "static members": {"group.instance.id": "member-{}"},
    "dynamic members": {},
    "dynamic members, `heartbeat.interval.ms: 500`": {"heartbeat.interval.ms": 500},
    "`group.protocol: consumer`": {"group.protocol": "consumer"},
}


class RollingRestartTable:
    """Measures, and prints the results."""

    title = "Rolling restart"
    text = f"""\
Two processes share 8 partitions and push 1,000 records per second, one per POST. Each in turn gets SIGTERM, is started
again and becomes ready, with {SETTLED_SECONDS:g} s between. A delay is from the produce call to the POST. On the same
processors are the broker, the producer and the backend, so a restart takes longer than alone."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found: dict[str, tuple[dict[str, float], list[float]]] = {}

    def measure(self) -> None:
        for name, properties in MEMBERS.items():
            self.found[name] = self.restarted(properties)

    def restarted(self, properties: dict[str, Any]) -> tuple[dict[str, float], list[float]]:
        """Return what the backend found, and how long each restart took, in seconds."""
        topic, records, took = self.bench.topic("rolling"), SECONDS * 1000, []
        group, folder = f"rolling-{time.time_ns()}", {}
        with Sink(records, "latency") as sink:

            def start(number: int) -> HeadraceProcess:
                own = {key: str(value).format(number) for key, value in properties.items()}
                folder[number] = process = consumer(
                    self.bench, topic, sink, "single", wait=True, group=group, consumer={"properties": own}
                )
                return process

            for number in (0, 1):
                start(number)
            time.sleep(SETTLED_SECONDS)  # the second one has got its partitions, which is not part of a restart
            with self.bench.loop("steady", topic, records):
                sink.line(LIMIT_SECONDS)
                for number in (0, 1):
                    time.sleep(SETTLED_SECONDS)
                    begun = time.monotonic()
                    folder[number].terminate()
                    start(number)
                    took.append(time.monotonic() - begun)
                found: dict[str, float] = json.loads(sink.line(LIMIT_SECONDS))
            for process in folder.values():
                process.terminate()
        return found, took

    def lines(self) -> list[str]:
        rows = [
            f"{name} | **{found['longest_ms'] / 1000:.2f} s** | {found['p99_ms']:,.0f} ms | {found['p50_ms']:.1f} ms | "
            f"{max(took):.1f} s"
            for name, (found, took) in self.found.items()
        ]
        return table("members | longest delay | p99 | p50 | a restart takes", rows)
