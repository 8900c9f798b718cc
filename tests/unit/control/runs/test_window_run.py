"""A window as the source of a pump: what is read, held, paced and told, without Kafka and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest

from headrace.config.consumers import BatchConfig, DeliveryConfig, FlowControl
from headrace.control.runs.window_run import Limits, Progress, Run, WindowSource
from headrace.delivery.outcomes import ACK, DeadLetter, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import PumpHooks
from headrace.errors import KafkaError, KafkaUnavailable
from headrace.records import Committed, Record, TopicPartition
from headrace.runtime import Deadline
from headrace.testing import ManualClock

P = TopicPartition("t", 0)


class World:
    """A log with holes, a destination that notes what it gets, and what may go wrong between."""

    def __init__(self, offsets: Sequence[int], **settings: Any) -> None:
        self.log = {offset: Record("t", 0, offset, 7, None, b"v", size_bytes=1) for offset in offsets}
        self.start = 0
        self.errors: list[Exception] = []
        self.reads: list[int] = []
        self.seen: list[int] = []
        self.replays: set[str] = set()
        self.response: Callable[[Record], Reply] = lambda record: ACK
        self.letters: list[DeadLetter] = []
        self.clock = ManualClock(1000.0)
        self.delivery = DeliveryConfig(batch=BatchConfig(max_records=10), **settings)

    async def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[list[Record], None]:
        self.reads.append(starts[P])
        if self.errors:
            raise self.errors.pop(0)
        wanted = [self.log[offset] for offset in sorted(self.log) if starts[P] <= offset < ends[P]]
        for n in range(0, len(wanted), 7):
            yield wanted[n : n + 7]

    async def start_offsets(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        return {P: self.start}

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.seen += [record.offset for record in delivery.records]
        self.replays.add(delivery.replay)
        return [self.response(record) for record in delivery.records]

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        self.letters += letters

    async def open(
        self, start: Committed, end: int, rate: float | None = None, most: int = 1000
    ) -> tuple[Pump, WindowSource]:
        pump, source = self.make(start, end, rate, most)
        await pump.start()
        await source.start()
        return pump, source

    def make(
        self, start: Committed, end: int, rate: float | None = None, most: int = 1000
    ) -> tuple[Pump, WindowSource]:
        hooks = PumpHooks(replay="job-1")
        pump = Pump("p", "g", self, self, delivery=self.delivery, clock=self.clock, chance=Random(1), hooks=hooks)
        source = WindowSource(
            pump,
            {P: start},
            {P: end},
            read=self.read,
            start_offsets=self.start_offsets,
            limits=Limits(FlowControl(max_records=1000), most, rate),
            clock=self.clock,
        )
        return pump, source

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            await self.clock.advance(0.2)
        raise AssertionError("it never came")


async def close(*services: Any) -> None:
    for service in services:
        await service.stop()


async def test_a_window_is_delivered_in_order_and_no_further() -> None:
    """Each record once, with the job's id; a position is behind holes too."""
    world = World([0, 1, 2, 5, 6, 9, 10, 11])
    pump, source = await world.open(Committed(1), 10)
    await world.until(lambda: source.finished)
    assert (world.seen, world.replays) == ([1, 2, 5, 6, 9], {"job-1"})
    assert (source.progress.completed, source.progress.positions) == (5, {P: Committed(10)})
    await close(source, pump)


async def test_a_window_without_any_record_ends() -> None:
    """All of it may have been removed from the log meanwhile."""
    world = World([])
    pump, source = await world.open(Committed(0), 10)
    await world.until(lambda: source.finished)
    assert world.seen == []
    await close(source, pump)


async def test_what_had_ended_in_an_earlier_run_is_not_delivered_again() -> None:
    """The map beside the position says so, as it does for a group; and numbers of both runs are one."""
    world = World(
        range(20), ordering="none", retry={"attempts": 2, "first_delay_seconds": 600, "max_delay_seconds": 600}
    )
    world.response = lambda record: ACK if record.offset != 3 else Reply("E")
    pump, source = await world.open(Committed(0), 20)
    await world.until(lambda: source.progress.completed == 19)
    await source.close(Deadline(world.clock, 0))
    progress = source.progress
    assert progress.positions[P].offset == 3
    await close(source, pump)

    world.seen, world.response = [], lambda record: ACK
    pump, source = await world.open(progress.positions[P], 20)
    await world.until(lambda: source.finished)
    assert world.seen == [3]
    assert progress.counts["delivered"] + source.progress.counts["delivered"] == 20
    await close(source, pump)


