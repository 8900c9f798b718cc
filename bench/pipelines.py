"""Pipelines, compared with the same jobs in bare PySpark."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import confluent_kafka

from bench.bare_spark import SCHEMA
from bench.environment import Bench
from bench.measured import table

ROUNDS = 3
ONCE = "real-time, exactly once"
TICKS = {"micro-batch": (100, 4_000), "real-time": (1_000, 160_000), ONCE: (1_000, 160_000), "aggregate": (100, 4_000)}
"""Records a second and records of each mode: the measured ones of real-time mode span two checkpoints."""
WARM_PART = 0.25  # of the records: until then the JVM compiles what each micro-batch runs
BATCH_RECORDS = 250_000
FEW_RECORDS = 1000
PATIENCE_SECONDS = 120.0
DELAYS = {
    "micro-batch": "p50 <= 100",
    "real-time": "p99 <= 15",
    ONCE: "p50 <= 20, p99 <= 100",
    "aggregate": "p50 <= 150",
}
SQL = "SELECT id, name, amount * 1.2 AS gross FROM orders WHERE active"


class PipelineTable:
    """Measures, and prints the results."""

    title = "Pipelines"
    text = f"""\
Medians of {ROUNDS} rounds in turns with the same job in bare PySpark, whose script has the same connector, cores,
heap and micro-batches. Values are JSON objects of 100 bytes in 8 partitions. "Work" is the time in micro-batches, as
Spark reports it; "whole" is from the start of the process to its end; "first row" is from there to the first record
of the result, with {FEW_RECORDS:,} records in the topic. "Watch" is from a saved file to the rows that
`pipeline show --watch` prints."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.runs: dict[str, list[dict[str, float]]] = {}
        self.growth: list[dict[str, float]] = []
        self.waits: dict[str, list[float]] = {"validate": [], "watch": []}

    def measure(self) -> None:
        source, few = (self.bench.full(records, "produce-json") for records in (self.bench.records, FEW_RECORDS))
        for _ in range(ROUNDS):
            for work in ("sql", "handler"):
                self.run(f"bare {work}", self.bare(work, source))
                self.run(work, self.pipeline(work, source))
                self.run(f"bare {work}, few", self.bare(work, few))
                self.run(f"{work}, few", self.pipeline(work, few))
            self.run("bare tasks", self.bare("tasks", source))
            for delivery in ("at_least_once", "exactly_once"):
                self.run(delivery, self.pipeline("copy", source, delivery=delivery))
        for times in (1, 2, 4):
            records = times * self.bench.records // 2
            self.growth.append(self.pipeline("sql", self.bench.full(records, "produce-json")))
        self.wait(self.definition("sql", few, {"topic": "unused", "mode": "append"}, {"once": True}))

    def run(self, name: str, found: dict[str, float]) -> None:
        self.runs.setdefault(name, []).append(found)

    def bare(self, work: str, source: str) -> dict[str, float]:
        target = self.bench.topic("result", appended=True)
        arguments = [self.bench.cluster.bootstrap_servers, source, target, str(BATCH_RECORDS)]
        words = [sys.executable, "-m", "bench.bare_spark", work, *arguments]
        begin = time.time()
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True)
        found = json.loads(done.stdout)
        return self.timed(begin, target) | {"records": found["records"], "work": found["seconds"]}

    def pipeline(self, work: str, source: str, delivery: str = "at_least_once") -> dict[str, float]:
        target = self.bench.topic("result", appended=True)
        file = self.definition(work, source, {"topic": target, "mode": "append", "delivery": delivery}, {"once": True})
        begin = time.time()
        done = subprocess.run(self.command(file), stdout=subprocess.PIPE, check=True, text=True, cwd=file.parent)
        [flow] = json.loads(done.stdout)["flows"].values()
        return self.timed(begin, target) | {"records": flow["input_records"], "work": flow["worked_seconds"]}

    def timed(self, begin: float, target: str) -> dict[str, float]:
        whole = time.time() - begin
        return {"whole": whole, "first": self.timestamps(target, 1)[0] / 1000 - begin}

    def definition(self, work: str, source: str, sink: dict[str, Any], trigger: dict[str, Any]) -> Path:
        """Write a pipeline file with a folder of its own, and return it."""
        folder = self.bench.folder / f"pipeline-{time.time_ns()}"
        folder.mkdir()
        source_section: dict[str, Any] = {"topic": source, "schema": SCHEMA, "starting": "earliest"}
        if work == "handler":  # it parses the bytes itself, as in bare PySpark
            source_section["value_format"] = "binary"
            shutil.copy(Path(__file__).with_name("work.py"), folder)
        queries = {
            "sql": {"sql": SQL},
            "copy": {"sql": "SELECT id, name, amount FROM orders"},
            "sum": {"sql": "SELECT id, count(*) AS n, sum(amount) AS amount FROM orders GROUP BY id"},
            "handler": {"handler": "work:add_tax", "reads": ["orders"]},
        }
        spec = {
            "name": "bench",
            "trigger": {"max_records": BATCH_RECORDS, **trigger},
            "sources": {"orders": source_section},
            "flows": {"result": {**queries[work], "sink": sink}},
        }
        file = folder / "bench.yaml"
        file.write_text(json.dumps(spec))
        return file

    def command(self, file: Path, *words: str) -> list[str]:
        """Return the words of `headrace pipeline`: `run` by default."""
        brokers = ["--bootstrap-servers", self.bench.cluster.bootstrap_servers, "--output", "json"]
        return [sys.executable, "-m", "headrace.cli.main", "pipeline", *(words or ("run", str(file), *brokers))]

    def wait(self, file: Path) -> None:
        """Measure how long an engineer waits for `validate`, and for rows after a change of the file."""
        for _ in range(ROUNDS):
            begin = time.monotonic()
            subprocess.run(self.command(file, "validate", str(file)), stdout=subprocess.DEVNULL, check=True)
            self.waits["validate"].append(time.monotonic() - begin)
        brokers = self.bench.cluster.bootstrap_servers
        words = self.command(file, "show", str(file), "result", "--watch", "--bootstrap-servers", brokers)
        shown = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert shown.stderr
        try:
            for number in range(ROUNDS + 1):
                while "waiting for a change" not in shown.stderr.readline():
                    if shown.poll() is not None:
                        raise RuntimeError("show --watch has ended")
                if number:
                    self.waits["watch"].append(time.monotonic() - begin)
                time.sleep(1)
                begin = time.monotonic()
                file.write_text(file.read_text().replace(f"* 1.{number + 2}", f"* 1.{number + 3}"))
        finally:
            shown.terminate()
            shown.wait()

    def timestamps(self, topic: str, records: int, *, by_reader: bool = False) -> list[int]:
        """Return the broker's timestamps of the first records of a topic, as soon as they are there.

        Those `by_reader` are when the reader has them, after the commit of their transaction.
        """
        settings = {
            "bootstrap.servers": self.bench.cluster.bootstrap_servers,
            "group.id": "bench",
            "isolation.level": "read_committed",
        }
        consumer = confluent_kafka.Consumer({**settings, "auto.offset.reset": "earliest"})
        partitions = consumer.list_topics(topic).topics[topic].partitions
        consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in partitions])
        patience = PATIENCE_SECONDS * (3 if by_reader else 1)
        end, found = time.monotonic() + patience, list[int]()
        while len(found) < records:
            if time.monotonic() > end:
                raise TimeoutError(f"{topic} has {len(found)} of {records} records")
            received = [each for each in consumer.consume(records, 0.002 if by_reader else 1.0) if not each.error()]
            if by_reader:
                found += [round(time.time() * 1000)] * len(received)
            else:
                found += [record.timestamp()[1] for record in received]
        consumer.close()
        return found

    def lines(self) -> list[str]:
        """Return the tables."""
        rows = []
        for work, title in (("sql", "Kafka to SQL to Kafka"), ("handler", "Kafka to handler to Kafka")):
            runs, bare = self.runs[work], self.runs[f"bare {work}"]
            parts = [f"{self.rate(runs):,.0f} | {self.rate(bare):,.0f}"]
            few = self.runs[f"{work}, few"], self.runs[f"bare {work}, few"]
            for what, (found, other) in {"work": (runs, bare), "whole": (runs, bare), "first": few}.items():
                ratio = self.middle(found, what) / self.middle(other, what)
                parts.append(f"{self.middle(found, what):.1f} s, **{ratio:.2f}**")
            rows.append(f"{title} | {' | '.join(parts)}")
        head = "job | records per s | bare per s | work, <= 1.0 of bare | whole | first row, <= 7 s and 1.2 of bare"
        jobs = table(head, rows)
        once, least = self.rate(self.runs["exactly_once"]), self.rate(self.runs["at_least_once"])
        shown = f"{once:,.0f} of {least:,.0f} per s, **{once / least:.2f}**"
        facts = [f"exactly once against at least once, batches of {BATCH_RECORDS:,} | {shown} | >= 0.4, aim 0.5"]
        tasks, sink = self.rate(self.runs["bare tasks"]), self.rate(self.runs["bare sql"])
        shown = f"{tasks:,.0f} of {sink:,.0f} per s, **{tasks / sink:.2f}**"
        facts.append(f"`headrace-kafka` against Spark's own Kafka sink | {shown} | -")
        for wait, seconds in self.waits.items():
            facts.append(f"{wait} | **{statistics.median(seconds):.1f} s** | <= 2 s")
        half, _, double = self.growth
        each = (double["records"] - half["records"]) / (double["work"] - half["work"])
        facts.append(
            f"Kafka to SQL to Kafka, each record after the first {half['records']:,} | {each:,.0f} per s | 200,000"
        )
        rows = [
            f"{run['records']:,} | {run['work']:.1f} s | {run['whole']:.1f} s | {run['records'] / run['work']:,.0f}"
            for run in self.growth
        ]
        growth = table("records | work | whole | records per s of work", rows)
        return [*jobs, "", *table("what | found | target", facts), "", *growth]

    def rate(self, runs: list[dict[str, float]]) -> float:
        return statistics.median(run["records"] / run["work"] for run in runs)

    def middle(self, runs: list[dict[str, float]], what: str) -> float:
        return statistics.median(run[what] for run in runs)


