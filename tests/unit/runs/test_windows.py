from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.consumers.lag import lag_of
from headrace.errors import KafkaUnavailable
from headrace.kafka import read_window, reader
from headrace.kafka.reader import ReadPart
from headrace.records import Committed, TopicPartition
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.testing.memory_cluster import MemoryCluster

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


def cluster() -> Any:
    """Partition 0 holds 5 to 9, with an open transaction behind; partition 1 is empty; the group `g` is at 8."""
    made = MemoryCluster({"t": 2})
    log = made.log(*P0)
    log.start, log.end = 5, 10
    log.append([UnwrittenRecord()] * 2, producer_id=1)
    made.commit("g", {P0: Committed(8)})
    return made


def test_reading_that_falls_silent_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that stops answering does not hold a command for ever; aborted records that arrive are no silence."""
    fetched: list[int] = []

    async def silent(*_: object) -> AsyncGenerator[ReadPart, None]:
        for _ in range(5):
            fetched.append(1)
            yield ReadPart([], {}, has_fetched=True)
            await asyncio.sleep(0.03)
        while True:
            yield ReadPart([], {})
            await asyncio.sleep(0)

    async def read() -> int:
        return len([batch async for batch in read_window(KafkaConfig(), {P0: 0}, {P0: 1})])

    monkeypatch.setattr(reader, "_read_parts", silent)
    monkeypatch.setattr(reader, "_SILENT_SECONDS", 0.1)
    with pytest.raises(KafkaUnavailable, match="no records from Kafka"):
        asyncio.run(read())
    assert len(fetched) == 5


def test_lag_covers_partitions_without_a_committed_offset() -> None:
    """They count from their first record, also in a group that has committed nothing and reads a topic."""
    found = asyncio.run(lag_of(cluster(), "g"))
    assert [(entry.partition, entry.committed, entry.end, entry.lag, entry.written) for entry in found] == [
        (P0, 8, 10, 2, 12),
        (P1, None, 0, 0, 0),
    ]
    found = asyncio.run(lag_of(cluster(), "new", ["t", "gone"]))
    assert [(entry.partition, entry.committed, entry.lag) for entry in found] == [(P0, None, 5), (P1, None, 0)]
