"""Pump, lanes, dispatcher, tracker and offset map together, against the plainest model of what was promised.

Records arrive, fail, hang, time passes, the destination and the dead letter topic go down, partitions are revoked,
lost, and taken up again from what was committed; people hold and seek them, skip records, and change how much goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from random import Random

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from headrace.delivery.offset_map import decode
from headrace.delivery.outcomes import ACK, DeadLetter, Delivery, Reply
from headrace.delivery.status import SettingsInForce
from headrace.errors import DestinationUnavailable
from headrace.records import Committed, Record, TopicPartition
from headrace.runtime import Deadline
from headrace_devkit.testing.pump_harness import P0, P1, Harness
from tests.unit.delivery.loop_machine import LoopMachine, in_loop

PARTITIONS = [P0, P1]
PLANS = [0, 0, 0, 0, 0, 1, 2, 99]
"""How often a record fails before it is taken; 99 is for ever."""
MOST_BAD = 8
"""Records that fail for ever, in all: more of them than successes, and the destination is to blame, not they."""
SEEDS = st.integers(0, 2**32)


@pytest.fixture(autouse=True)
def _no_time_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeks and skips do not wait for what is in flight."""
    monkeypatch.setattr("headrace.delivery.seeks_and_skips.DRAIN_SECONDS", 0)