def pauses(received: list[int], checkpoints: list[float]) -> tuple[int, int]:
    """Return the longest time between two records around a checkpoint, and elsewhere."""
    longest = {True: 0, False: 0}
    for before, after in itertools.pairwise(received):
        at_checkpoint = any(before <= each <= after for each in checkpoints)
        longest[at_checkpoint] = max(longest[at_checkpoint], after - before)
    return longest[True], longest[False]


class DelayTable(PipelineTable):
    """Measures the delays of single records."""

    title = "Delays of pipelines"
    text = """\
From append to append by the broker's clock, with exactly once to a reader at read_committed; after a quarter of the
records, with `trigger.interval_seconds: 0` or real-time mode. "Pause" is the longest time without a record in the
result: at a checkpoint of real-time mode, and elsewhere, which is the machine's. The aggregate, which real-time mode
does not have, keeps its state in one part (`driver.shuffle_partitions: 1`)."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.delays: dict[str, list[int]] = {}
        self.pauses = (0, 0)
        """Longest pause at a checkpoint of real-time mode, and elsewhere."""

    def measure(self) -> None:
        for mode in DELAYS:
            self.delays[mode] = self.ticks(mode)

    def ticks(self, mode: str) -> list[int]:
        """Return the milliseconds from append to append in the sink, the shortest first."""
        per_second, records = TICKS[mode]
        is_real_time = mode.startswith("real-time")
        partitions = 1 if is_real_time else 2
        source, target = self.bench.topic("ticks", partitions, appended=True), self.bench.topic("result", appended=True)
        trigger = {"realtime": True} if is_real_time else {"interval_seconds": 0}
        sink = {"topic": target, "mode": "update", **({"delivery": "exactly_once"} if mode == ONCE else {})}
        file = self.definition("sum" if mode == "aggregate" else "sql", source, sink, trigger)
        if mode == "aggregate":
            file.write_text(json.dumps(json.loads(file.read_text()) | {"driver": {"shuffle_partitions": 1}}))
        with self.running(file), ThreadPoolExecutor() as pool:
            reading = pool.submit(self.timestamps, target, records, by_reader=True) if mode == ONCE else None
            producer = confluent_kafka.Producer(
                {"bootstrap.servers": self.bench.cluster.bootstrap_servers, "linger.ms": 0}
            )
            for number in range(records):
                value = {"id": number, "name": "n", "amount": 1.0, "tags": [], "active": True}
                producer.produce(source, json.dumps(value))
                producer.poll(0)
                if not number:  # the first row shows that Spark is there
                    producer.flush()
                    self.timestamps(target, 1)
                    begin = time.monotonic()
                time.sleep(max(0, begin + number / per_second - time.monotonic()))
            producer.flush()
            received = sorted(reading.result() if reading else self.timestamps(target, records))
            checkpoints = [path.stat().st_mtime * 1000 for path in file.parent.rglob("commits/[0-9]*")]
        sent, warm = sorted(self.timestamps(source, records)), int(records * WARM_PART)
        if mode == "real-time":
            self.pauses = pauses(received[warm:], checkpoints)
        return sorted(after - before for before, after in zip(sent[warm:], received[warm:], strict=True))

    @contextlib.contextmanager
    def running(self, file: Path) -> Iterator[None]:
        process = subprocess.Popen(self.command(file), stdout=subprocess.DEVNULL, cwd=file.parent)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def lines(self) -> list[str]:
        """Return the table."""
        rows = []
        for mode, target in DELAYS.items():
            delays = self.delays[mode]
            shares = " | ".join(f"{delays[int(len(delays) * share)]} ms" for share in (0.5, 0.99, 0.999))
            rows.append(f"{mode} | {TICKS[mode][0]:,} | {len(delays):,} | {shares} | {delays[-1]} ms | {target}")
        found = "Longest pause in real-time mode: {} ms at a checkpoint, {} ms elsewhere.".format(*self.pauses)
        return [*table("mode | per s | records | p50 | p99 | p99.9 | max | target", rows), "", found]
