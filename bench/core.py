"""What the delivery core costs, without Kafka and without HTTP: the tracker and the orders.

usage: python -m bench.core RECORDS
Prints the table in JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import uvloop

from bench.environment import Bench
from headrace.config.consumers import BatchConfig, DeliveryConfig
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.delivery.tracker import AckTracker
from headrace.records import Committed, Record, RecordBatch, TopicPartition
from headrace.runtime import SystemClock

PARTITIONS = [TopicPartition("t", number) for number in range(8)]
KEYS = 7_500
"""Keys of each partition."""
HELD_RECORDS, CHUNK = 20_000, 500
ROUNDS = 3


class Instant:
    """A source that has everything at once, and a destination that takes a delivery at once."""

    def __init__(self) -> None:
        self.held = 0
        self.capacity = asyncio.Event()

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        self.held -= records
        self.capacity.set()

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Nothing is kept."""

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        await asyncio.sleep(0)
        return [ACK] * len(delivery.records)

    async def wait_below(self, held: int) -> None:
        while self.held > held:
            self.capacity.clear()
            await self.capacity.wait()


def chunks(records: int) -> list[RecordBatch]:
    """Return portions as a consumer hands them over."""
    chance = Random(1)

    def make(partition: TopicPartition, offset: int) -> Record:
        return Record(*partition, offset, 0, b"%d" % chance.randrange(KEYS), b"v" * 100, size_bytes=105)

    each = records // len(PARTITIONS)
    starts = range(0, each - CHUNK + 1, CHUNK)
    return [RecordBatch.of([make(p, offset) for offset in range(at, at + CHUNK)]) for at in starts for p in PARTITIONS]


async def pump(portions: list[RecordBatch], **settings: Any) -> float:
    """Return the seconds of the processor that a record costs in a pump, once it is warm."""
    instant = Instant()
    batch = BatchConfig(max_records=settings.pop("per_delivery", 100))
    work = Pump("bench", "g", instant, None, delivery=DeliveryConfig(batch=batch, **settings), clock=SystemClock())
    work.connect(instant)
    await work.start()
    work.on_assigned(dict.fromkeys(PARTITIONS, 1), {})
    warm = len(portions) // 2
    for number, portion in enumerate(portions):
        if number == warm:
            cpu = time.process_time()
        await instant.wait_below(HELD_RECORDS - CHUNK)
        instant.held += CHUNK
        work.on_records(portion.topic_partition, 1, portion)
        await asyncio.sleep(0)
    await instant.wait_below(0)
    found = (time.process_time() - cpu) / ((len(portions) - warm) * CHUNK)
    await work.stop()
    return found


def tracker(records: int) -> float:
    """Return seconds of the processor per record to track its arrival and its end, in portions of 100."""
    track, offsets = AckTracker(1), list(range(records))
    start = time.process_time()
    for at in range(0, records, CHUNK):
        track.delivered(offsets[at : at + CHUNK])
        for first in range(at, at + CHUNK, 100):
            track.done(offsets[first : first + 100], 1)
        assert track.commit
    return (time.process_time() - start) / records


def single_tracker(records: int) -> float:
    """The same when records end one by one, every other one late."""
    track, offsets = AckTracker(1), list(range(records))
    start = time.process_time()
    for at in range(0, records, CHUNK):
        track.delivered(offsets[at : at + CHUNK])
        for offset in (*offsets[at : at + CHUNK : 2], *offsets[at + 1 : at + CHUNK : 2]):
            track.done([offset], 1)
    return (time.process_time() - start) / records


def lines(records: int) -> list[str]:
    """Measure and return the table."""
    portions = chunks(records)

    def cost(**settings: Any) -> float:
        return statistics.median([uvloop.run(pump(portions, **settings)) for _ in range(ROUNDS)])

    in_portions = statistics.median([tracker(records) for _ in range(ROUNDS)])
    one_by_one = statistics.median([single_tracker(records) for _ in range(ROUNDS)])
    rows = [
        ("tracker, records end in portions of 100", in_portions, "<= 1 us"),
        ("tracker, records end one by one, every other one late", one_by_one, ""),
        *(
            (f"all of the core, order `{o}`, 100 per delivery", cost(ordering=o), "")
            for o in ("partition", "key", "none")
        ),
        ("all of the core, order `none`, 1 per delivery", cost(ordering="none", per_delivery=1), ""),
    ]
    return [
        "| the delivery core alone | processor time per record | target |",
        "|---|---|---|",
        *(f"| {name} | **{1e6 * seconds:.2f} us** | {target} |" for name, seconds, target in rows),
    ]


class CoreTable:
    """Measures in a process of its own, and prints the results."""

    title = "The delivery core"
    text = "No Kafka and no HTTP: medians of three runs, the second half of each."

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def measure(self) -> None:
        self.found: list[str] = self.bench.module("bench.core", str(2 * self.bench.records))["lines"]

    def lines(self) -> list[str]:
        return self.found


if __name__ == "__main__":
    print(json.dumps({"lines": lines(int(sys.argv[1]))}))
