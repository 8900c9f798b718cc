"""Which worker gets the next frame, and which one a partition or a key always has."""

from __future__ import annotations

import asyncio
from collections import Counter

from headrace.functions.allocator import Allocator, PartitionWorkers, worker_of_key
from headrace.records import TopicPartition


async def waits_for(pool: Allocator, *candidates: int) -> asyncio.Task[int]:
    """Ask for a worker, and return once the allocator knows of it."""
    task = asyncio.ensure_future(pool.acquire(candidates))
    await asyncio.sleep(0)
    return task


async def test_a_busy_worker_gets_a_second_frame_only_while_no_other_is_idle() -> None:
    """And no third one; callers wait in turn."""
    pool = Allocator(2)
    pool.started(1)
    pool.started(0)
    assert [await pool.acquire((0, 1)) for _ in range(4)] == [1, 0, 1, 0]
    first, second = await waits_for(pool, 0, 1), await waits_for(pool, 0, 1)
    assert pool.waiting == 2
    pool.frame_ended(0)
    assert await first == 0
    assert not second.done()
    pool.frame_ended(1)
    assert await second == 1


def test_static_is_the_same_in_every_process() -> None:
    """The mapping does not depend on a process's hash seed."""
    found = PartitionWorkers(5)
    found.assigned([TopicPartition("orders", 3)])
    assert found.worker_of(TopicPartition("orders", 3)) == 0


def test_a_partition_that_returns_has_its_worker_again() -> None:
    """Its state may still be there."""
    found = PartitionWorkers(2)
    found.assigned([TopicPartition("t", 0), TopicPartition("t", 2)])
    before = [found.worker_of(TopicPartition("t", number)) for number in (0, 2)]
    assert before[0] != before[1]
    found.given_up([TopicPartition("t", 2)])
    found.assigned([TopicPartition("t", 2)])
    assert [found.worker_of(TopicPartition("t", number)) for number in (0, 2)] == before


def test_a_key_always_has_the_same_worker() -> None:
    """In every process; keys spread, and records without one go by their partition."""
    partition = TopicPartition("t", 0)
    assert worker_of_key(b"order-7", partition, 4) == worker_of_key(b"order-7", TopicPartition("t", 5), 4) == 2
    counts = Counter(worker_of_key(b"%d" % n, partition, 4) for n in range(1000))
    assert min(counts.values()) > 150
    assert len({worker_of_key(None, TopicPartition("t", n), 4) for n in range(50)}) == 4
