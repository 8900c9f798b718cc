"""The cluster in memory keeps the contract of a real one."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from headrace.kafka.client import library
from headrace.records import TopicPartition
from headrace_devkit.testing.memory_cluster import MemoryCluster
from headrace_devkit.testing.memory_consumer import MemoryConsumer
from tests.kafka_contract import PROMISES, Clients


@pytest.mark.parametrize("check", PROMISES, ids=lambda check: check.__name__)
async def test_the_cluster_in_memory_keeps(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members get their partitions from the test."""
    cluster = MemoryCluster({"t": 2})
    monkeypatch.setattr(library, "Consumer", functools.partial(MemoryConsumer, cluster))

    async def cut(partition: TopicPartition, before: int) -> None:
        cluster.log(*partition).delete_before(before)

    async def join() -> None:
        cluster.consumers[-1].rebalance("on_assign", TopicPartition("t", 0), TopicPartition("t", 1))

    await check(Clients("t", cluster, cluster, cluster.producer, cluster.producer, cluster.read_records, cut, join))
    assert cluster.consumers == []
