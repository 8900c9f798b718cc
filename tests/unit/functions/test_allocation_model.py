"""Frames, workers that come and go, and the allocator between them: a model of every frame's place."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DestinationUnavailable
from headrace.functions.allocator import FRAMES_PER_WORKER, Allocator, PartitionWorkers, worker_of_key
from headrace.records import TopicPartition


class Frame:
    """One caller: it takes a worker again when its frame is recalled, or its worker has ended."""

    def __init__(self, model: Model, candidates: Sequence[int]) -> None:
        self.model, self.candidates = model, candidates
        self.worker: int | None = None
        self.left: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.task = asyncio.ensure_future(self.serve())

    async def serve(self) -> str:
        while True:
            self.worker = self.model.pool.take(self.candidates)
            if self.worker is None:
                self.worker = await self.model.pool.acquire(self.candidates)
            if self.worker not in self.model.up:  # it has ended in this instant
                self.worker = None
                continue
            self.left = asyncio.get_running_loop().create_future()
            self.model.held[self.worker].append(self)
            why = await self.left
            self.worker = None
            if why == "ended":
                return why


class Model:
    """Workers with at most two frames each, of which the first is at work."""

    def __init__(self, workers: int) -> None:
        self.pool = Allocator(workers, self.recall)
        self.held: list[deque[Frame]] = [deque() for _ in range(workers)]
        self.up: set[int] = set()
        self.down: set[int] = set()
        self.frames: list[Frame] = []

    def recall(self, worker: int) -> bool:
        """Recall the second frame, which the worker has not begun."""
        if len(self.held[worker]) < 2:
            return False
        self.held[worker].pop().left.set_result("recalled")
        self.pool.frame_ended(worker)
        return True

    def end(self, worker: int) -> None:
        if self.held[worker]:
            self.held[worker].popleft().left.set_result("ended")
            self.pool.frame_ended(worker)

    def lose(self, worker: int, *, down: bool = False) -> None:
        self.up.discard(worker)
        self.down.discard(worker)
        self.pool.starting(worker)
        while self.held[worker]:
            self.held[worker].popleft().left.set_result("lost")
        if down:
            self.down.add(worker)
            self.pool.down(worker, "why")

    def start(self, worker: int) -> None:
        if worker not in self.up:
            self.down.discard(worker)
            self.up.add(worker)
            self.pool.started(worker)

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        for frame in [*self.frames]:
            if frame.task.done():
                self.frames.remove(frame)
                if not frame.task.cancelled() and (error := frame.task.exception()):
                    assert isinstance(error, DestinationUnavailable) and self.down >= set(frame.candidates)
        assert all(len(held) <= FRAMES_PER_WORKER for held in self.held)
        places = [id(frame) for held in self.held for frame in held]
        waiting = [frame for frame in self.frames if id(frame) not in places]
        assert len(places) == len(set(places)), "a frame is at two workers"
        assert self.pool.waiting == len(waiting), "a frame is nowhere"
        idle = {worker for worker in self.up if not self.held[worker]}
        second = [held[1] for held in self.held if len(held) > 1]
        for frame in [*waiting, *second]:
            assert not idle & set(frame.candidates), "it waits although a worker is idle"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["any", "any", "own", "two", "end", "end", "lose", "start", "down", "cancel"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


async def test_a_caller_that_is_cancelled_before_it_sends_takes_no_worker() -> None:
    """Another frame of its worker is taken, sent and recalled in the turn in which the caller got the worker."""
    sent: list[int] = []

    def recall(worker: int) -> bool:
        if worker in sent:
            sent.remove(worker)
            pool.frame_ended(worker)
            return True
        return False

    pool = Allocator(2, recall)
    pool.started(0)
    assert [pool.take([0]), pool.take([0])] == [0, 0]
    waiting = asyncio.ensure_future(pool.acquire([0]))
    await asyncio.sleep(0)
    pool.frame_ended(0)
    pool.frame_ended(0)
    assert pool.take([0, 1]) == 0
    sent.append(0)
    pool.started(1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (sent, pool.idle) == ([], 2)


@given(workers=st.integers(1, 4), steps=STEPS)
def test_no_frame_waits_for_an_idle_worker_and_none_is_lost(workers: int, steps: list[tuple[str, int]]) -> None:
    """With frames of any worker, of one and of two, which share them; at the end each frame has ended."""

    async def run() -> None:
        model = Model(workers)
        for step, number in steps:
            worker = number % workers
            if step in ("any", "own", "two"):
                candidates = {"any": range(workers), "own": (worker,), "two": {worker, (worker + 1) % workers}}[step]
                model.frames.append(Frame(model, tuple(candidates)))
            elif step == "cancel" and model.frames:
                frame = model.frames[number % len(model.frames)]
                if frame.worker is None:  # one that is at a worker ends there
                    frame.task.cancel()
            elif step == "end":
                model.end(worker)
            elif step == "start":
                model.start(worker)
            elif step in ("lose", "down"):
                model.lose(worker, down=step == "down")
            await model.settle()
        for worker in range(workers):
            model.start(worker)
        for _ in range(len(steps) + 1):
            await model.settle()
            for worker in range(workers):
                model.end(worker)
        await model.settle()
        assert model.frames == []

    asyncio.run(run())


PLACES = st.sets(st.builds(TopicPartition, st.sampled_from(["a", "b", "c"]), st.integers(0, 12)), max_size=12)


@given(workers=st.integers(1, 5), steps=st.lists(st.tuples(st.booleans(), PLACES), max_size=30))
def test_assigned_partitions_are_spread_and_stay(workers: int, steps: list[tuple[bool, set[TopicPartition]]]) -> None:
    """A new one never goes to a worker that has its share of the topic, and one that stays never moves."""
    found, assigned = PartitionWorkers(workers), dict[TopicPartition, int]()
    for is_assigned, partitions in steps:
        if not is_assigned:
            found.given_up(partitions)
            for partition in partitions:
                assigned.pop(partition, None)
            continue
        before = Counter((partition.topic, worker) for partition, worker in assigned.items())
        totals = Counter(partition.topic for partition in assigned.keys() | partitions)
        found.assigned(partitions)
        new = {partition: found.worker_of(partition) for partition in partitions - assigned.keys()}
        for (topic, worker), count in Counter((partition.topic, worker) for partition, worker in new.items()).items():
            assert before[topic, worker] + count <= -(-totals[topic] // workers)
        assigned |= new
        assert {partition: found.worker_of(partition) for partition in assigned} == assigned


def test_partitions_and_keys_have_the_same_worker_in_every_process() -> None:
    """Whatever its hash seed is; a partition that returns has its worker again, whose state may still be there."""
    workers, orders = PartitionWorkers(5), [TopicPartition("orders", number) for number in (3, 8)]
    workers.assigned(orders)
    before = [workers.worker_of(partition) for partition in orders]
    assert before[0] == 0 != before[1]
    workers.given_up(orders[1:])
    workers.assigned(orders[1:])
    assert [workers.worker_of(partition) for partition in orders] == before
    assert worker_of_key(b"order-7", orders[0], 4) == worker_of_key(b"order-7", orders[1], 4) == 2
    counts = Counter(worker_of_key(b"%d" % n, orders[0], 4) for n in range(1000))
    assert min(counts.values()) > 150
    assert len({worker_of_key(None, TopicPartition("t", n), 4) for n in range(50)}) == 4
