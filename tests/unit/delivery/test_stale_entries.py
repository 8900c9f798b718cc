"""Entries of blocked keys that are ended while their records come again: with slow writes, lost answers and seeks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.blocked_keys import BlockedKeys, KeyOrder, StaleEntries
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import PumpHooks
from headrace.delivery.retry_topics import RetryTopicDestination, RetryTopics
from headrace.errors import KafkaUnavailable
from headrace.kafka import RAW_BYTES
from headrace.records import Committed, OutgoingRecord, Produced, Record, TopicPartition
from headrace.testing import ManualClock
from tests.memory_table import memory_table

BLOCKED = "blocked"
SOURCE, TIER = TopicPartition("t", 0), TopicPartition("g.retry.10s", 0)


class World:
    """Kafka, which keeps the order of writes, a destination, and the pumps of a consumer and its retry topic."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.clock = ManualClock()
        self.logs: dict[str, list[Record]] = {BLOCKED: [], TIER.topic: []}
        self.records = [Record(*SOURCE, offset, 0, key, b"v") for offset, key in enumerate(keys)]
        self.delivered: list[int] = []
        self.writes: list[tuple[float, bool]] = []
        """Of the next writes: how long each takes, and whether its response is lost."""
        self.failing: set[int] = set()
        self.keeps_offsets_elsewhere = False
        self.turn = asyncio.Lock()
        self.fed = 0
        retry = RetryConfig(topics=[10], keep_key_order=True)
        self.table = memory_table(BLOCKED, RAW_BYTES, self.produce, self.end)
        self.blocked = BlockedKeys(self.table)
        retry_topics = RetryTopics("g", retry, self.produce, self.clock, dead_letters=None, blocked=self.blocked)
        config = DeliveryConfig(ordering="key", batch=BatchConfig(max_records=1), retry=retry)
        order = KeyOrder(self, self.blocked, retry_topics.write)
        hooks = PumpHooks(blocked_keys=retry_topics)
        self.pump = Pump(
            "p", "g", order, retry_topics, delivery=config, clock=self.clock, chance=Random(1), hooks=hooks
        )
        self.pump.connect(self, self)  # type: ignore[arg-type]
        copies = RetryTopicDestination(self, retry_topics)
        self.retries = Pump(
            "r",
            "g.retry",
            copies,
            retry_topics,
            delivery=config,
            clock=self.clock,
            chance=Random(1),
            shares_with=self.pump,
            hooks=PumpHooks(delayed=retry_topics.delayed, blocked_keys=copies),
        )
        self.retries.connect(self, self)  # type: ignore[arg-type]

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Any]:
        seconds, is_lost = self.writes.pop(0) if self.writes and records[0].topic == BLOCKED else (0.0, False)
        written = asyncio.ensure_future(self._append(records, seconds))
        return [KafkaUnavailable("no response")] * len(records) if is_lost else await written

    async def _append(self, records: Sequence[OutgoingRecord], seconds: float) -> list[Produced]:
        written = []
        async with self.turn:
            await self.clock.sleep(seconds)
            for each in records:
                log, headers = self.logs[each.topic], list(each.headers or [])
                log.append(Record(each.topic, 0, len(log), 0, each.key, each.value, lambda own=headers: own))  # type: ignore[misc]
                written.append(Produced(0, len(log) - 1))
                if each.topic == BLOCKED:
                    self.table.read(log[-1:], len(log))
        return written

    def end(self) -> int:
        return len(self.logs[BLOCKED])

    async def ends(self) -> dict[TopicPartition, int]:
        return {TIER: len(self.logs[TIER.topic])}

    async def committed(self) -> dict[TopicPartition, int]:
        return {TIER: self.retries.lanes[TIER].tracker.frontier}

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.delivered += [record.offset for record in delivery.records]
        return [Reply("E", "again") if record.offset in self.failing else ACK for record in delivery.records]

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        pass

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        pass

    async def seek(self, partition: TopicPartition, epoch: int, to: Committed) -> bool:
        if partition == TIER:
            self.fed = to.offset
            self.retries.on_assigned({TIER: epoch + 1}, {TIER: to})
        else:
            self.assign(epoch + 1, to.offset)
        return True

    def assign(self, epoch: int, offset: int) -> None:
        self.pump.on_lost([SOURCE])
        self.pump.on_assigned({SOURCE: epoch}, {SOURCE: Committed(offset)})
        if news := self.records[offset:]:
            self.pump.on_records(SOURCE, epoch, news)

    @contextlib.asynccontextmanager
    async def running(self, offset: int) -> AsyncIterator[None]:
        """Read the source from an offset on, and end what is stale."""
        service = StaleEntries("s", self.blocked, self.pump.lanes, self.ends, self.committed, self.clock, 30.0)
        for each in (self.pump, self.retries, service):
            await each.start()
        self.retries.on_assigned({TIER: 1}, {})
        self.assign(1, offset)
        yield
        for each in (service, self.retries, self.pump):
            await each.stop()

    async def pass_time(self, seconds: int) -> None:
        for _ in range(seconds // 5):
            await self.clock.advance(5)
            log = self.logs[TIER.topic]
            if news := log[self.fed :]:
                self.fed = len(log)
                self.retries.on_records(TIER, self.retries.lanes[TIER].tracker.epoch, news)


async def seek_back(keys: Sequence[bytes], writes: Sequence[tuple[float, bool]], after: float, offset: int) -> World:
    """Write entries without copies, pass their records, begin to end the entries, and seek back in between."""
    world = World(keys)
    await world.blocked.block(world.records)
    world.writes = [*writes]
    async with world.running(len(keys)):
        await world.clock.advance(90 + after)
        world.assign(2, offset)
        await world.pass_time(400)
    return world


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.sampled_from([b"a", b"a", b"b"]), min_size=1, max_size=5),
    writes=st.lists(st.tuples(st.sampled_from([0.0, 1.0, 3.0]), st.booleans()), max_size=8),
    after=st.sampled_from([0.0, 0.5, 1.5, 4.0, 6.5]),
    back=st.integers(0, 4),
)
@example(keys=[b"a"], writes=[(3.0, False)], after=0.5, back=0)
@example(keys=[b"a"], writes=[(3.0, True)], after=0.5, back=0)
@example(keys=[b"a", b"b"], writes=[(3.0, False), (3.0, False)], after=0.5, back=0)
@example(keys=[b"a", b"a"], writes=[(0.0, False), (3.0, False)], after=0.5, back=0)
def test_records_that_come_again_while_their_entries_are_ended_are_delivered(
    keys: list[bytes], writes: list[tuple[float, bool]], after: float, back: int
) -> None:
    """Whatever is under way or in doubt at the seek back: each record behind it is delivered, a key's in order."""
    back = min(back, len(keys) - 1)
    world = asyncio.run(seek_back(keys, writes, after, back))
    assert {*world.delivered} == {*range(back, len(keys))}
    for key in {*keys}:
        first = [o for o in dict.fromkeys(world.delivered) if keys[o] == key]
        assert first == sorted(first)
    assert not [*world.blocked.entries()]


