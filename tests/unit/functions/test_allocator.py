"""Which worker gets the next frame, and which one a partition or a key always has."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DestinationUnavailable
from headrace.functions.allocator import FRAMES_PER_WORKER, Allocator, PartitionWorkers, worker_of_key
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


async def test_a_cancelled_caller_loses_no_worker() -> None:
    """Neither while it waits nor in the instant after it was given one."""
    pool = Allocator(1)
    waits = await waits_for(pool, 0)
    waits.cancel()
    await asyncio.wait([waits])
    assert pool.waiting == 0
    given_one = await waits_for(pool, 0)
    pool.started(0)
    given_one.cancel()
    await asyncio.wait([given_one])
    assert [await asyncio.wait_for(pool.acquire((0,)), 1) for _ in range(FRAMES_PER_WORKER)] == [0, 0]


async def test_a_worker_that_died_is_given_to_callers_when_its_replacement_is_up() -> None:
    """Also if a caller that was given it is cancelled."""
    pool = Allocator(1)
    given_one = await waits_for(pool, 0)
    pool.started(0)
    pool.lost(0)
    given_one.cancel()
    await asyncio.wait([given_one])
    waits = await waits_for(pool, 0)
    assert not waits.done()
    pool.started(0)
    assert await waits == 0


async def test_callers_are_refused_only_while_every_worker_is_down() -> None:
    """Those that wait, too; a worker on its way up is waited for."""
    pool = Allocator(2)
    waits = await waits_for(pool, 0, 1)
    pool.down(0, "no module")
    await asyncio.sleep(0)
    assert not waits.done()
    pool.down(1, "no module")
    with pytest.raises(DestinationUnavailable, match="no module"):
        await waits
    with pytest.raises(DestinationUnavailable, match="no module"):
        await pool.acquire((0, 1))
    pool.starting(1)
    waits = await waits_for(pool, 0, 1)
    pool.started(1)
    assert await waits == 1


async def test_a_second_frame_is_taken_back_for_a_worker_that_is_idle() -> None:
    """Only if nothing waits, and only a frame that the idle worker may serve."""
    taken: list[int] = []

    def take_back(worker: int) -> bool:
        taken.append(worker)
        pool.frame_ended(worker)
        return True

    pool = Allocator(2, take_back)
    pool.started(0)
    assert [await pool.acquire((0, 1)), await pool.acquire((0,))] == [0, 0]
    pool.started(1)
    assert taken == [], "worker 1 may not serve the second frame"
    pool.frame_ended(0)
    pool.frame_ended(0)
    assert [await pool.acquire((0, 1)) for _ in range(4)] == [0, 1, 0, 1]
    waits = await waits_for(pool, 0, 1)
    pool.frame_ended(1)
    assert await waits == 1
    assert taken == []
    pool.frame_ended(1)
    pool.frame_ended(1)
    assert taken == [0]


STEPS = st.lists(
    st.tuples(st.sampled_from(["acquire", "static", "end", "cancel", "lost", "started", "down"]), st.integers(0, 5)),
    max_size=60,
)


@given(workers=st.integers(1, 4), steps=STEPS)
def test_the_allocator_agrees_with_its_rules(workers: int, steps: list[tuple[str, int]]) -> None:
    """After each step: at most two frames each, none waits for a worker that is free, each is refused or served."""

    async def run() -> None:
        pool, up, down = Allocator(workers), set[int](), set[int]()
        held: Counter[int] = Counter()
        waiting: list[tuple[tuple[int, ...], asyncio.Task[int]]] = []

        async def settle() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for candidates, task in [*waiting]:
                if task.done():
                    waiting.remove((candidates, task))
                    if task.exception():
                        assert down >= set(candidates)
                        continue
                    idle = [n for n in candidates if n in up and not held[n]]
                    assert task.result() in candidates and task.result() in up
                    assert not held[task.result()] or not idle, "a worker is idle"
                    held[task.result()] += 1
            assert all(count <= FRAMES_PER_WORKER for count in held.values())
            for candidates, _ in waiting:
                assert not down >= set(candidates), "it should be refused"
                assert all(n not in up or held[n] == FRAMES_PER_WORKER for n in candidates), "a worker is free"
            assert pool.waiting == len(waiting)

        for step, number in steps:
            worker = number % workers
            if step in ("acquire", "static"):
                candidates = tuple(range(workers)) if step == "acquire" else (worker,)
                waiting.append((candidates, asyncio.ensure_future(pool.acquire(candidates))))
            elif step == "end" and held[worker]:
                held[worker] -= 1
                pool.frame_ended(worker)
            elif step == "cancel" and waiting:
                _, task = waiting.pop(number % len(waiting))
                task.cancel()
                await asyncio.wait([task])
            elif step in ("lost", "down"):
                up.discard(worker)
                down.discard(worker)
                held[worker] = 0
                pool.starting(worker)
                if step == "down":
                    down.add(worker)
                    pool.down(worker, "why")
            elif step == "started" and worker not in up:
                up.add(worker)
                down.discard(worker)
                held[worker] = 0
                pool.started(worker)
            await settle()
        for _, task in waiting:
            task.cancel()

    asyncio.run(run())


PARTITIONS = st.sets(st.builds(TopicPartition, st.sampled_from(["a", "b"]), st.integers(0, 9)), max_size=8)


@given(workers=st.integers(1, 5), steps=st.lists(st.tuples(st.booleans(), PARTITIONS), max_size=20))
def test_a_partition_keeps_its_worker_while_it_is_assigned(
    workers: int, steps: list[tuple[bool, set[TopicPartition]]]
) -> None:
    """Whatever else is assigned or given up; and no worker is given more than its share of a topic."""
    found, assigned = PartitionWorkers(workers), dict[TopicPartition, int]()
    for is_assigned, partitions in steps:
        new = partitions - assigned.keys() if is_assigned else set()
        if is_assigned:
            found.assigned(partitions)
            for partition in new:
                assigned[partition] = found.worker_of(partition)
        else:
            found.given_up(partitions)
            for partition in partitions:
                assigned.pop(partition, None)
        for topic in ("a", "b"):
            mine = {each: worker for each, worker in assigned.items() if each.topic == topic}
            if mine and mine.keys() <= new:
                loads = Counter(mine.values())
                assert max(loads.values()) <= -(-len(mine) // workers)
        assert {each: found.worker_of(each) for each in assigned} == assigned


def workers_of(count: int, *partitions: TopicPartition) -> list[int]:
    found = PartitionWorkers(count)
    found.assigned(partitions)
    return [found.worker_of(partition) for partition in partitions]


@pytest.mark.parametrize("step", [1, 2, 4])
def test_static_spreads_the_partitions_that_are_assigned(step: int) -> None:
    """All of a topic, or every second one, as a group of several processes has them."""
    partitions = [TopicPartition("t", number) for number in range(0, 16, step)]
    assert set(Counter(workers_of(4, *partitions)).values()) == {len(partitions) // 4}


def test_static_spreads_topics_of_one_partition() -> None:
    """They do not pile up on worker 0."""
    assert len(set(workers_of(4, *(TopicPartition(f"topic-{n}", 0) for n in range(20))))) == 4


def test_static_is_the_same_in_every_process() -> None:
    """The mapping does not depend on a process's hash seed."""
    assert workers_of(5, TopicPartition("orders", 3)) == [0]


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
