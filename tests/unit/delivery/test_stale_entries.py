"""Entries of blocked keys that are removed while their records are read again: slow writes, lost responses, seeks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.delivery.blocked_keys import StaleEntries
from headrace.delivery.outcomes import ACK, Reply
from headrace.errors import KafkaUnavailable
from headrace.records import Committed, OutgoingRecord, Produced, Record, TopicPartition
from tests.unit.delivery.retry_harness import BLOCKED, RETRY_TOPIC, SOURCE, RetryHarness


class Model(RetryHarness):
    """Writes of blocked keys are slow, in their order, and their responses may be lost."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__(ordering="key", keep_key_order=True, attempts=5, dead_letters=False)
        self.records = [Record(*SOURCE, offset, 0, key, b"v") for offset, key in enumerate(keys)]
        self.writes: list[tuple[float, bool]] = []
        """Of the next writes: how long each takes, and whether its response is lost."""
        self.failing: set[int] = set()
        self.response = lambda record: Reply("E", "again") if record.offset in self.failing else ACK
        self.keeps_offsets_elsewhere = False
        self.turn = asyncio.Lock()

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Any]:
        seconds, is_lost = self.writes.pop(0) if self.writes and records[0].topic == BLOCKED else (0.0, False)
        written = asyncio.ensure_future(self._append_all(records, seconds))
        return [KafkaUnavailable("no response")] * len(records) if is_lost else await written

    async def _append_all(self, records: Sequence[OutgoingRecord], seconds: float) -> list[Produced]:
        async with self.turn:
            await self.clock.sleep(seconds)
            return [self.append(each) for each in records]

    async def ends(self) -> dict[TopicPartition, int]:
        return {RETRY_TOPIC: len(self.log(RETRY_TOPIC.topic))}

    async def committed(self) -> dict[TopicPartition, int]:
        return {RETRY_TOPIC: self.retries.lanes[RETRY_TOPIC].tracker.frontier}

    async def seek(self, partition: TopicPartition, epoch: int, to: Committed) -> bool:
        if partition == RETRY_TOPIC:
            self.fed = to.offset
            self.retries.on_assigned({RETRY_TOPIC: epoch + 1}, {RETRY_TOPIC: to})
        else:
            self.assign(epoch + 1, to.offset)
        return True

    def assign(self, epoch: int, offset: int) -> None:
        self.live.on_lost([SOURCE])
        self.live.on_assigned({SOURCE: epoch}, {SOURCE: Committed(offset)})
        if news := self.records[offset:]:
            self.live.on_records(SOURCE, epoch, news)

    @contextlib.asynccontextmanager
    async def reading(self, offset: int) -> AsyncIterator[None]:
        """Read the source from an offset on, and remove stale entries."""
        service = StaleEntries("s", self.blocked, self.live.lanes, self.ends, self.committed, self.clock, 30.0)
        async with self.running():
            await service.start()
            self.assign(1, offset)
            yield
            await service.stop()

    async def pass_time(self, seconds: int) -> None:
        for _ in range(seconds // 5):
            await self.clock.advance(5)
            self.feed_retries()


async def seek_back(keys: Sequence[bytes], writes: Sequence[tuple[float, bool]], after: float, offset: int) -> Model:
    """Write entries without copies, commit past their records, and seek back while the entries are removed."""
    model = Model(keys)
    await model.blocked.block(model.records)
    model.writes = [*writes]
    async with model.reading(len(keys)):
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
        model.live.pause(None, "paused")
        await model.blocked.block(model.records)
    async with model.reading(0):
        await model.pass_time(400)
        assert [entry.offset for entry in model.blocked.entries()] == [0]


async def test_a_seek_back_delivers_the_records_before_one_that_waits() -> None:
    """Otherwise it would count as completed, because a later record of its key waits."""
    model = Model([b"a", b"a", b"a", b"b"])
    model.failing = {2}
    async with model.reading(1):
        await model.clock.advance(50)
        assert model.blocked.of(model.records[2])
        model.failing.clear()
        model.deliveries.clear()
        model.writes = [(0.0, True)]
        seek = asyncio.ensure_future(model.live.seeks.seek(SOURCE, 0))
        await model.clock.advance(0.5)
        assert (model.delivered, seek.done()) == ([], False)
        assert "failed to write blocked keys" in model.live.status().partitions[SOURCE].why
        await model.pass_time(60)
        assert await seek
        assert sorted(model.delivered) == [0, 1, 2, 3]
        assert [*model.blocked.entries()] == []