async def test_a_key_stays_blocked_while_the_copy_of_its_record_waits() -> None:
    """Its record is passed in its own topic, and the retry topic is not committed to its end."""
    world = World([b"a"])
    world.failing = {0}
    async with world.running(0):
        await world.pass_time(400)
        assert [entry.offset for entry in world.blocked.entries()] == [0]


async def test_a_key_stays_blocked_while_its_record_is_not_passed() -> None:
    """Its entry is written, and its copy is not: the record is still to come."""
    world = World([b"a"])
    world.pump.pause(None, "paused")
    await world.blocked.block(world.records)
    async with world.running(0):
        await world.pass_time(400)
        assert [entry.offset for entry in world.blocked.entries()] == [0]


async def test_a_seek_back_delivers_again_what_lies_before_a_record_that_waits() -> None:
    """It was passed by a seek, or had ended: not delivered, it would count as ended because a later one waits."""
    world = World([b"a", b"a", b"a", b"b"])
    world.failing = {2}
    async with world.running(1):
        await world.clock.advance(50)
        assert world.blocked.of(world.records[2])
        world.failing.clear()
        world.delivered.clear()
        world.writes = [(0.0, True)]
        seek = asyncio.ensure_future(world.pump.moves.seek(SOURCE, 0))
        await world.clock.advance(0.5)
        assert (world.delivered, seek.done()) == ([], False)
        assert "blocked keys are not written" in world.pump.status().partitions[SOURCE].why
        await world.pass_time(60)
        assert await seek
        assert sorted(world.delivered) == [0, 1, 2, 3]
        assert [*world.blocked.entries()] == []


async def test_a_copy_of_before_a_seek_back_that_is_skipped_unblocks_no_key_of_now() -> None:
    """The record has come again, failed again, and waits with another entry, which its new copy needs."""
    world = World([b"a"])
    world.failing = {0}
    async with world.running(0):
        await world.clock.advance(9)
        seek = asyncio.ensure_future(world.pump.moves.seek(SOURCE, 0))
        await world.clock.advance(9)
        assert await seek
        assert len(world.logs[TIER.topic]) == 2
        world.failing.clear()
        world.delivered.clear()
        world.retries.on_records(TIER, 1, world.logs[TIER.topic])
        skipped = asyncio.ensure_future(world.retries.moves.skip(TIER, 0, "it is old"))
        await world.pass_time(30)
        assert (await skipped, world.delivered) == ("skipped", [0])
