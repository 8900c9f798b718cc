"""How many offset records push writes, of all records, on a thousand partitions: `python -m bench.offset_commits`.

Each partition gets 1.5 records a second. The records of `__consumer_offsets` are counted by its ends, before and after.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.environment import Bench
from bench.measured import table
from bench.push import Sink, consumer
from headrace_devkit.devcluster import Cluster

PARTITIONS, RATE, SECONDS = 1000, 1500, 60
ROWS: dict[str, dict[str, Any]] = {
    "every 0.2 s (`auto.commit.interval.ms: 200`)": {"auto.commit.interval.ms": 200},
    "by its rate (default)": {},
}


def offset_records(servers: str) -> int:
    """Return the sum of the ends of all partitions of `__consumer_offsets`."""
    reader = Consumer({"bootstrap.servers": servers, "group.id": "offset-records"})
    topic = "__consumer_offsets"
    partitions = reader.list_topics(topic, timeout=10).topics[topic].partitions
    ends = [reader.get_watermark_offsets(TopicPartition(topic, number), timeout=10)[1] for number in partitions]
    reader.close()
    return sum(ends)


def produce(servers: str, topic: str, seconds: int) -> int:
    """Write `RATE` records a second, to each partition in turn."""
    producer, begun, written = Producer({"bootstrap.servers": servers, "linger.ms": 5}), time.monotonic(), 0
    while (passed := time.monotonic() - begun) < seconds:
        for number in range(written, int(passed * RATE)):
            producer.produce(topic, b"x" * 100, partition=number % PARTITIONS)
            written += 1
        producer.poll(0)
        time.sleep(0.02)
    producer.flush(30)
    return written


def measure(bench: Bench, properties: dict[str, Any]) -> tuple[int, int]:
    """Return the records that were written to the topic, and those of offsets."""
    servers, topic = bench.cluster.bootstrap_servers, bench.topic("offsets", PARTITIONS)
    with Sink(RATE * SECONDS * 2) as sink:
        own = {"consumer": {"properties": properties}, "ordering": "none"}
        process = consumer(bench, topic, sink, "status", wait=True, **own)
        produce(servers, topic, 10)  # each partition has committed once
        before = offset_records(servers)
        written = produce(servers, topic, SECONDS)
        commits = offset_records(servers) - before
        process.terminate()
    return written, commits


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        bench = Bench(cluster, Path(folder), 1.0)
        found = {name: measure(bench, properties) for name, properties in ROWS.items()}
    rows = [
        f"{name} | {written:,} | {commits:,} | {commits / written:.1%} | {commits / (commits + written):.1%}"
        for name, (written, commits) in found.items()
    ]
    print("\n".join(table("commits | records | offset records | of records | of all records", rows)))


if __name__ == "__main__":
    main()
