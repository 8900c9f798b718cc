"""Entries of blocked keys that are ended while their records come again: with slow writes, lost answers and seeks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random
from typing import Any

import pytest
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
SOURCE, RETRY_TOPIC = TopicPartition("t", 0), TopicPartition("g.retry.10s", 0)


class Model:
    """Kafka, which keeps the order of writes, a destination, and the pumps of a consumer and its retry topic."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.clock = ManualClock()
        self.logs: dict[str, list[Record]] = {BLOCKED: [], RETRY_TOPIC.topic: []}
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
        return {RETRY_TOPIC: len(self.logs[RETRY_TOPIC.topic])}

    async def committed(self) -> dict[TopicPartition, int]:
        return {RETRY_TOPIC: self.retries.lanes[RETRY_TOPIC].tracker.frontier}

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.delivered += [record.offset for record in delivery.records]
        return [Reply("E", "again") if record.offset in self.failing else ACK for record in delivery.records]

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        pass

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        pass

    async def seek(self, partition: TopicPartition, epoch: int, to: Committed) -> bool:
        if partition == RETRY_TOPIC:
            self.fed = to.offset
            self.retries.on_assigned({RETRY_TOPIC: epoch + 1}, {RETRY_TOPIC: to})
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
        """Read the source from an offset on, and remove stale entries."""
        service = StaleEntries("s", self.blocked, self.pump.lanes, self.ends, self.committed, self.clock, 30.0)
        for each in (self.pump, self.retries, service):
            await each.start()
        self.retries.on_assigned({RETRY_TOPIC: 1}, {})
        self.assign(1, offset)
        yield
        for each in (service, self.retries, self.pump):
            await each.stop()

    async def pass_time(self, seconds: int) -> None:
        for _ in range(seconds // 5):
            await self.clock.advance(5)
            log = self.logs[RETRY_TOPIC.topic]
            if news := log[self.fed :]:
                self.fed = len(log)
                self.retries.on_records(RETRY_TOPIC, self.retries.lanes[RETRY_TOPIC].tracker.epoch, news)


async def seek_back(keys: Sequence[bytes], writes: Sequence[tuple[float, bool]], after: float, offset: int) -> Model:
    """Write entries without copies, commit past their records, and seek back while the entries are removed."""
    model = Model(keys)
    await model.blocked.block(model.records)
    model.writes = [*writes]
    async with model.running(len(keys)):
        await model.clock.advance(90 + after)
        model.assign(2, offset)
        await model.pass_time(400)
    return model


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
def test_records_read_again_while_their_entries_are_removed_are_delivered(
    keys: list[bytes], writes: list[tuple[float, bool]], after: float, back: int
) -> None:
    """Whatever is in flight at the seek back, each record behind it is delivered, those of a key in order."""
    back = min(back, len(keys) - 1)
    model = asyncio.run(seek_back(keys, writes, after, back))
    assert {*model.delivered} == {*range(back, len(keys))}
    for key in {*keys}:
        first = [o for o in dict.fromkeys(model.delivered) if keys[o] == key]
        assert first == sorted(first)
    assert not [*model.blocked.entries()]


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_key_stays_blocked_while_its_record_waits(is_paused: bool) -> None:
    """Its copy waits in the retry topic; or its copy is not written, and its own topic is not committed past it."""
    model = Model([b"a"])
    model.failing = {0}
    if is_paused:
        model.pump.pause(None, "paused")
        await model.blocked.block(model.records)
    async with model.running(0):
        await model.pass_time(400)
        assert [entry.offset for entry in model.blocked.entries()] == [0]


async def test_a_seek_back_delivers_the_records_before_one_that_waits() -> None:
    """Otherwise it would count as completed, because a later record of its key waits."""
    model = Model([b"a", b"a", b"a", b"b"])
    model.failing = {2}
    async with model.running(1):
        await model.clock.advance(50)
        assert model.blocked.of(model.records[2])
        model.failing.clear()
        model.delivered.clear()
        model.writes = [(0.0, True)]
        seek = asyncio.ensure_future(model.pump.seeks.seek(SOURCE, 0))
        await model.clock.advance(0.5)
        assert (model.delivered, seek.done()) == ([], False)
        assert "failed to write blocked keys" in model.pump.status().partitions[SOURCE].why
        await model.pass_time(60)
        assert await seek
        assert sorted(model.delivered) == [0, 1, 2, 3]
        assert [*model.blocked.entries()] == []


async def test_a_skipped_copy_from_before_a_seek_unblocks_no_current_key() -> None:
    """The record was read again, failed again, and waits with another entry, which its new copy needs."""
    model = Model([b"a"])
    model.failing = {0}
    async with model.running(0):
        await model.clock.advance(9)
        seek = asyncio.ensure_future(model.pump.seeks.seek(SOURCE, 0))
        await model.clock.advance(9)
        assert await seek
        assert len(model.logs[RETRY_TOPIC.topic]) == 2
        model.failing.clear()
        model.delivered.clear()
        model.retries.on_records(RETRY_TOPIC, 1, model.logs[RETRY_TOPIC.topic])
        skipped = asyncio.ensure_future(model.retries.seeks.skip(RETRY_TOPIC, 0, "it is old"))
        await model.pass_time(30)
        assert (await skipped, model.delivered) == ("skipped", [0])