class Model(Harness):
    """Kafka, a destination and a dead letter topic, in memory."""

    def __init__(self, ordering: str, max_records: int, max_in_flight: int) -> None:
        super().__init__(
            ordering=ordering, max_records=max_records, max_in_flight=max_in_flight, retry={"max_delay_seconds": 4}
        )
        self.logs: dict[TopicPartition, list[Record]] = {partition: [] for partition in PARTITIONS}
        self.plans: dict[tuple[TopicPartition, int], int] = {}
        self.committed: dict[TopicPartition, Committed] = {}
        self.ended: dict[TopicPartition, set[int]] = {partition: set() for partition in PARTITIONS}
        self.known: dict[TopicPartition, set[int]] = {partition: set() for partition in PARTITIONS}
        """What the present owner was told has ended, or read on assignment."""
        self.noted = {partition: set[int]() for partition in PARTITIONS}
        """The same, when it last committed."""
        self.at_start = {partition: set[int]() for partition in PARTITIONS}
        """What the offset map says has ended, when the present assignment began."""
        self.position = dict.fromkeys(PARTITIONS, 0)
        self.epoch_of: dict[TopicPartition, int] = {}
        self.most = max_in_flight
        self.ordering = ordering
        self.wrong: list[str] = []
        self.epochs = self.sought = 0
        self.unwanted = {partition: set[int]() for partition in PARTITIONS}
        """What somebody asked to skip."""
        self.held_partitions: set[TopicPartition] = set()
        self.is_held = self.seeking = False
        self.source.on_commit = self._committed
        self.source.seek = self.seek  # type: ignore[method-assign]
        self.dead_letters.on_written = self._buried

    def over(self, partition: TopicPartition) -> set[int]:
        """Return what has ended, or may be passed because somebody said so."""
        return self.ended[partition] | self.unwanted[partition]

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        partition, ended = delivery.partition, self.ended[delivery.partition]
        self.under_way += 1
        if self.is_held or partition in self.held_partitions:
            self.wrong.append("a delivery of a held partition began")
        if unwanted := [r.offset for r in delivery.records if r.offset in self.unwanted[partition]]:
            self.wrong.append(f"{unwanted} were to be skipped")
        if self.under_way > self.most:
            self.wrong.append(f"{self.under_way} deliveries at a time")
        try:
            self._check_order(delivery)
            await self.free.wait()
        finally:
            self.under_way -= 1
        if self.down:
            raise DestinationUnavailable("down")
        outcomes = []
        for record in delivery.records:
            fails = self.plans[partition, record.offset] > 0
            self.plans[partition, record.offset] -= 1
            outcomes.append(Reply("E", "again") if fails else ACK)
            if not fails:
                ended.add(record.offset)
                self.known[partition].add(record.offset)
        return outcomes

    def _buried(self, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            self.ended[letter.record.topic_partition].add(letter.record.offset)
            self.known[letter.record.topic_partition].add(letter.record.offset)

    def _committed(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        for partition, committed in offsets.items():
            passed = [r.offset for r in self.logs[partition] if r.offset < committed.offset]
            if open_ones := set(passed) - self.over(partition):
                self.wrong.append(f"{committed.offset} is committed, {open_ones} have not ended")
            if partition in self.committed and committed.offset < self.committed[partition].offset:
                self.wrong.append("a commit goes back")
            self.committed[partition] = committed
            self.noted[partition] = set(self.known[partition])

    def _check_order(self, delivery: Delivery) -> None:
        partition = delivery.partition
        if delivery.epoch != self.epoch_of.get(partition):
            self.wrong.append("a delivery of an older assignment began")
        if again := [r.offset for r in delivery.records if r.offset in self.at_start[partition]]:
            self.wrong.append(f"{again} had ended before this assignment")
        if self.ordering == "none":
            return
        first, last = delivery.records[0].offset, delivery.records[-1].offset
        keys = [record.key for record in delivery.records]
        if self.ordering == "key" and len(set(keys)) < len(keys):
            self.wrong.append("two records of a key in one delivery")
        for earlier in self.logs[partition]:
            if earlier.offset in self.over(partition) or earlier.offset >= last:
                continue
            if self.ordering == "partition" and earlier.offset < first:
                self.wrong.append(f"{first} began before {earlier.offset} had ended")
            place = {record.key: record.offset for record in delivery.records}.get(earlier.key, 0)
            if self.ordering == "key" and earlier.offset < place:
                self.wrong.append(f"key {earlier.key!r}: {place} began before {earlier.offset} had ended")

    def assign(self, partition: TopicPartition) -> None:
        self.epochs += 1
        self.epoch_of[partition] = self.epochs
        committed = self.committed.get(partition)
        self.position[partition] = committed.offset if committed else 0
        self.known[partition] = set(self.noted[partition])
        self.at_start[partition] = set(self.noted[partition])
        self.pump.on_assigned({partition: self.epochs}, {partition: committed} if committed else {})
        for offset in self.unwanted[partition]:  # requested again, because it may not have been committed
            self.skip(partition, offset)

    def skip(self, partition: TopicPartition, offset: int) -> asyncio.Task[str]:
        """Request a skip before anything else happens."""
        return asyncio.ensure_future(self.pump.seeks.skip(partition, offset, "it is wrong"))

    async def seek(self, partition: TopicPartition, epoch: int, to: Committed) -> bool:
        await asyncio.sleep(0)
        if self.epoch_of[partition] != epoch:
            return False
        self.committed[partition] = to
        above = decode(to.metadata, to.offset)
        in_map = {record.offset for record in self.logs[partition] if above and above.has(record.offset)}
        passed = {record.offset for record in self.logs[partition] if record.offset < to.offset}
        if self.seeking:
            self.sought += 1
        elif open_ones := (passed | in_map) - self.over(partition):
            self.wrong.append(f"a skip passes {open_ones}, which have not ended")
        self.ended[partition] = passed | in_map  # all others are to come again
        self.noted[partition] = in_map
        self.assign(partition)
        self.fetch(partition)
        return True

    def fetch(self, partition: TopicPartition) -> None:
        """Hand over what the owner has not had yet."""
        news = [record for record in self.logs[partition] if record.offset >= self.position[partition]]
        if news:
            self.position[partition] = news[-1].offset + 1
            self.pump.on_records(partition, self.epoch_of[partition], news)
        else:
            self.pump.on_end(partition, self.epoch_of[partition], self.position[partition])


class DeliveryMachine(LoopMachine):
    """Drives a model."""

    @initialize(
        ordering=st.sampled_from(["partition", "key", "key", "none"]),
        max_records=st.sampled_from([1, 3]),
        max_in_flight=st.sampled_from([1, 2, 5]),
    )
    @in_loop
    async def open(self, ordering: str, max_records: int, max_in_flight: int) -> None:
        self.model = Model(ordering, max_records, max_in_flight)
        await self.model.pump.start()
        for partition in PARTITIONS:
            self.model.assign(partition)

    @rule(partition=st.sampled_from(PARTITIONS), count=st.integers(1, 8), seed=SEEDS)
    @in_loop
    async def arrive(self, partition: TopicPartition, count: int, seed: int) -> None:
        chance, log = Random(seed), self.model.logs[partition]
        for _ in range(count):
            offset = (log[-1].offset + 1 if log else 0) + chance.choice([0, 0, 0, 2])
            key = chance.choice([b"a", b"b", b"c", None])
            log.append(Record(*partition, offset, 0, key or b"%d" % offset, None))
            bad = sum(plan > 9 for plan in self.model.plans.values())
            self.model.plans[partition, offset] = chance.choice(PLANS if bad < MOST_BAD else PLANS[:-1])
        self.model.fetch(partition)
        await self.model.clock.settle()

    @rule(seconds=st.sampled_from([0.1, 0.5, 3]))
    def pass_time(self, seconds: float) -> None:
        self.runner.run(self.model.clock.advance(seconds))

    @rule(down=st.booleans(), letters_down=st.booleans())
    def change(self, down: bool, letters_down: bool) -> None:
        self.model.down, self.model.dead_letters.is_down = down, letters_down

    @rule(hang=st.booleans())
    @in_loop
    async def hang(self, hang: bool) -> None:
        (self.model.free.clear if hang else self.model.free.set)()
        await self.model.clock.settle()

    @rule(partition=st.sampled_from(PARTITIONS), end_in_time=st.booleans())
    @in_loop
    async def revoke(self, partition: TopicPartition, end_in_time: bool) -> None:
        model = self.model
        if end_in_time:
            model.free.set()
        deadline = Deadline(model.clock, 60 if end_in_time else 0)
        before = model.pump.counts.in_flight_at_revoke
        model.source.commit(await model.pump.on_revoked([partition], deadline))
        if end_in_time and model.pump.counts.in_flight_at_revoke > before:
            model.wrong.append("what could end in time was abandoned")
        model.assign(partition)
        model.fetch(partition)
        await model.clock.settle()

    @rule(partition=st.sampled_from([*PARTITIONS, None]), held=st.booleans())
    @in_loop
    async def hold(self, partition: TopicPartition | None, held: bool) -> None:
        model, places = self.model, [partition] if partition else None
        if partition:
            (model.held_partitions.add if held else model.held_partitions.discard)(partition)
        else:
            model.is_held = held
        if held:
            model.pump.pause(places, "held")
        else:
            model.pump.resume(places)
        await model.clock.settle()

    @rule(partition=st.sampled_from(PARTITIONS), place=st.integers(0, 20), ends=st.booleans(), is_lost=st.booleans())
    @in_loop
    async def seek(self, partition: TopicPartition, place: int, ends: bool, is_lost: bool) -> None:
        model = self.model
        if ends:
            model.free.set()
        model.seeking = True
        log, before = model.logs[partition], model.sought
        seek = asyncio.create_task(model.pump.seeks.seek(partition, min(place, log[-1].offset + 1 if log else 0)))
        if is_lost:
            await asyncio.sleep(0)
            model.pump.on_lost([partition])
            model.assign(partition)
        if await seek != (model.sought > before):
            model.wrong.append("a seek says what is not so")
        model.seeking = False
        model.fetch(partition)
        await model.clock.settle()

    @rule(partition=st.sampled_from(PARTITIONS), place=st.integers(0, 30))
    @in_loop
    async def skip(self, partition: TopicPartition, place: int) -> None:
        model = self.model
        is_new = place not in model.unwanted[partition]
        model.unwanted[partition].add(place)
        task = model.skip(partition, place)
        await model.clock.settle()
        if task.done() and task.result() == "already completed":
            if is_new:
                model.unwanted[partition].discard(place)
            exists = any(record.offset == place for record in model.logs[partition])
            if exists and place not in model.over(partition):
                model.wrong.append(f"{place} has not ended")

    @rule(
        rate=st.sampled_from([None, 3, 1000]),
        max_records=st.integers(1, 4),
        linger_seconds=st.sampled_from([0, 0.3]),
        max_in_flight=st.sampled_from([1, 2, 5]),
    )
    @in_loop
    async def settings(self, rate: float | None, max_records: int, linger_seconds: float, max_in_flight: int) -> None:
        self.model.most = max_in_flight
        self.model.pump.change(SettingsInForce(rate, max_records, 1000, linger_seconds, max_in_flight))
        await self.model.clock.settle()

    @rule(partition=st.sampled_from(PARTITIONS))
    @in_loop
    async def lose(self, partition: TopicPartition) -> None:
        self.model.pump.on_lost([partition])
        self.model.assign(partition)
        self.model.fetch(partition)
        await self.model.clock.settle()

    @invariant()
    def each_slot_is_of_a_delivery(self) -> None:
        if hasattr(self, "model"):
            assert self.model.pump.breaker.limit.in_flight == self.model.under_way

    def check_end(self) -> None:
        """Every record is completed, and the commit is behind the last."""
        for partition, log in self.model.logs.items():
            assert self.model.over(partition) >= {record.offset for record in log}
            if log:
                assert self.model.committed[partition] == Committed(log[-1].offset + 1)

    async def heal(self) -> None:
        self.model.down = self.model.dead_letters.is_down = False
        self.model.free.set()
        self.model.pump.resume(None)
        self.model.pump.resume(PARTITIONS)
        self.model.held_partitions, self.model.is_held = set(), False
        self.model.pump.change(msgspec.structs.replace(self.model.pump.settings, rate_records=None))
        await self.model.clock.advance(400)
        assert not [status.why for status in self.model.pump.status().partitions.values() if status.why]
        await self.model.pump.stop()


TestDeliveryMachine = DeliveryMachine.TestCase
TestDeliveryMachine.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=12)
