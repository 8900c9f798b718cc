"""A pump with everything around it, under a clock that tests own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Any

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.protocols import ACK, DeadLetter, Delivery, Outcome, Verdict
from headrace.delivery.pump import Pump
from headrace.errors import DeadLetterFailed, DestinationUnavailable
from headrace.lifecycle import ManualClock
from headrace.records import Committed, Record, TopicPartition

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
RETRY = Outcome(Verdict.RETRY, "E", "again")
BURY = Outcome(Verdict.DEAD_LETTER, "E", "never")


class Bed:
    """A pump with a source, a destination and a dead letter topic around it, all of them this one."""

    def __init__(self, *, ordering: str = "partition", max_records: int = 2, attempts: int = 3, **given: Any) -> None:
        self.clock = ManualClock()
        self.answers: dict[int, Outcome] = {}
        """By offset; everything else ends well."""
        self.free = asyncio.Event()
        """While it is not set, deliveries hang."""
        self.free.set()
        self.down = self.letters_down = False
        self.deliveries: list[Delivery] = []
        self.letters: list[int] = []
        self.commits: dict[TopicPartition, Committed] = {}
        self.seeks: list[tuple[TopicPartition, int, int]] = []
        self.is_lost = self.keeps_offsets_elsewhere = False
        self.released = 0
        self.says = self.paused = ""
        self.epoch = 2
        letters = None if given.pop("without_letters", False) else self
        batch = BatchConfig(max_records=max_records, linger_seconds=given.pop("linger_seconds", 0))
        retry = RetryConfig(attempts=attempts, first_delay_seconds=1, max_delay_seconds=8)
        config = DeliveryConfig(ordering=ordering, batch=batch, retry=retry, **given)  # type: ignore[arg-type]
        self.pump = Pump("pump", "g", self, letters, delivery=config, clock=self.clock, chance=Random(1))
        self.pump.source = self.pump.member = self

    async def deliver(self, delivery: Delivery) -> Sequence[Outcome]:
        self.deliveries.append(delivery)
        await self.free.wait()
        if self.down:
            raise DestinationUnavailable("connection refused")
        return [self.answers.get(record.offset, ACK) for record in delivery.records]

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        await asyncio.sleep(0)
        if self.letters_down:
            raise DeadLetterFailed("no room")
        self.letters += [letter.record.offset for letter in letters]

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        self.released += records

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        self.commits.update(offsets)

    def trouble(self, partition: TopicPartition) -> str:
        return self.says

    def pause_reason(self, partition: TopicPartition) -> str:
        return self.paused

    async def seek(self, partition: TopicPartition, epoch: int, offset: int) -> bool:
        await asyncio.sleep(0)
        lane = self.pump.lanes.get(partition)
        if self.is_lost or not lane or lane.tracker.epoch != epoch:
            return False
        self.seeks.append((partition, epoch, offset))
        self.commits[partition] = Committed(offset)
        self.epoch += 1
        self.pump.on_assigned({partition: self.epoch}, {partition: Committed(offset)})
        return True

    def feed(self, *offsets: int, partition: TopicPartition = P0, key: bytes | None = None) -> None:
        epoch = self.pump.lanes[partition].tracker.epoch
        records = [Record(*partition, offset, 1000 + offset, key, b"v", size_bytes=1) for offset in offsets]
        self.pump.on_records(partition, epoch, records)

    @property
    def delivered(self) -> list[list[int]]:
        return [[record.offset for record in delivery.records] for delivery in self.deliveries]

    def why(self, partition: TopicPartition = P0) -> str:
        return self.pump.status().partitions[partition].why


def run(bed: Callable[[], Bed], test: Callable[[Bed], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a bed whose pump has two partitions."""

    async def main() -> None:
        made = bed()
        await made.pump.start()
        made.pump.on_assigned({P0: 1, P1: 2}, {})
        await test(made)
        assert made.pump.death is None
        await made.pump.stop()

    asyncio.run(main())
