"""A pump whose records are skipped by hand, under a clock that tests own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.delivery.outcomes import AWAITING_ACK, Outcome, Reply
from headrace.errors import DeadLetterFailed
from headrace.records import Committed, Record, TopicPartition
from headrace_devkit.testing.pump_harness import BURY, P0, P1, Harness, running


async def skip(harness: Harness, *offsets: int) -> list[str]:
    """Skip records of the first partition, and hand over its records again after a seek."""
    epoch = harness.source.epoch
    said = await asyncio.gather(*[harness.pump.seeks.skip(P0, offset, "it is wrong") for offset in offsets])
    if harness.source.epoch > epoch:
        harness.source.feed_again()
    await harness.clock.settle()
    return list(said)


async def test_the_result_of_a_skip(caplog: pytest.LogCaptureFixture) -> None:
    """A completed record or a hole needs no skip; the log and the audit have the reason."""
    ended: list[tuple[int, Outcome, str]] = []

    def on_completed(records: Sequence[Record], size: int, how: Outcome, replies: Sequence[Reply], replay: str) -> None:
        ended.extend((record.offset, how, reply.error) for record, reply in zip(records, replies, strict=False))

    async with running(Harness(hooks={"on_completed": on_completed})) as harness:
        harness.feed(5, 9)
        await harness.clock.advance(1)
        assert await skip(harness, 4, 5, 7) == ["already completed"] * 3
        assert await harness.pump.seeks.skip(TopicPartition("t", 9), 1, "why not") == "not assigned"
        assert await harness.pump.seeks.skip(P1, 1, "why not") == "will be skipped"
        harness.feed(1, partition=P1)
        await harness.clock.settle()
        assert "t-1: skipped offset 1 by hand: why not" in caplog.text
        assert ended == [(1, Outcome.SKIPPED_BY_HAND, "why not")]


@pytest.mark.parametrize("letters", [{}, {"without_letters": True}], ids=["not written", "off"])
async def test_a_record_is_skipped_whose_dead_letter_cannot_be_written(letters: Any) -> None:
    """At once, without waiting for the pause; the others are delivered again."""
    async with running(Harness(**letters)) as harness:
        harness.dead_letters.is_down, harness.responses = True, {0: BURY, 1: BURY}
        harness.feed(0, 1, 2)
        await harness.clock.advance(10)
        assert harness.why()
        await skip(harness, 0)
        await harness.clock.advance(10)
        assert "offset 1 failed" in harness.why() if letters else harness.why() == "no room"
        await skip(harness, 1)
        await harness.clock.advance(1)
        assert (harness.delivered[-1][-1], harness.why(), harness.source.commits[P0]) == (2, "", Committed(3))
        assert harness.pump.readiness().ready


async def test_a_blocked_key_is_unblocked_before_the_skipped_record_is_completed() -> None:
    """The write is retried; until it succeeds the committed offset does not pass the record."""
    unblocked: list[int] = []
    down = True

    async def unblock(record: Record) -> None:
        await asyncio.sleep(0)
        if down:
            raise DeadLetterFailed("blocked keys are not written")
        unblocked.append(record.offset)

    async with running(Harness(hooks={"blocked_keys": SimpleNamespace(unblock=unblock)})) as harness:
        harness.pump.pause([P0], "paused")
        harness.feed(0, 1)
        skipped = asyncio.ensure_future(skip(harness, 0))
        await harness.clock.advance(3)
        assert (harness.source.commits, harness.why()) == ({}, "blocked keys are not written")
        down = False
        await harness.clock.advance(2)
        assert await skipped == ["skipped"]
        harness.pump.resume([P0])
        await harness.clock.advance(1)
        assert (unblocked, harness.delivered, harness.source.commits[P0]) == ([0], [[1]], Committed(2))


async def test_a_record_awaiting_its_acknowledgement_is_skipped() -> None:
    """It is completed; others that await their acknowledgement are delivered again."""
    async with running(Harness(max_records=3)) as harness:
        harness.responses = dict.fromkeys(range(3), AWAITING_ACK)
        harness.feed(0, 1, 2)
        await harness.clock.advance(1)
        assert harness.why() == ""
        await harness.clock.advance(6)
        assert harness.why() == "offset 0 waits for its explicit acknowledgement"
        skipped = asyncio.ensure_future(harness.pump.seeks.skip(P0, 1, "it is wrong"))
        await harness.clock.advance(1)
        assert skipped.result() == "skipped"
        harness.source.feed_again()
        await harness.clock.advance(1)
        assert harness.delivered == [[0, 1, 2], [0, 2]]
        assert not harness.pump.acknowledge(P0, 2, up_to=True)
        await harness.clock.advance(1)
        assert (harness.source.commits[P0], harness.pump.numbers()["skipped_by_hand"]) == (Committed(3), 1)


@pytest.mark.parametrize("turns", range(8))
async def test_a_pump_stops_at_the_moment_when_the_wait_of_a_skip_ends(turns: int) -> None:
    """A cancellation at that moment is not lost; otherwise the skip would continue with a write of minutes."""

    async def unblock(_: Record) -> None:
        await asyncio.Event().wait()

    async with running(Harness(hooks={"blocked_keys": SimpleNamespace(unblock=unblock)})) as harness:
        harness.free.clear()
        harness.feed(0, 1)
        await harness.clock.settle()
        harness.feed(2)
        skipped = asyncio.ensure_future(harness.pump.seeks.skip(P0, 2, "it is wrong"))
        await harness.clock.settle()
        harness.free.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        stopped = asyncio.ensure_future(harness.pump.stop())
        await asyncio.wait([stopped], timeout=1)
        assert stopped.done()
        await skipped
