"""Ten million records through the compiled module, each way: nothing is kept of them."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.kafka.client.native import native_module
from headrace.records import OutgoingRecord
from headrace_devkit.testing import Cluster, MakeTopic

module: Any = native_module(KafkaConfig())
pytestmark = [pytest.mark.long, pytest.mark.skipif(module is None, reason="the compiled module was not built here")]
RECORDS, PARTITIONS, EACH = 10_000_000, 4, 1000
MOST_WAITING = 50_000
MOST_BATCHES = MOST_WAITING // EACH
WARM = RECORDS // 5
MOST_GROWTH_BYTES = 8 * RECORDS
"""Half of the smallest object per record. What a consumer has fetched ahead varies by some tens of megabytes."""


class Growth:
    """What the process gets between the first fifth of the records and the end."""

    def __init__(self, *kept: object) -> None:
        self._kept = kept
        self._first: Any = None

    def look(self, records: int) -> None:
        if self._first is None and records >= WARM:
            self._first = self._now()

    def _now(self) -> Any:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        references = [sys.getrefcount(each) for each in self._kept]
        return pages * os.sysconf("SC_PAGE_SIZE"), len([*Path("/proc/self/fd").iterdir()]), references

    def check(self) -> None:
        assert self._first
        (before, descriptors, references), (after, *now) = self._first, self._now()
        assert now[0] == descriptors
        assert [new - old for new, old in zip(now[1], references, strict=True) if abs(new - old) > MOST_BATCHES] == []
        assert after - before < MOST_GROWTH_BYTES


def written(producer: Any, request: object, records: list[OutgoingRecord], look: Callable[[int], None]) -> int:
    """Write all records; return how many are reported as written."""
    readable = select.poll()
    readable.register(producer.fileno(), select.POLLIN)
    taken = reported = 0
    while reported < RECORDS:
        while taken < RECORDS and taken - reported < MOST_WAITING:
            assert producer.produce(request, records, taken, False) is None
            taken += EACH
        readable.poll(1000)
        more = True
        while more:
            completed, _, more = producer.drain(4000)
            for _, _, count, found in completed:
                assert type(found) is bytes
                reported += count
        look(reported)
    return reported


def test_ten_million_records_leave_nothing(kafka: Cluster, topic: MakeTopic) -> None:
    """References, descriptors and memory are those of the first fifth, for a producer and then for a consumer."""
    name, header = topic(PARTITIONS), ("h", b"1")
    records = [OutgoingRecord(name, b"k", b"v" * 10, [header], n % PARTITIONS) for n in range(EACH)]
    properties = {"compression.type": "lz4", "linger.ms": "5", "log.queue": "true", "log_level": "0"}
    producer, request = module.Producer({**properties, "bootstrap.servers": kafka.bootstrap_servers}), object()
    growth = Growth(request, records, records[0], records[0].key, records[0].value, records[0].headers, header)
    assert written(producer, request, records, growth.look) == RECORDS
    growth.check()
    producer.close()

    limits = {"queued.max.messages.kbytes": 16_384, "auto.offset.reset": "error", "group.id": "g"}
    client = confluent_kafka.Consumer({**limits, "bootstrap.servers": kafka.bootstrap_servers})
    queue, growth = module.FetchQueue(client), Growth(client)
    places = [confluent_kafka.TopicPartition(name, number, 0) for number in range(PARTITIONS)]
    client.incremental_assign(places)
    for place in places:
        queue.forward(name, place.partition)
    ends = [0] * PARTITIONS
    while sum(ends) < RECORDS:
        client.poll(0)
        for code, _, partition, _, offsets, _, keys, values, headers, sizes in queue.consume(2000, 1):
            assert (code, offsets[0], offsets[-1]) == (0, ends[partition], ends[partition] + len(offsets) - 1)
            assert (keys[-1], values[0], headers[-1], sizes[0]) == (b"k", b"v" * 10, [header], 11)
            ends[partition] += len(offsets)
        growth.look(sum(ends))
    growth.check()
    queue.close()
    client.close()
