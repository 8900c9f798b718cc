"""Who gets which worker."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from headrace.errors import DestinationUnavailable
from headrace.functions.allocator import Allocator
from headrace.records import TopicPartition

P = TopicPartition("t", 0)


async def test_pool_gives_the_first_free_worker_and_then_makes_callers_wait_in_turn() -> None:
    """Who waits longest comes first."""
    pool = Allocator(2)
    pool.free(1)
    pool.free(0)
    assert [await pool.acquire(P), await pool.acquire(P)] == [1, 0]
    first, second = asyncio.ensure_future(pool.acquire(P)), asyncio.ensure_future(pool.acquire(P))
    await asyncio.sleep(0)
    assert pool.waiting == 2
    pool.free(0)
    assert await first == 0
    pool.free(1)
    assert await second == 1


async def test_a_cancelled_caller_loses_no_worker() -> None:
    """Neither while it waits nor in the instant after it was given one."""
    pool = Allocator(1)
    waits = asyncio.ensure_future(pool.acquire(P))
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.wait([waits])
    assert pool.waiting == 0
    given = asyncio.ensure_future(pool.acquire(P))
    await asyncio.sleep(0)
    pool.free(0)
    given.cancel()
    await asyncio.wait([given])
    assert await asyncio.wait_for(pool.acquire(P), 1) == 0


async def test_a_worker_that_died_is_not_given_back_by_a_cancelled_caller() -> None:
    """A dead worker becomes free only when its replacement is up."""
    pool = Allocator(1)
    given = asyncio.ensure_future(pool.acquire(P))
    await asyncio.sleep(0)
    pool.free(0)
    pool.starting(0)
    given.cancel()
    await asyncio.wait([given])
    waits = asyncio.ensure_future(pool.acquire(P))
    await asyncio.sleep(0)
    assert not waits.done()
    pool.free(0)
    assert await waits == 0


async def test_callers_are_refused_only_while_every_worker_is_down() -> None:
    """Those that wait, too; a worker on its way up is waited for."""
    pool = Allocator(2)
    waits = asyncio.ensure_future(pool.acquire(P))
    await asyncio.sleep(0)
    pool.down(0, "no module")
    await asyncio.sleep(0)
    assert not waits.done()
    pool.down(1, "no module")
    with pytest.raises(DestinationUnavailable, match="no module"):
        await waits
    with pytest.raises(DestinationUnavailable, match="no module"):
        await pool.acquire(P)
    pool.starting(1)
    waits = asyncio.ensure_future(pool.acquire(P))
    await asyncio.sleep(0)
    pool.free(1)
    assert await waits == 1


async def test_a_free_worker_that_dies_is_not_given_out() -> None:
    """It is out of the pool until it is free again."""
    pool = Allocator(2)
    pool.free(0)
    pool.free(1)
    pool.starting(0)
    assert await pool.acquire(P) == 1


async def test_static_keeps_a_partition_at_its_worker() -> None:
    """Whatever else is free."""
    static = Allocator(4, static=True)
    for worker in range(4):
        static.free(worker)
    expected = await worker_of(static, P)
    for _ in range(3):
        assert await static.acquire(P) == expected
        static.free(expected)
    waits = [asyncio.ensure_future(static.acquire(P)) for _ in range(2)]
    await asyncio.sleep(0)
    assert [wait.done() for wait in waits] == [True, False]
    static.down(expected, "gone")
    with pytest.raises(DestinationUnavailable):
        await waits[1]


async def worker_of(static: Allocator, partition: TopicPartition) -> int:
    """Take a partition's worker and give it back."""
    worker = await static.acquire(partition)
    static.free(worker)
    return worker


def workers_of(count: int, *partitions: TopicPartition) -> list[int]:
    async def run() -> list[int]:
        static = Allocator(count, static=True)
        for worker in range(count):
            static.free(worker)
        return [await worker_of(static, partition) for partition in partitions]

    return asyncio.run(run())


def test_static_spreads_partitions_and_one_partition_topics() -> None:
    """Partitions of a topic go round evenly, and many topics do not pile up on worker 0."""
    assert set(Counter(workers_of(4, *(TopicPartition("t", p) for p in range(16)))).values()) == {4}
    assert len(set(workers_of(4, *(TopicPartition(f"topic-{n}", 0) for n in range(20))))) == 4


def test_static_is_the_same_in_every_process() -> None:
    """The mapping does not depend on a process's hash seed."""
    assert workers_of(5, TopicPartition("orders", 3)) == [0]
