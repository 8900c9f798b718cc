"""Redriving compared with a bare loop with the same client, and the first page of a topic with many dead letters."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import confluent_kafka

from bench.dead_letter_topic import PARTITIONS
from bench.environment import Bench, ask
from bench.machine import Meter
from bench.measured import HEAD, Measured, cells, median_of, table

ROUNDS, REQUESTS = 3, 10
PART, MANY_PARTS = 0.2, 1
"""Dead letters of a redrive, and of the topic that is looked at, as parts of the records of a run."""
LEAST = 60_000
"""Dead letters of a redrive at least: a transaction has up to 10,000, and fewer than six of them say little."""
LEFT = 4000
"""Dead letters of that topic that have not ended."""
PATIENCE_SECONDS = 180.0
QUESTIONS = {"page": ("`dlq show`: first page", "?limit=10"), "list": ("`dlq list`", "")}


class Progress(NamedTuple):
    """What a redrive had done at one moment."""

    at: float
    offsets: int
    """Sum of the target's end offsets; those of transactions count too."""
    cpu_seconds: float
    stolen: float


def dead_letters(bench: Bench) -> int:
    """Return the dead letters of a redrive."""
    return max(LEAST, int(bench.records * PART))


def redrive(bench: Bench, *options: str) -> Measured:
    """Redrive a topic by the command; return what lies between the first records in their origin and the last."""
    records, origin = dead_letters(bench), bench.topic("back", PARTITIONS)
    source = f"{origin}.dlq"
    bench.cluster.create_topic(source, PARTITIONS)
    fill(bench, source, records)
    words = ["dlq", "redrive", source, "-b", bench.cluster.bootstrap_servers, *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli.main", *words],
        cwd=bench.folder,
        env=bench.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = watched(bench, origin, process)
    assert process.stderr
    if process.wait():
        raise RuntimeError(f"the redrive ended with {process.returncode}: {process.stderr.read()}")
    first, last = seen[0], seen[-1]
    part = (last.offsets - first.offsets) / last.offsets
    return Measured(records * part, last.at - first.at, last.cpu_seconds - first.cpu_seconds, last.stolen)


def watched(bench: Bench, topic: str, process: subprocess.Popen[str]) -> list[Progress]:
    """Return each moment at which the end of a topic had moved, until the process ends."""
    settings = {"bootstrap.servers": bench.cluster.bootstrap_servers, "group.id": "watch"}
    client = confluent_kafka.Consumer({**settings, "isolation.level": "read_uncommitted"})
    partitions = [confluent_kafka.TopicPartition(topic, number) for number in range(PARTITIONS)]
    meter, seen, offsets = Meter(process.pid), [], 0
    while process.poll() is None:
        (cpu_seconds, stolen, _), at = meter.used(), time.perf_counter()
        now = sum(client.get_watermark_offsets(one, timeout=10)[1] for one in partitions)
        if now > offsets:
            offsets = now
            seen.append(Progress(at, offsets, cpu_seconds, stolen))
        time.sleep(0.01)
    client.close()
    return seen


def filled(bench: Bench, records: int) -> str:
    """Return a new topic with this many dead letters."""
    topic = bench.topic("dead", PARTITIONS, ".dlq")
    fill(bench, topic, records)
    return topic


def fill(bench: Bench, topic: str, records: int) -> None:
    bench.module("bench.dead_letter_topic", "fill", bench.cluster.bootstrap_servers, topic, str(records))


class DeadLetterTable:
    """Measures, and prints the results."""

    title = "Dead letters"
    text = """\
Medians in turns: `headrace dlq redrive`, from the first records in their origin to the last. The bare loop
reads dead letters and produces them as they are, with the same client."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.loops: list[float] = []
        self.found: dict[str, list[Measured]] = {"plain": [], "exact": []}
        self.took: dict[str, list[float]] = {row: [] for row in QUESTIONS}
        self.many = int(bench.records * MANY_PARTS)

    def measure(self) -> None:
        """Run every row, in turns."""
        for _ in range(ROUNDS):
            self.loops.append(self.bare())
            self.found["plain"].append(redrive(self.bench))
            self.found["exact"].append(redrive(self.bench, "--exactly-once"))
        self.look()

    def bare(self) -> float:
        records = dead_letters(self.bench)
        source = filled(self.bench, records)
        words = [self.bench.cluster.bootstrap_servers, source, str(records), self.bench.topic("back", PARTITIONS)]
        got = self.bench.module("bench.dead_letter_topic", "bare", *words)
        return float(got["records"] / got["seconds"])

    def look(self) -> None:
        """Ask for the first page of a topic of which nearly everything has ended."""
        topic = filled(self.bench, self.many)
        idle = {"topics": [self.bench.topic("idle")], "group": topic, "backend": {"url": "http://127.0.0.1:9/"}}
        process = self.bench.headrace({"reactive_consumers": {"idle": idle}})  # jobs need a consumer in the file
        job = ask(f"{process.url}/adm/dead-letters/{topic}/drop", {"reason": "measured"})
        end = time.monotonic() + PATIENCE_SECONDS
        while ask(f"{process.url}/adm/jobs/{job['id']}")["state"] != "done":
            assert time.monotonic() < end, f"not dropped within {PATIENCE_SECONDS:g} s"
            time.sleep(0.1)
        fill(self.bench, topic, LEFT)
        urls = {"page": f"{process.url}/adm/dead-letters/{topic}", "list": f"{process.url}/adm/dead-letters"}
        for _ in range(REQUESTS):
            for row, (_, query) in QUESTIONS.items():
                began = time.perf_counter()
                ask(urls[row] + query)
                self.took[row].append((time.perf_counter() - began) * 1000)
        process.terminate()

    def lines(self) -> list[str]:
        """Return the tables."""
        bare = statistics.median(self.loops)
        plain, exact = (median_of("rate", self.found[row]) for row in ("plain", "exact"))
        first = f"redrive, records | {cells(self.found['plain'])} | **{plain / bare:.2f} of a bare loop ({bare:,.0f})**"
        second = f"redrive, exactly once, records | {cells(self.found['exact'])} | **{exact / plain:.2f} of without**"
        head = f"topic with {self.many:,} dead letters, {LEFT:,} of them left | median ms | slowest ms | target"
        rows = [
            f"{title} | **{statistics.median(self.took[row]):.0f}** | {max(self.took[row]):.0f} | <= 300"
            for row, (title, _) in QUESTIONS.items()
        ]
        redrives = [f"{first} | >= 50,000 per s", f"{second} | >= 0.4"]
        return [*table(f"workload | {HEAD} | what counts | target", redrives), "", *table(head, rows)]
