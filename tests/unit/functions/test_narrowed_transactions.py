"""Transactions that fail by single outputs: what is committed, what is refused, and how many more are needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from random import Random
from typing import Any

import pytest

from headrace.config.consumers import DeliveryConfig, RetryConfig
from headrace.delivery.offset_map import Tries, decode, encode
from headrace.delivery.outcomes import Delivery, Reply
from headrace.errors import RecordRefused, TransactionAborted
from headrace.functions.portions import cut
from headrace.records import Committed, OutgoingRecord, Produced, TopicPartition
from tests.unit.functions.test_transactional_pump import PumpScenario

PARTITIONS, END = [TopicPartition("t", number) for number in range(4)], 30


class Broker(PumpScenario):
    """Refuses some events. The client names them in a batch of several refused ones, else it names the whole batch."""

    def __init__(self, refused: Collection[str], batches: int) -> None:
        super().__init__(DeliveryConfig(retry=RetryConfig(attempts=1)))
        self.refused, self.batches, self.epoch = refused, batches, 10
        self.destination.hold = self.hold  # type: ignore[method-assign]
        self.transactions.submit = self.submit
        self.committed = {partition: Committed(0) for partition in PARTITIONS}
        self.visible, self.failed = Counter[str](), 0

    def hold(self, delivery: Delivery, offsets: Sequence[int]) -> list[Reply]:
        names = [f"{delivery.partition.partition}:{offset}" for offset in offsets]
        outputs = [OutgoingRecord("out", None, name.encode()) for name in names]
        results = self.held.hold(delivery.partition, offsets, outputs)
        return [Reply(type(each).__name__ if isinstance(each, Exception) else "") for each in results]

    async def submit(self, records: Sequence[OutgoingRecord], *, group: Any) -> Sequence[Any]:
        results: list[Any] = [None] * len(records)
        for number in range(self.batches):
            batch = range(number, len(records), self.batches)
            bad = [at for at in batch if records[at].topic != "t.dlq" and records[at].value.decode() in self.refused]
            alone = len(bad) == 1 < len(batch)
            for index in batch if alone else bad:
                results[index] = RecordRefused("invalid", **({"of_batch": True} if alone else {}))
        if any(results):
            self.failed += 1
            return [result or TransactionAborted() for result in results]
        self.committed |= group
        self.visible.update(f"{record.topic} {record.value.decode()}" for record in records)
        return [Produced(0, 0)] * len(records)

    async def run(self) -> None:
        """Deliver events until all are committed."""
        again = {*PARTITIONS}
        for _ in range(400):
            for partition in again:
                self.epoch += 1
                self.pump.on_assigned({partition: self.epoch}, {partition: self.committed[partition]})
                await self.feed(partition, *range(self.committed[partition].offset, END))
            await self.pump._commit_completed()
            await self.clock.advance(0.1)
            again = {partition for epochs in self.consumer.rewound for partition in epochs}
            self.consumer.rewound.clear()
            self.consumer.looks = 0
            if all(at.offset == END for at in self.committed.values()):
                return


@pytest.mark.parametrize("bad", [1, 2, 7, 40])
@pytest.mark.parametrize("batches", [1, 3])
async def test_only_outputs_that_kafka_refuses_alone_become_dead_letters(bad: int, batches: int) -> None:
    """In at most log2(n) + 2 more transactions for each; every other event is committed once, with its output."""
    names = [f"{partition.partition}:{offset}" for partition in PARTITIONS for offset in range(END)]
    for seed in range(5):
        refused = {*Random(seed).sample(names, bad)}
        broker = Broker(refused, batches)
        await broker.run()
        values = Counter(name.split()[1] for name in broker.visible.elements() if not name.startswith("t.dlq"))
        assert values == Counter(name for name in names if name not in refused)
        assert broker.visible["t.dlq v"] == bad and broker.failed <= bad * (math.log2(len(names)) + 2)
        assert (broker.held._size_bytes, broker.held._completed, broker.pump._apart) == (0, {}, {})
        await broker.pump.stop()


def ended(committed: Committed) -> set[int]:
    found = decode(committed.metadata, committed.offset)
    return {n for n in range(40) if n < committed.offset or (found is not None and found.has(n))}


def state(ends: set[int]) -> Committed:
    first, end = min({*range(40)} - ends), max(ends, default=-1) + 1
    is_open = [n for n in range(first, end) if n not in ends]
    return Committed(first, encode(first, end, is_open)) if is_open else Committed(first)


def test_what_is_committed_of_a_part_is_what_has_ended_in_it_and_before() -> None:
    """For any pattern of what had ended, and any offset at which it is cut."""
    chance = Random(1)
    for _ in range(3000):
        before = {n for n in range(30) if chance.random() < chance.choice([0.2, 0.9])}
        now = before | {n for n in range(30) if chance.random() < chance.choice([0.2, 0.9])}
        for end in chance.sample(sorted(now - before), min(1, len(now - before))):
            assert ended(cut(state(now), state(before), end)) == {n for n in now if n < end} | before


def test_a_part_keeps_the_attempts_of_the_record_at_its_committed_offset() -> None:
    tries = Tries(3, 1.5)
    failed = Committed(5, encode(5, 10, [5, 7], tries))
    for end in (7, 10):
        part = cut(failed, None, end)
        found = decode(part.metadata, part.offset)
        assert found is not None and (part.offset, found.tries) == (5, tries)
    alone = cut(Committed(5, encode(5, 6, [5], tries)), None, 6)
    assert alone == Committed(5, encode(5, 5, [], tries))
