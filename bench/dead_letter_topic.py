"""Dead letters to measure with, and the bare loop that reads and produces them: each in a process of its own.

usage: python -m bench.dead_letter_topic fill|bare BOOTSTRAP TOPIC RECORDS [TARGET]
Prints JSON: records, seconds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import confluent_kafka

from headrace.delivery.dead_letter import headers_of
from headrace.delivery.outcomes import DeadLetter, Reply
from headrace.records import Record

PARTITIONS = 4


def fill(servers: str, topic: str, records: int) -> float:
    """Write dead letters as fast as the client can."""
    client = confluent_kafka.Producer({"bootstrap.servers": servers, "linger.ms": 5, "acks": "all"})
    failed = Reply("HTTP 400", "no such order", status=400)
    value, origin = b'"' + b"x" * 98 + b'"', topic.removesuffix(".dlq")
    records_of = [Record(origin, number, 17, 1, b"key", value) for number in range(PARTITIONS)]
    headers: Any = [headers_of(DeadLetter(record, "billing", 5, failed, 1.0, 2.0)) for record in records_of]
    start = time.perf_counter()
    for number in range(records):
        while True:
            try:
                partition = number % PARTITIONS
                client.produce(topic, value, b"k%d" % number, partition, headers=headers[partition])
                break
            except BufferError:
                client.poll(0.01)
        if not number % 1000:
            client.poll(0)
    client.flush()
    return time.perf_counter() - start


def bare(servers: str, source: str, records: int, target: str) -> float:
    """Read dead letters and produce them as they are."""
    common = {"bootstrap.servers": servers}
    reader = confluent_kafka.Consumer({**common, "group.id": "bare", "fetch.queue.backoff.ms": 10})
    reader.assign([confluent_kafka.TopicPartition(source, number, 0) for number in range(PARTITIONS)])
    writer = confluent_kafka.Producer({**common, "linger.ms": 1, "acks": "all", "enable.idempotence": True})
    done, start = 0, 0.0
    while done < records:
        for record in reader.consume(500, 0.1):
            start = start or time.perf_counter()
            writer.produce(target, record.value(), record.key(), record.partition() or 0, headers=record.headers())
            done += 1
        writer.poll(0)
    writer.flush()
    took = time.perf_counter() - start
    reader.close()
    return took


if __name__ == "__main__":
    what, servers, topic, count, *rest = sys.argv[1:]
    elapsed = fill(servers, topic, int(count)) if what == "fill" else bare(servers, topic, int(count), *rest)
    print(json.dumps({"records": int(count), "seconds": elapsed}))
