"""Redriving beside a bare loop with the same client, and the first page of a topic with a million dead letters.

usage: python -m bench.dead_letters
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import confluent_kafka

from headrace.cli.text import open_codecs
from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.producer import ProducerConfig
from headrace.control.dead_letters import DeadLetterTopics
from headrace.control.letter_pages import DeadLetters
from headrace.control.letter_scan import ScanOptions
from headrace.control.marks import Marks
from headrace.control.redrive import Redrive, RedriveOptions
from headrace.control.redrive_target import Target
from headrace.control.selection import Selection
from headrace.delivery.dead_letter import headers_of
from headrace.delivery.protocols import DeadLetter, Outcome, Verdict
from headrace.kafka import Admin, Producer
from headrace.lifecycle import SystemClock
from headrace.records import Record

LETTERS, MANY, PARTITIONS, ROUNDS, ASKED = 200_000, 1_000_000, 4, 3, 10
COLLECT_AFTER = 200_000, 50, 100
"""As the command has it."""


def fill(servers: str, topic: str, letters: int) -> None:
    """Write dead letters as fast as the client can."""
    client = confluent_kafka.Producer({"bootstrap.servers": servers, "linger.ms": 5, "acks": "all"})
    failed = Outcome(Verdict.DEAD_LETTER, "HTTP 400", "no such order", status=400)
    origin = Record("orders", 0, 17, 1, b"key", b'"' + b"x" * 98 + b'"')
    headers = headers_of(DeadLetter(origin, "billing", 5, failed, 1.0, 2.0))
    for number in range(letters):
        while True:
            try:
                client.produce(topic, origin.value, b"k%d" % number, number % PARTITIONS, headers=headers)
                break
            except BufferError:
                client.poll(0.01)
        if not number % 1000:
            client.poll(0)
    client.flush()


def bare(servers: str, source: str, target: str) -> float:
    """Read letters and produce them as they are; return records per second."""
    common = {"bootstrap.servers": servers}
    reader = confluent_kafka.Consumer({**common, "group.id": "bare", "fetch.queue.backoff.ms": 10})
    reader.assign([confluent_kafka.TopicPartition(source, number, 0) for number in range(PARTITIONS)])
    writer = confluent_kafka.Producer({**common, "linger.ms": 1, "acks": "all", "enable.idempotence": True})
    done, began = 0, 0.0
    while done < LETTERS:
        for record in reader.consume(500, 0.1):
            began = began or time.perf_counter()
            writer.produce(target, record.value(), record.key(), record.partition(), headers=record.headers())
            done += 1
        writer.poll(0)
    writer.flush()
    took = time.perf_counter() - began
    reader.close()
    return LETTERS / took


async def redriven(kafka: KafkaConfig, source: str, target: str, options: RedriveOptions) -> float:
    """Redrive; return letters per second from the first slice to the last."""
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    producer = Producer(kafka, ProducerConfig())
    await producer.start()
    began: list[float] = []
    work = Redrive(
        kafka, Admin(kafka), source, producer, SystemClock(), target=Target("topic", target), options=options
    )
    done = await work.run(lambda passed, total: began.append(time.perf_counter()) if passed else None)
    await producer.stop()
    first = 10_000 if options.exactly_once else 2000  # had gone when the clock was looked at first
    return (done.records - first) / (began[-1] - began[0])


async def looked_at(kafka: KafkaConfig, topic: str) -> dict[str, list[float]]:
    """Return what people wait for, in milliseconds."""
    admin = Admin(kafka)
    found: dict[str, list[float]] = {}
    async with open_codecs(SchemaRegistryConfig()) as codecs:
        letters = DeadLetters(kafka, admin, codecs, SystemClock())
        asks: dict[str, Callable[[], Awaitable[Any]]] = {
            "numbers": lambda: DeadLetterTopics(kafka, admin).counts(topic),
            "page": lambda: letters.page(topic, Selection(), ScanOptions(), 10),
            "marks": Marks(kafka, admin, topic).load,
        }
        for _ in range(ASKED):
            for row, ask in asks.items():
                began = time.perf_counter()
                await ask()
                found.setdefault(row, []).append((time.perf_counter() - began) * 1000)
    return found


class DeadLetterTable:
    """Measures, and shows what came out."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.rates: dict[str, list[float]] = {}
        self.took: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Run every row, in turns."""
        create, stamp = self.bench.cluster.create_topic, time.time_ns()
        for turn in range(ROUNDS):
            target = f"back-{stamp}-{turn}"
            create(target, PARTITIONS)
            for row in ("bare", "exact", "plain"):
                source = f"letters-{stamp}-{turn}-{row}.dlq"
                create(source, PARTITIONS)
                self.ask("fill", source, str(LETTERS))
                self.rates.setdefault(row, []).append(self.ask(row, source, target))
        many = f"many-{stamp}.dlq"
        create(many, PARTITIONS)
        self.ask("fill", many, str(MANY))
        self.ask("drop", many, "")
        self.took = self.ask("look", many, "")

    def ask(self, what: str, source: str, target: str) -> Any:
        words = (what, self.bench.cluster.bootstrap_servers, source, target)
        return self.bench.module("bench.dead_letters", *words)["found"]

    def lines(self) -> list[str]:
        """Return the tables."""
        bare_rate, plain, exact = (statistics.median(self.rates[row]) for row in ("bare", "plain", "exact"))
        lines = [
            "| dead letters to a topic | letters/s | beside it | ratio | target |",
            "|---|---|---|---|---|",
            f"| redrive | {plain:,.0f} | bare loop: {bare_rate:,.0f} | **{plain / bare_rate:.2f}** | >= 50,000 |",
            f"| redrive, exactly once | {exact:,.0f} | redrive: {plain:,.0f} | **{exact / plain:.2f}** | >= 0.4 |",
            "",
            f"| topic with {MANY:,} dead letters, all ended | median ms | slowest ms | target |",
            "|---|---|---|---|",
        ]
        titles = {
            "page": ("`dlq show`: first page", "<= 300"),
            "numbers": ("`dlq list`", "<= 300"),
            "marks": ("what has ended, read", "beside it"),
        }
        for row, (title, target) in titles.items():
            took = self.took[row]
            lines.append(f"| {title} | **{statistics.median(took):.0f}** | {max(took):.0f} | {target} |")
        return lines


def serve(what: str, servers: str, source: str, target: str) -> Any:
    """Do one piece of work in this process."""
    kafka = KafkaConfig(bootstrap_servers=servers)
    if what == "fill":
        return fill(servers, source, int(target))
    if what == "bare":
        return bare(servers, source, target)
    if what == "look":
        return asyncio.run(looked_at(kafka, source))
    if what == "drop":
        return asyncio.run(dropped(kafka, source))
    options = RedriveOptions(exactly_once=what == "exact")
    return asyncio.run(redriven(kafka, source, target, options))


async def dropped(kafka: KafkaConfig, topic: str) -> None:
    """Mark all letters but a thousand as ended, in slices as a redrive does, without reading them."""
    producer, marks = Producer(kafka, ProducerConfig()), Marks(kafka, Admin(kafka), topic)
    await producer.start()
    await marks.prepare()
    await marks.load()
    for first in range(0, MANY // PARTITIONS - 1000, 1000):
        for partition in range(PARTITIONS):
            await producer.produce(marks.records_for(partition, range(first, first + 1000)))
    await producer.stop()


def main() -> None:
    from bench.__main__ import Bench
    from headrace.devcluster import Cluster

    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        table = DeadLetterTable(Bench(cluster, Path(folder), 1.0))
        table.measure()
        print("\n".join(table.lines()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps({"found": serve(*sys.argv[1:])}))
    else:
        main()
