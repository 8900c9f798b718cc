"""Transactions that fail by single outputs: what is committed, what is refused, and how many more are needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest

from headrace.config.consumers import DeliveryConfig, RetryConfig
from headrace.delivery.offset_map import decode, encode
from headrace.delivery.protocols import Delivery, Reply
from headrace.errors import RecordRefused, TopicNotFound, TransactionAborted
from headrace.functions.portions import cut
from headrace.records import Committed, OutgoingRecord, Produced, TopicPartition
from tests.unit.functions.test_transactional_pump import HoldingDestination, World

PARTITIONS = [TopicPartition("t", number) for number in range(4)]


class Outputs(HoldingDestination):
    """The output of an event names it; it goes to a missing topic for some."""

    missing: Mapping[str, str] = {}

    def hold(self, delivery: Delivery, offsets: Sequence[int]) -> list[Reply]:
        names = [f"{delivery.partition.partition}:{offset}" for offset in offsets]
        outputs = [OutgoingRecord(self.missing.get(name, "out"), None, name.encode()) for name in names]
        results = self.held.hold(delivery.partition, offsets, outputs)
        return [Reply(type(each).__name__ if isinstance(each, Exception) else "") for each in results]


class Broker(World):
    """Refuses some events. The client names them in a batch of several refused ones, else it names the whole batch."""

    def __init__(self, refused: set[str], missing: set[str], batches: int = 1) -> None:
        super().__init__(DeliveryConfig(retry=RetryConfig(attempts=1)))
        self.refused, self.missing, self.batches = refused, {"missing"} if missing else set[str](), batches
        outputs = Outputs(self.held)
        outputs.missing = dict.fromkeys(missing, "missing")
        self.pump._deliverer._destination = outputs
        self.transactions.submit, self.transactions.require_topic = self.submit, self.require_topic
        self.committed = {partition: Committed(0) for partition in PARTITIONS}
        self.visible, self.failed = Counter[str](), list[int]()
        self.epoch = 10

    async def require_topic(self, topic: str) -> None:
        if topic in self.missing:
            raise TopicNotFound("no topic missing")

    async def submit(self, records: Sequence[OutgoingRecord], *, group: Any) -> Sequence[Any]:
        def is_refused(record: OutgoingRecord) -> bool:
            return record.topic == "out" and record.value.decode() in self.refused

        results: list[Any] = [None] * len(records)
        for number in range(self.batches):
            batch = range(number, len(records), self.batches)
            bad = [index for index in batch if is_refused(records[index])]
            alone = len(bad) == 1 and len(batch) > 1
            for index in batch if alone else bad:
                results[index] = RecordRefused("invalid", of_batch=True) if alone else RecordRefused("invalid")
        for index, record in enumerate(records):
            results[index] = TopicNotFound("no topic") if record.topic in self.missing else results[index]
        if any(results):
            self.failed.append(len(records))
            return [result or TransactionAborted() for result in results]
        self.committed |= group
        self.visible.update(f"{record.topic} {record.value.decode()}" for record in records)
        return [Produced(0, 0)] * len(records)

    async def run(self, end: int, turns: int = 400) -> int:
        """Deliver events until all are committed; return in how many turns."""
        again = dict.fromkeys(PARTITIONS, 0)
        for turn in range(turns):
            for partition in again:
                self.epoch += 1
                self.pump.on_assigned({partition: self.epoch}, {partition: self.committed[partition]})
                await self.feed(partition, *range(self.committed[partition].offset, end))
            await self.pump._commit_ended()
            await self.clock.advance(0.1)
            again = {partition: 0 for epochs in self.consumer.rewound for partition in epochs}
            self.consumer.rewound.clear()
            self.consumer.looks = 0
            if all(at.offset == end for at in self.committed.values()):
                return turn
        return turns


@pytest.mark.parametrize("bad", [1, 2, 7, 40])
@pytest.mark.parametrize("batches", [1, 3])
async def test_only_outputs_that_kafka_refuses_alone_become_dead_letters(bad: int, batches: int) -> None:
    """In at most log2(n) + 2 more transactions for each; every other event is committed once, with its output."""
    for seed in range(5):
        chance, end = Random(seed), 30
        names = [f"{partition.partition}:{offset}" for partition in PARTITIONS for offset in range(end)]
        refused = {*chance.sample(names, bad)}
        broker = Broker(refused, set(), batches)
        await broker.run(end)
        assert broker.visible == Counter([f"out {name}" for name in names if name not in refused] + dlq(refused))
        assert len(broker.failed) <= bad * (math.log2(len(names)) + 2)
        assert (broker.held._size_bytes, broker.held._ended, broker.pump._apart) == (0, {}, {})
        await broker.pump.stop()


def dlq(refused: set[str]) -> list[str]:
    return [f"t.dlq {'v'}" for _ in refused]


async def test_a_missing_topic_holds_its_own_partition_back() -> None:
    """From the event that names it; others wait for one transaction at most. Once it is there, all is committed."""
    broker, end = Broker(set(), {"1:12"}), 30
    assert await broker.run(end, turns=50) == 50
    assert {partition.partition: at.offset for partition, at in broker.committed.items()} == {
        0: 30,
        1: 12,
        2: 30,
        3: 30,
    }
    assert len(broker.failed) == 1, "one transaction finds that it is missing"
    reason = broker.pump.readiness().reason
    assert reason == "t-1 is stalled: outputs to missing are not acknowledged: no topic missing"
    broker.missing = set()
    await broker.clock.advance(10)
    assert await broker.run(end) < 50
    assert broker.visible.total() == len(broker.visible) == end * 4 and broker.pump.readiness().ready
    await broker.pump.stop()


def ended(committed: Committed | None) -> set[int]:
    """Return the ended offsets below 40."""
    if committed is None:
        return set()
    found = decode(committed.metadata, committed.offset)
    return {n for n in range(40) if n < committed.offset or (found is not None and found.has(n))}


def test_what_is_committed_of_a_part_is_what_has_ended_in_it_and_before() -> None:
    """For any pattern of what had ended, and any offset at which it is cut."""
    chance = Random(1)
    for _ in range(3000):
        before = {n for n in range(30) if chance.random() < chance.choice([0.2, 0.9])}
        now = before | {n for n in range(30) if chance.random() < chance.choice([0.2, 0.9])}

        def state(offsets: set[int]) -> Committed:
            first = next(n for n in range(40) if n not in offsets)
            end = max(offsets, default=-1) + 1
            opened = [n for n in range(first, end) if n not in offsets]
            return Committed(first, encode(first, end, opened)) if opened else Committed(first)

        new = sorted(now - before)
        end = chance.choice(new) if new else 0
        if end:
            expected = {n for n in now if n < end} | before
            assert ended(cut(state(now), chance.choice([state(before)]), end)) == expected
