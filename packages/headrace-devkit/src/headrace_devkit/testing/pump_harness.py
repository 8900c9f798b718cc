"""A pump with everything around it, under a clock that tests own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from random import Random
from typing import Any

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.outcomes import ACK, DeadLetter, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import PumpHooks
from headrace.errors import DeadLetterFailed, DestinationUnavailable
from headrace.records import Committed, Record, TopicPartition
from headrace_devkit.testing.manual_clock import ManualClock

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
RETRY = Reply("E", "again")
BURY = Reply("E", "never", permanent=True)


def kind_of(reply: Reply) -> str:
    """Return what a reply reports: `success`, `failure`, `permanent`, or `not taken`."""
    if not reply.error:
        return "success"
    if reply.permanent:
        return "permanent"
    return "failure" if reply.reached else "not taken"


class MovingClock(ManualClock):
    """A clock that advances a millisecond with each read."""

    def monotonic(self) -> float:
        self._now += 0.001
        return self._now


class HarnessSource:
    """The consumer of a pump: keeps its commits, and seeks as it asks."""

    def __init__(self) -> None:
        # What the test says
        self.is_lost = False
        """Whether the assignment has ended, so that no seek is possible."""
        self.keeps_offsets_elsewhere = False
        self.says = ""
        """What troubles each partition."""
        self.paused = ""
        """Why fetching is paused."""
        self.on_commit: Callable[[Mapping[TopicPartition, Committed]], None] = lambda offsets: None
        # What the pump did
        self.commits: dict[TopicPartition, Committed] = {}
        self.seeks: list[tuple[TopicPartition, int, int]] = []
        self.released = 0
        # These assignments
        self.pump: Pump
        self.epoch = 2
        self._fed: dict[TopicPartition, list[Record]] = {P0: [], P1: []}

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        self.released += records

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        self.commits.update(offsets)
        self.on_commit(offsets)

    def trouble(self, partition: TopicPartition) -> str:
        return self.says

    def pause_reason(self, partition: TopicPartition) -> str:
        return self.paused

    async def seek(self, partition: TopicPartition, epoch: int, to: Committed) -> bool:
        await asyncio.sleep(0)
        lane = self.pump.lanes.get(partition)
        if self.is_lost or not lane or lane.tracker.epoch != epoch:
            return False
        self.seeks.append((partition, epoch, to.offset))
        self.commits[partition] = to
        self.epoch += 1
        self.pump.on_assigned({partition: self.epoch}, {partition: to})
        return True

    def keep(self, records: list[Record]) -> list[Record]:
        """Keep records for `feed_again`."""
        self._fed[records[0].topic_partition] += records
        return records

    def feed_again(self, partition: TopicPartition = P0) -> None:
        """Hand over what was fed and not yet in this assignment, as a consumer does after a seek."""
        tracker = self.pump.lanes[partition].tracker
        if records := [record for record in self._fed[partition] if record.offset >= (tracker.position or 0)]:
            self.pump.on_records(partition, tracker.epoch, records)


class HarnessDeadLetters:
    """The dead letter topic of a pump."""

    def __init__(self) -> None:
        # What the test says
        self.may_write = asyncio.Event()
        """While it is not set, dead letters are not acknowledged."""
        self.may_write.set()
        self.is_down = False
        self.on_written: Callable[[Sequence[DeadLetter]], None] = lambda letters: None
        # What the pump did
        self.offsets: list[int] = []
        """Those of the records in it."""

    async def write(self, letters: Sequence[DeadLetter]) -> Any:
        await asyncio.sleep(0)
        if self.is_down:
            raise DeadLetterFailed("no room")
        await self.may_write.wait()
        self.offsets += [letter.record.offset for letter in letters]
        self.on_written(letters)


class Harness:
    """A pump with a source and a dead letter topic around it; its destination is this one."""

    def __init__(
        self,
        *,
        ordering: str = "partition",
        max_records: int = 2,
        attempts: int = 3,
        source: HarnessSource | None = None,
        dead_letters: HarnessDeadLetters | None = None,
        **given: Any,
    ) -> None:
        # What the test says
        self.clock = given.pop("clock", None) or ManualClock()
        self.responses: dict[int, Reply] = {}
        """By offset; everything else ends well."""
        self.free = asyncio.Event()
        """While it is not set, deliveries hang."""
        self.free.set()
        self.held: dict[int, asyncio.Event] = {}
        """Offsets whose deliveries hang by themselves."""
        self.down = False
        # What the pump did
        self.deliveries: list[Delivery] = []
        self.under_way = 0
        self.most_under_way = 0
        # The pump, and what is around it
        self.source = source or HarnessSource()
        self.dead_letters = dead_letters or HarnessDeadLetters()
        letters = None if given.pop("without_letters", False) else self.dead_letters
        batch = BatchConfig(max_records=max_records, linger_seconds=given.pop("linger_seconds", 0))
        policy = {"attempts": attempts, "first_delay_seconds": 1, "max_delay_seconds": 8, **given.pop("retry", {})}
        hooks = PumpHooks(**given.pop("hooks", {}))
        config = DeliveryConfig(ordering=ordering, batch=batch, retry=RetryConfig.model_validate(policy), **given)
        self.pump = Pump("pump", "g", self, letters, delivery=config, clock=self.clock, chance=Random(1), hooks=hooks)
        self.source.pump = self.pump
        self.pump.connect(self.source, self.source)

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.deliveries.append(delivery)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.free.wait()
            for record in delivery.records:
                if record.offset in self.held:
                    await self.held[record.offset].wait()
        finally:
            self.under_way -= 1
        if self.down:
            raise DestinationUnavailable("connection refused")
        return [self.responses.get(record.offset, ACK) for record in delivery.records]

    def feed(self, *offsets: int, partition: TopicPartition = P0, key: bytes | None = None) -> None:
        epoch = self.pump.lanes[partition].tracker.epoch
        records = [Record(*partition, offset, 1000 + offset, key, b"v", size_bytes=1) for offset in offsets]
        self.pump.on_records(partition, epoch, self.source.keep(records))

    def feed_keys(self, keys: str, start: int = 0, partition: TopicPartition = P0) -> None:
        """Hand over one record per character, which is its key; a dot means no key."""
        records = [
            Record(*partition, start + n, 0, None if key == "." else key.encode(), None) for n, key in enumerate(keys)
        ]
        self.pump.on_records(partition, self.pump.lanes[partition].tracker.epoch, records)

    def hold(self, *offsets: int) -> None:
        self.held.update({offset: asyncio.Event() for offset in offsets})

    @property
    def delivered(self) -> list[list[int]]:
        return [[record.offset for record in delivery.records] for delivery in self.deliveries]

    def why(self, partition: TopicPartition = P0) -> str:
        return self.pump.status().partitions[partition].why


@contextlib.asynccontextmanager
async def running(harness: Harness) -> AsyncIterator[Harness]:
    """Give a harness whose pump has two partitions; the pump must be whole at the end."""
    await harness.pump.start()
    harness.pump.on_assigned({P0: 1, P1: 2}, {})
    yield harness
    assert harness.pump.death is None
    await harness.pump.stop()
