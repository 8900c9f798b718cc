"""The pump of an exactly-once trigger between a consumer and a producer that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any

import pytest

from headrace.config.consumers import DeliveryConfig, Ordering
from headrace.delivery.dead_letter import DeadLetterTopic
from headrace.delivery.outcomes import ACK, Delivery, PartitionListener, Reply
from headrace.errors import HeadraceError, KafkaTimeout, RecordRefused, RecordTooLarge
from headrace.functions.exactly_once import ResumingLane, TransactionalPump
from headrace.functions.held_outputs import HeldOutputs
from headrace.kafka import Consumer
from headrace.records import Committed, OutgoingRecord, Produced, Record, RecordBatch, TopicPartition
from headrace.runtime import Deadline
from headrace_devkit.testing import ManualClock

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


class FakeConsumer(Consumer):
    """A member of a group without a client."""

    def __init__(self) -> None:
        self.committing: Collection[TopicPartition] = ()
        self.sought: list[tuple[TopicPartition, int]] = []
        self.looks, self.most_looks = 0, 100
        self.rewound: list[Mapping[TopicPartition, int]] = []

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None: ...

    def is_committing(self, partition: TopicPartition) -> bool:
        self.looks += 1
        assert self.looks < self.most_looks, "the loop is never left"
        return partition in self.committing

    def group_offsets(self, offsets: Mapping[TopicPartition, Committed]) -> Any:
        return dict(offsets)

    async def seek(self, partition: TopicPartition, epoch: int, to: Committed) -> bool:
        self.sought.append((partition, to.offset))
        return True

    def rewind(self, epochs: Mapping[TopicPartition, int]) -> None:
        self.rewound.append(epochs)


class FakeTransactions:
    """Keeps transactions; answers each by what `answers` holds, else by success."""

    def __init__(self) -> None:
        self.responses: list[Any] = []
        self.written: list[tuple[Sequence[OutgoingRecord], Any]] = []

    def open(self) -> None: ...

    async def require_topic(self, topic: str) -> None: ...

    async def submit(self, records: Sequence[OutgoingRecord], *, group: Any) -> Sequence[Any]:
        self.written.append((records, group))
        response = self.responses.pop(0) if self.responses else lambda record: Produced(0, 0)
        if isinstance(response, HeadraceError):
            raise response
        return [response(record) for record in records]


class Listener(PartitionListener):
    """Keeps the partitions of each call; while it is not free, partitions are not drained."""

    def __init__(self) -> None:
        self.calls: list[Collection[TopicPartition]] = []
        self.free = asyncio.Event()
        self.free.set()

    def draining(self, partitions: Collection[TopicPartition]) -> None:
        self.calls.append(partitions)

    async def drained(self, partitions: Collection[TopicPartition], deadline: Deadline) -> None:
        self.calls.append(partitions)
        await self.free.wait()


class HoldingDestination:
    """Takes every record and holds one output for each."""

    def __init__(self, held: HeldOutputs) -> None:
        self.held = held
        self.failing: Collection[int] = ()
        """Offsets of events whose handler raises."""
        self.shared = False
        """Whether a delivery of several events fails as one, if one of them is failing."""
        self.deliveries: list[tuple[float, int, Sequence[int]]] = []
        """Their time, attempt and offsets."""
        self.time: Callable[[], float] = lambda: 0.0
        self.output = b""
        """Of each event; its offset, if this is empty."""
        self.most_held = 0
        """The most outputs that were held at a time."""

    def hold(self, delivery: Delivery, offsets: Sequence[int]) -> list[Reply]:
        outputs = [OutgoingRecord("out", None, self.output or b"%d" % offset) for offset in offsets]
        results = self.held.hold(delivery.partition, offsets, outputs)
        every = [*self.held._pending.values(), *self.held._completed.values()]
        self.most_held = max(self.most_held, sum(map(len, every)))
        return [Reply(type(each).__name__) if isinstance(each, HeadraceError) else ACK for each in results]

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        records = RecordBatch.of(delivery.records)
        self.deliveries.append((self.time(), delivery.attempt, list(records.offsets)))
        await self.held.begin(records)
        if bad := [offset for offset in records.offsets if offset in self.failing]:
            if self.shared:
                return [Reply("ValueError", shared=True)] * len(records)
            fine = [offset for offset in records.offsets if offset not in bad]
            self.hold(delivery, fine)
            return [Reply("ValueError") if offset in bad else ACK for offset in records.offsets]
        return self.hold(delivery, records.offsets)


class PumpScenario:
    """A pump with two partitions, and fakes around it."""

    def __init__(self, delivery: DeliveryConfig | None = None) -> None:
        self.clock, self.held = ManualClock(), HeldOutputs()
        self.consumer: Any = FakeConsumer()
        self.transactions: Any = FakeTransactions()
        self.destination = HoldingDestination(self.held)
        self.destination.time = self.clock.time
        self.held.dead_letters = DeadLetterTopic("{topic}.dlq", self.held.produce, None)
        self.pump = TransactionalPump(
            "pump",
            "g",
            self.destination,
            self.held.dead_letters,
            delivery=delivery or DeliveryConfig(),
            clock=self.clock,
            chance=Random(1),
            held=self.held,
            transactions=self.transactions,
        )
        self.pump.connect(self.consumer, self.consumer)
        self.pump.on_assigned({P0: 1, P1: 2}, {})

    async def feed(self, partition: TopicPartition, *offsets: int) -> None:
        epoch = self.pump.lanes[partition].tracker.epoch
        self.pump.on_records(partition, epoch, [Record(*partition, each, 0, b"%d" % each, b"v") for each in offsets])
        await self.clock.settle()

    async def commit(self) -> list[str]:
        """Let one transaction end; return the outputs in it."""
        count = len(self.transactions.written)
        await self.pump._commit_completed()
        await self.clock.settle()
        return [str(record.value, "ascii") for records, _ in self.transactions.written[count:] for record in records]


async def test_the_end_of_a_late_revoke_leaves_the_next_assignment_alone() -> None:
    """The consumer waits for a revoke no longer than its limit; outputs of the next assignment are not dropped."""
    scenario, listener = PumpScenario(), Listener()
    listener.free.clear()
    scenario.pump.hooks = scenario.pump.hooks._replace(partitions=listener)
    revoke = asyncio.ensure_future(scenario.pump.on_revoked([P0], Deadline(scenario.clock, 0)))
    await scenario.clock.settle()
    scenario.pump.on_assigned({P0: 3}, {})
    await scenario.feed(P0, 5)
    listener.free.set()
    await revoke
    assert await scenario.commit() == ["5"]
    await scenario.pump.stop()


async def test_partitions_given_up_after_a_failed_transaction_are_drained() -> None:
    """Their events may be at work, although their lanes are gone."""
    scenario, listener = PumpScenario(), Listener()
    scenario.pump.hooks = scenario.pump.hooks._replace(partitions=listener)
    await scenario.feed(P0, 1)
    scenario.transactions.responses = [KafkaTimeout()]
    await scenario.commit()
    await scenario.pump.on_revoked([P0], Deadline(scenario.clock, 0))
    assert listener.calls == [[P0], [P0]]
    await scenario.pump.stop()


async def test_a_process_without_partitions_has_no_failing_transactions() -> None:
    """It has no transaction that could succeed."""
    scenario = PumpScenario()
    await scenario.feed(P0, 1)
    scenario.transactions.responses = [KafkaTimeout("late")] * 2
    await scenario.commit()
    scenario.pump.on_assigned({P0: 3}, {})
    await scenario.feed(P0, 1)
    await scenario.commit()
    assert scenario.pump.readiness() == (False, "transactions fail: late")
    scenario.pump.on_lost([P0, P1])
    assert scenario.pump.readiness().ready
    await scenario.pump.stop()


async def test_many_outputs_that_wait_for_a_commit_leave_the_loop_to_others() -> None:
    """The commit of the position at the start takes long, and so much has ended that it should be committed now."""
    scenario = PumpScenario()
    scenario.consumer.committing = (P0,)
    await scenario.feed(P0, 1)
    scenario.held.early.set()
    await scenario.pump.start()
    await scenario.clock.settle()
    assert scenario.consumer.looks < 10
    scenario.consumer.committing = ()
    await scenario.clock.advance(1)
    assert [records[0].value for records, _ in scenario.transactions.written] == [b"1"]
    await scenario.pump.stop()


async def test_a_skip_waits_until_what_has_ended_is_committed() -> None:
    """Its commit covers the records before the skipped one, so their outputs must not be dropped."""
    scenario = PumpScenario()
    scenario.consumer.committing = (P0,)
    await scenario.feed(P0, 1)
    assert await scenario.pump.seeks.skip(P0, 2, "bad") == "will be skipped"
    await scenario.feed(P0, 2)
    await scenario.clock.advance(1)
    assert scenario.consumer.sought == []
    scenario.consumer.committing = ()
    await scenario.clock.advance(1)
    assert [[record.value for record in records] for records, _ in scenario.transactions.written] == [[b"1"]]
    assert scenario.consumer.sought == [(P0, 3)]
    scenario.consumer.committing, scenario.consumer.most_looks = (P1,), 10_000
    await scenario.feed(P1, 4)
    assert await scenario.pump.seeks.skip(P1, 5, "bad") == "will be skipped"
    await scenario.feed(P1, 5)
    await scenario.clock.advance(60)
    assert scenario.consumer.rewound == [{P1: 2}], "nothing of it was committed or dropped: it begins again"
    await scenario.pump.stop()


class AbortingScenario(PumpScenario):
    """One partition with a new event each 0.1 seconds, of which every second transaction fails."""

    def __init__(self, delivery: DeliveryConfig) -> None:
        super().__init__(delivery)
        self.committed = Committed(0)
        self.end, self.epoch = 0, 2
        self.failed, self.dead = list[list[str]](), list[OutgoingRecord]()
        """Outputs of transactions that failed, by their topic; committed dead letters."""

    async def turn(self, events: int = 1, *, abort: bool) -> None:
        """Let events come, and 0.1 seconds pass; end a transaction, and begin the assignment again if it fails."""
        count, self.consumer.looks = len(self.transactions.written), 0
        self.transactions.responses = [KafkaTimeout()] if abort else []
        self.end += events
        if P0 in self.pump.lanes:
            await self.feed(P0, *range(self.end - events, self.end))
        await self.clock.advance(0.1)
        await self.commit()
        for records, offsets in self.transactions.written[count:]:
            if not abort:
                self.committed = offsets[P0]
                self.dead += [record for record in records if record.topic == "t.dlq"]
            elif records:
                self.failed.append([record.topic for record in records])
        await self.clock.advance(0)
        if self.consumer.rewound:
            self.consumer.rewound.clear()
            await self.begin_again()

    async def begin_again(self) -> None:
        """Assign the partition as a consumer does after a rewind: at what the group has committed."""
        self.epoch += 1
        self.pump.on_assigned({P0: self.epoch}, {P0: self.committed})
        await self.feed(P0, *range(self.committed.offset, self.end))


@pytest.mark.parametrize("ordering", ["none", "key", "partition"])
@pytest.mark.parametrize("shared", [False, True])
async def test_an_event_that_always_fails_has_its_attempts_though_transactions_fail(
    ordering: Ordering, shared: bool
) -> None:
    """A failed transaction costs it one attempt more at most, and its pauses stay."""
    scenario = AbortingScenario(DeliveryConfig(ordering=ordering))
    scenario.destination.failing, scenario.destination.shared = {2}, shared
    await scenario.turn(8, abort=True)
    for _ in range(150):
        await scenario.turn(abort=len(scenario.transactions.written) % 2 == 0)
    assert [dict(dead.headers)["headrace.dlq.attempts"] for dead in scenario.dead] == [b"5"]
    calls = [(attempt, offsets) for _, attempt, offsets in scenario.destination.deliveries]
    lost = sum("t.dlq" in topics for topics in scenario.failed)
    assert sum(2 in offsets for _, offsets in calls) <= 5 + 3 * shared + lost
    if ordering == "partition":  # what was not delivered with it at first waits for its end
        assert all(offsets[0] <= 2 for _, offsets in calls[: calls.index((5, [2]))])
    await scenario.turn(abort=False)
    assert scenario.committed.offset == scenario.end
    assert not [lane.tried for lane in scenario.pump.lanes.values() if isinstance(lane, ResumingLane) and lane.tried]
    await scenario.pump.stop()


TOO_LARGE, REFUSED, ABORTED = RecordTooLarge("5000 bytes"), RecordRefused("no key"), KafkaTimeout()


A, B = OutgoingRecord("a", None, b"x" * 5000), OutgoingRecord("b", None, b"x" * 5000)
SMALL, WITH_KEY = OutgoingRecord("a", None, b"12"), OutgoingRecord("a", b"k", b"123")


async def test_outputs_of_a_thousand_partitions_are_bounded_while_nothing_is_committed() -> None:
    """Few deliveries at a time, and each partition has outputs that wait for the next transaction."""
    size, in_flight = 100_000, 4
    scenario = PumpScenario(DeliveryConfig(max_in_flight=in_flight))
    scenario.destination.output, scenario.consumer.most_looks = b"x" * size, 1_000_000
    partitions = [TopicPartition("many", number) for number in range(1000)]
    scenario.pump.on_assigned(dict.fromkeys(partitions, 1), {})
    scenario.consumer.committing = partitions
    for partition in partitions:
        await scenario.feed(partition, 0)
    await scenario.clock.settle()
    assert 100 <= scenario.destination.most_held <= 33_554_432 // size + 2 * in_flight
    scenario.consumer.committing = ()
    assert sum([len(await scenario.commit()) for _ in range(100)]) == len(partitions)
    assert scenario.destination.most_held <= 33_554_432 // size + 2 * in_flight
    assert (scenario.held._size_bytes, scenario.held._completed, scenario.pump._next) == (0, {}, {})
    await scenario.pump.stop()
