"""What the delivery core costs, without Kafka and without HTTP: tracker, orders, and slow keys among fast ones.

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
KEYS, SLOW_ONE_IN, USUAL_SECONDS, SLOW_SECONDS = 7_500, 100, 0.02, 0.1
"""Keys of each partition, enough that even the slow ones keep up; what a delivery takes, and one with a slow key."""
HELD_RECORDS, CHUNK = 20_000, 500
ROUNDS = 3


class Instant:
    """A source that has everything at once, and a destination that takes a delivery at once, or in some time."""

    def __init__(self, usual_seconds: float, slow_seconds: float) -> None:
        self.usual_seconds, self.slow_seconds = usual_seconds, slow_seconds
        self.held = 0
        self.capacity = asyncio.Event()

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        self.held -= records
        self.capacity.set()

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Nothing is kept."""

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        is_slow = self.slow_seconds and any(RecordBatch.of(delivery.records).timestamps_ms)
        await asyncio.sleep(self.slow_seconds if is_slow else self.usual_seconds)
        return [ACK] * len(delivery.records)

    async def wait_below(self, held: int) -> None:
        while self.held > held:
            self.capacity.clear()
            await self.capacity.wait()


def chunks(records: int) -> list[RecordBatch]:
    """Return portions as a consumer hands them over; slow records are marked by their timestamp."""

    chance = Random(1)

    def make(partition: TopicPartition, offset: int) -> Record:
        key = chance.randrange(KEYS)
        return Record(*partition, offset, int(not key % SLOW_ONE_IN), b"%d" % key, b"v" * 100, size_bytes=105)

    each = records // len(PARTITIONS)
    starts = range(0, each - CHUNK + 1, CHUNK)
    return [RecordBatch.of([make(p, offset) for offset in range(at, at + CHUNK)]) for at in starts for p in PARTITIONS]


async def pump(portions: list[RecordBatch], usual: float = 0, slow: float = 0, **settings: Any) -> tuple[float, float]:
    """Return records per second through a pump, and seconds of the processor per record, once it is warm."""
    instant = Instant(usual, slow)
    batch = BatchConfig(max_records=settings.pop("per_delivery", 100))
    work = Pump("bench", "g", instant, None, delivery=DeliveryConfig(batch=batch, **settings), clock=SystemClock())
    work.connect(instant)
    await work.start()
    work.on_assigned(dict.fromkeys(PARTITIONS, 1), {})
    warm = len(portions) // 2
    for number, portion in enumerate(portions):
        if number == warm:
            start, cpu = time.perf_counter(), time.process_time()
        await instant.wait_below(HELD_RECORDS - CHUNK)
        instant.held += CHUNK
        work.on_records(portion.topic_partition, 1, portion)
        await asyncio.sleep(0)
    await instant.wait_below(0)
    records = (len(portions) - warm) * CHUNK
    found = records / (time.perf_counter() - start), (time.process_time() - cpu) / records
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

    def through(*seconds: float, **settings: Any) -> tuple[float, float]:
        return uvloop.run(pump(portions, *seconds, **settings))

    def by_key(slow: float) -> float:
        return through(USUAL_SECONDS, slow, ordering="key")[0]

    def cost(**settings: Any) -> float:
        return statistics.median([through(**settings)[1] for _ in range(ROUNDS)])

    in_portions = statistics.median([tracker(records) for _ in range(ROUNDS)])
    one_by_one = statistics.median([single_tracker(records) for _ in range(ROUNDS)])
    pairs = [(by_key(SLOW_SECONDS), by_key(0)) for _ in range(ROUNDS)]
    slow, fast = (statistics.median(rates) for rates in zip(*pairs, strict=True))
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
        "",
        f"Order `key`, a backend that takes {1000 * USUAL_SECONDS:.0f} ms, or {1000 * SLOW_SECONDS:.0f} ms when one of "
        f"1 % slow keys is in the delivery: {slow:,.0f} rec/s, **{slow / fast:.2f}** of the {fast:,.0f} rec/s without "
        "slow keys (target >= 0.8).",
    ]


class CoreTable:
    """Measures in a process of its own, and prints the results."""

    title = "The delivery core"
    text = "No Kafka and no HTTP: medians of three runs, the second half of each, when slow keys are known."

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def measure(self) -> None:
        self.found: list[str] = self.bench.module("bench.core", str(2 * self.bench.records))["lines"]

    def lines(self) -> list[str]:
        return self.found


if __name__ == "__main__":
    print(json.dumps({"lines": lines(int(sys.argv[1]))}))