async def test_no_more_is_held_than_a_kill_may_repeat() -> None:
    """Records that ended count until that is written down; so the number of repeats is known before."""
    world = World(range(100))
    pump, source = await world.open(Committed(0), 100, most=30)
    before = source.progress
    await world.clock.advance(60)
    assert world.seen == list(range(28))  # it is read in sevens
    source.saved(before)  # which took so long
    assert source.unsaved == 28
    source.saved(source.progress)
    await world.clock.advance(60)
    assert len(world.seen) == 56
    await close(source, pump)


async def test_a_run_has_ended_only_when_that_is_saved() -> None:
    """What was not written is written again."""
    world, saves = World([0, 1]), list[int]()

    async def save(progress: Progress) -> bool:
        saves.append(progress.completed)
        return len(saves) > 1

    pump, source = world.make(Committed(0), 10)
    running = asyncio.ensure_future(Run(world.clock).deliver(pump, source, save, asyncio.Event()))
    await world.clock.advance(1)
    assert await asyncio.wait_for(running, 10)
    assert (saves, source.unsaved) == ([2, 2], 0)


async def test_the_rate_holds_from_the_first_second_on() -> None:
    """Neither a burst at the start nor one after a pause."""
    world = World(range(1000))
    pump, source = await world.open(Committed(0), 1000, rate=20)
    times = []
    for _ in range(10):
        before = len(world.seen)
        await world.clock.advance(1)
        times.append(len(world.seen) - before)
    assert all(18 <= count <= 22 for count in times)
    await close(source, pump)


async def test_a_broker_that_does_not_response_and_a_log_that_moved_on_are_passed() -> None:
    """Retention may take what was to be read next; an error that says nothing new ends the replay."""
    world = World(range(10, 20))
    world.start = 10
    world.errors = [KafkaError("out of range"), KafkaUnavailable("no broker")]
    pump, source = await world.open(Committed(5), 20)
    await world.until(lambda: source.finished)
    assert world.reads[-1] == 10
    assert world.seen == list(range(10, 20))
    await close(source, pump)

    world.errors = [KafkaError("not yours")]
    pump, source = await world.open(Committed(15), 20)
    await world.until(lambda: source.death is not None)
    assert str(source.death) == "not yours"
    await close(source, pump)


async def test_a_window_that_is_not_read_any_further_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A partition without a leader, or one that was cut off before the end of the window, sends no error either."""
    world, stop = World([0, 1]), asyncio.Event()
    every = world.read

    async def read(starts: Any, ends: Any) -> AsyncGenerator[list[Record], None]:
        async for batch in every(starts, ends):
            yield batch
        await asyncio.Event().wait()

    async def save(progress: Progress) -> bool:
        return True

    world.read = read  # type: ignore[method-assign]
    pump, source = world.make(Committed(0), 10)
    running = asyncio.ensure_future(Run(world.clock).deliver(pump, source, save, stop))
    for moved, said in ((29.0, 0), (2.0, 1), (28.0, 1), (3.0, 2)):
        await world.clock.advance(moved)
        await asyncio.sleep(0.3)  # the run looks five times in a second of real time
        assert caplog.text.count("no records received for 30 s") == said
    stop.set()
    assert not await running


async def test_two_pumps_know_the_same_of_their_destination() -> None:
    """A replay finds out with the group that the backend is down; and is forgotten when it is over."""
    world = World(range(3))
    live = Pump("live", "g", world, world, delivery=world.delivery, clock=world.clock, chance=Random(1))
    beside = Pump("p", "g", world, world, delivery=world.delivery, clock=world.clock, shares_with=live)
    assert beside.breaker is live.breaker
    sharing = len(live.breaker.limit._users)
    await beside.start()
    await close(beside)
    assert len(live.breaker.limit._users) == sharing - 1
