"""A window as the source of a pump: what is read, held and paced, without Kafka and in virtual time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.config.consumers import DeliveryConfig, FlowControl
from headrace.delivery.pump import Pump
from headrace.errors import KafkaError, KafkaUnavailable
from headrace.records import Committed, Record, TopicPartition
from headrace.runs.window_run import Limits, WindowSource
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.pump_harness import P0, Harness


class WindowHarness(Harness):
    """A log with holes, and a pump that delivers windows of it."""

    def __init__(self, offsets: Iterable[int], **given: Any) -> None:
        hooks = {"replay": "job-1"}
        super().__init__(max_records=10, clock=ManualClock(1000.0), hooks=hooks, **given)
        self.log = {offset: Record(*P0, offset, 7, None, b"v", size_bytes=1) for offset in offsets}
        self.start = 0
        self.errors: list[Exception] = []
        self.reads: list[int] = []

    @property
    def seen(self) -> list[int]:
        return [offset for offsets in self.delivered for offset in offsets]

    async def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[list[Record], None]:
        self.reads.append(starts[P0])
        if self.errors:
            raise self.errors.pop(0)
        wanted = [self.log[offset] for offset in sorted(self.log) if starts[P0] <= offset < ends[P0]]
        for n in range(0, len(wanted), 7):
            yield wanted[n : n + 7]

    async def start_offsets(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        return {P0: self.start}

    def make(self, start: Committed, end: int, rate: float | None = None, most: int = 1000) -> WindowSource:
        limits = Limits(FlowControl(max_records=1000), most, rate)
        reading: Any = {"read": self.read, "start_offsets": self.start_offsets}
        return WindowSource(self.pump, {P0: start}, {P0: end}, limits=limits, clock=self.clock, **reading)

    @asynccontextmanager
    async def deliver_window(self, start: Committed, end: int, **more: Any) -> AsyncIterator[WindowSource]:
        source = self.make(start, end, **more)
        await self.pump.start()
        await source.start()
        yield source
        await source.stop()
        await self.pump.stop()

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            await self.clock.advance(0.2)
        raise AssertionError("the condition was not reached")


@pytest.mark.parametrize(("log", "seen"), [([0, 1, 2, 5, 6, 9, 10, 11], [1, 2, 5, 6, 9]), ([], [])])
async def test_a_window_is_delivered_in_order_and_no_further(log: list[int], seen: list[int]) -> None:
    """Each record once, with the job's id; a position is behind holes too, also when every record is gone."""
    harness = WindowHarness(log)
    async with harness.deliver_window(Committed(1), 10) as source:
        await harness.until(lambda: source.finished)
    assert (harness.seen, {one.replay for one in harness.deliveries}) == (seen, {"job-1"} if seen else set())
    assert (source.progress.completed, source.progress.positions) == (len(seen), {P0: Committed(10)})


async def test_no_more_is_held_than_a_kill_may_repeat() -> None:
    """Completed records count until that is saved; so the number of repeats is known before."""
    harness = WindowHarness(range(100))
    async with harness.deliver_window(Committed(0), 100, most=30) as source:
        before = source.progress
        await harness.clock.advance(60)
        assert harness.seen == list(range(28))  # it is read in sevens
        source.saved(before)  # this save took long
        assert source.unsaved == 28
        source.saved(source.progress)
        await harness.clock.advance(60)
        assert len(harness.seen) == 56


async def test_the_rate_holds_from_the_first_second_on() -> None:
    """Neither a burst at the start nor one after a pause."""
    harness = WindowHarness(range(1000))
    async with harness.deliver_window(Committed(0), 1000, rate=20):
        for _ in range(10):
            before = len(harness.seen)
            await harness.clock.advance(1)
            assert 18 <= len(harness.seen) - before <= 22


async def test_an_outage_and_removed_records_do_not_end_a_replay() -> None:
    """Retention may take what was to be read next; an error that says nothing new ends the replay."""
    harness = WindowHarness(range(10, 20))
    harness.start = 10
    harness.errors = [KafkaError("out of range"), KafkaUnavailable("no broker")]
    async with harness.deliver_window(Committed(5), 20) as source:
        await harness.until(lambda: source.finished)
    assert harness.reads[-1] == 10
    assert harness.seen == list(range(10, 20))

    harness = WindowHarness(range(10, 20))
    harness.errors = [KafkaError("not yours")]
    async with harness.deliver_window(Committed(15), 20) as source:
        await harness.until(lambda: source.death is not None)
    assert str(source.death) == "not yours"


async def test_two_pumps_know_the_same_of_their_destination() -> None:
    """A replay knows with the group that the backend is down; and is forgotten when it is over."""
    live = Harness()
    beside = Pump("p", "g", live, live, delivery=DeliveryConfig(), clock=live.clock, shares_with=live.pump)
    assert beside.breaker is live.pump.breaker
    sharing = len(live.pump.breaker.limit._users)
    await beside.start()
    await beside.stop()
    assert len(live.pump.breaker.limit._users) == sharing - 1
