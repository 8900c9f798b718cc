"""Push queries and standing queries: how old a pushed row is, and what many subscribers cost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import confluent_kafka

from bench.environment import Bench, pid
from bench.machine import Meter
from bench.measured import table

SECONDS = 10
WARM_SECONDS = 2
TICKS_PER_SECOND = 100
CLIENTS = 100
SLOW, FAST = 200, 1_000
"""Records a second of the delays, and of the costs."""
ALL = "SELECT id, made FROM t WHERE id >= 0 EMIT CHANGES"
SAME = "SELECT id, made FROM t WHERE id % 100 = 7 EMIT CHANGES"
DIFFERENT = "SELECT id, made FROM t WHERE id % 100 = {} EMIT CHANGES"


class PushQueryTable:
    """Measures, and prints the results."""

    title = "Push queries"
    text = f"""\
Delays are from before a record is given to a producer until its row has arrived, at {SLOW} records a second that all
pass. Costs are processor time of Headrace and its engine together for {FAST * SECONDS:,} records, {FAST:,} a second, of
which one in a hundred passes each statement; clients read server-sent events."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.delays: dict[str, dict[str, float]] = {}
        self.cpu_seconds: dict[str, float] = {}

    def measure(self) -> None:
        """Run each row once."""
        self.delays["push query, server-sent events"] = self.push(SLOW, 1, ALL)[0]
        self.delays["standing query, POST to the backend"] = self.standing()
        for name, clients, statement in (
            ("none", 0, ""),
            ("one", 1, SAME),
            ("same", CLIENTS, SAME),
            ("different", CLIENTS, DIFFERENT),
        ):
            self.cpu_seconds[name] = self.push(FAST, clients, statement)[1]

    def push(self, per_second: int, clients: int, statement: str) -> tuple[dict[str, float], float]:
        """Write records for clients that listen; return what they have seen, and the processor time of Headrace."""
        topic = self.bench.topic("pushed", 1)
        process = self.bench.headrace({"tables": table_of(topic)})
        rows = SECONDS * per_second // (1 if statement == ALL else 100)
        port = process.url.rsplit(":", 1)[1]
        listener = listen(port, str(clients), str(rows), statement) if clients else None
        if listener:
            line(listener)
        self.write(topic, WARM_SECONDS * per_second, per_second, -1)
        meter = Meter(pid(process))
        self.write(topic, SECONDS * per_second, per_second)
        found = json.loads(line(listener)) if listener else {}
        cpu_seconds = meter.used().cpu_seconds
        process.terminate()
        return found, cpu_seconds

    def standing(self) -> dict[str, float]:
        """Write records for a backend that a standing query pushes to; return what it has seen."""
        topic = self.bench.topic("standing", 1)
        backend = listen("0", "0", str(SECONDS * SLOW), "")
        url = f"http://127.0.0.1:{int(line(backend))}/"
        queries = {"all": {"sql": ALL, "backend": {"url": url}}}
        process = self.bench.headrace({"tables": table_of(topic), "queries": queries})
        self.write(topic, WARM_SECONDS * SLOW, SLOW, -1)
        self.write(topic, SECONDS * SLOW, SLOW)
        found: dict[str, float] = json.loads(line(backend))
        process.terminate()
        return found

    def write(self, topic: str, records: int, per_second: int, first: int | None = None) -> None:
        """Write records at a steady rate; with `first` each has this id."""
        producer = confluent_kafka.Producer({"bootstrap.servers": self.bench.cluster.bootstrap_servers, "linger.ms": 0})
        start = time.monotonic()
        burst = per_second // TICKS_PER_SECOND
        for number in range(records):
            value = {"id": number if first is None else first, "made": time.monotonic_ns()}
            producer.produce(topic, json.dumps(value), str(number))
            if not (number + 1) % burst:
                producer.poll(0)
                time.sleep(max(0.0, start + (number + 1) / per_second - time.monotonic()))
        producer.flush()

    def lines(self) -> list[str]:
        """Return the tables."""
        delays = [
            f"{name} | **{found['p50_ms']:.1f}** | {found['p99_ms']:.1f} | p50 <= 60"
            for name, found in self.delays.items()
        ]
        none, one, same, different = (self.cpu_seconds[name] for name in ("none", "one", "same", "different"))
        costs = [
            f"no subscriber | {none / SECONDS:.1%} of a core |",
            f"one | {one / SECONDS:.1%} of a core |",
            f"{CLIENTS} of one statement | {same / SECONDS:.1%} of a core, **{same / one:.2f}** of one | <= 1.5",
            f"{CLIENTS} of different statements | **{different / SECONDS:.0%}** of a core | <= 25 %",
        ]
        return [
            *table("append to pushed row | p50 ms | p99 ms | target", delays),
            "",
            *table(f"subscribers at {FAST:,} records a second | cost | target", costs),
        ]


def table_of(topic: str) -> dict[str, Any]:
    return {"t": {"topic": topic, "schema": "id BIGINT, made BIGINT"}}


def listen(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "bench.subscribers", *words], stdout=subprocess.PIPE, text=True)


def line(listener: subprocess.Popen[str]) -> str:
    """Return the next line of a listener."""
    assert listener.stdout
    found = listener.stdout.readline()
    if not found:
        raise RuntimeError(f"bench.subscribers ended with {listener.wait()}")
    return found
