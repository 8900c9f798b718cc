"""A pump whose records are skipped by hand, under a clock that tests own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.delivery.outcomes import ACK, Delivery, Outcome, Reply
from headrace.errors import DeadLetterFailed, DestinationUnavailable
from headrace.records import Committed, Record, TopicPartition
from headrace.runtime import Deadline
from headrace.testing.pump_harness import BURY, P0, P1, Harness, running


async def skip(harness: Harness, *offsets: int) -> list[str]:
    """Skip records of the first partition, and let the source hand over what it holds again."""
    epoch = harness.epoch
    said = await asyncio.gather(*[harness.pump.moves.skip(P0, offset, "it is wrong") for offset in offsets])
    if harness.epoch > epoch:
        harness.feed_again()
    await harness.clock.settle()
    return list(said)


async def test_a_late_response_means_nothing() -> None:
    """A destination that ignores the cancellation brings results of a delivery that is fenced."""
    async with running(Harness()) as harness:

        async def stubborn(delivery: Delivery) -> Sequence[Reply]:
            harness.deliveries.append(delivery)
            try:
                await harness.free.wait()
            except asyncio.CancelledError:
                if len(harness.deliveries) % 2:
                    raise DestinationUnavailable("cancelled") from None
            return [ACK] * len(delivery.records)

        harness.deliver = stubborn  # type: ignore[method-assign]
        for first in (0, 10):
            harness.free.clear()
            harness.feed(first, first + 1)
            await harness.clock.settle()
            await skip(harness, first)
            harness.free.set()
            await harness.clock.advance(30)
        assert harness.commits[P0] == Committed(12)


async def test_records_that_are_skipped_together_are_skipped_one_after_the_other() -> None:
    """Those that come while the first is skipped wait until their record is there again."""
    async with running(Harness()) as harness:
        harness.pump.pause([P0], "paused")
        harness.feed(0, 1, 2, 3)
        assert await skip(harness, 1, 2) == ["skipped", "will be skipped"]
        harness.feed_again()
        harness.pump.resume([P0])
        await harness.clock.advance(1)
        assert (harness.delivered, harness.commits[P0]) == ([[0, 3]], Committed(4))


async def test_a_skip_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    """What has ended, or lies in a hole, has ended already; the log and the audit have the reason."""
    ended: list[tuple[int, Outcome, str]] = []

    def on_ended(records: Sequence[Record], size: int, how: Outcome, replies: Sequence[Reply], replay: str) -> None:
        ended.extend((record.offset, how, reply.error) for record, reply in zip(records, replies, strict=False))

    async with running(Harness(hooks={"on_ended": on_ended})) as harness:
        harness.feed(5, 9)
        await harness.clock.advance(1)
        assert await skip(harness, 4, 5, 7) == ["ended already"] * 3
        assert await harness.pump.moves.skip(TopicPartition("t", 9), 1, "why not") == "not assigned"
        assert await harness.pump.moves.skip(P1, 1, "why not") == "will be skipped"
        harness.feed(1, partition=P1)
        await harness.clock.settle()
        assert "t-1: offset 1 is skipped by hand: why not" in caplog.text
        assert ended == [(1, Outcome.SKIPPED_BY_HAND, "why not")]


@pytest.mark.parametrize("letters", [{}, {"without_letters": True}], ids=["not written", "off"])
async def test_a_record_is_skipped_whose_dead_letter_cannot_be_written(letters: Any) -> None:
    """At once, whatever is left of the pause; the others are delivered again."""
    async with running(Harness(**letters)) as harness:
        harness.letters_down, harness.responses = True, {0: BURY, 1: BURY}
        harness.feed(0, 1, 2)
        await harness.clock.advance(10)
        assert harness.why()
        await skip(harness, 0)
        await harness.clock.advance(10)
        assert "offset 1 failed" in harness.why() if letters else harness.why() == "no room"
        await skip(harness, 1)
        await harness.clock.advance(1)
        assert (harness.delivered[-1][-1], harness.why(), harness.commits[P0]) == (2, "", Committed(3))
        assert harness.pump.readiness().ready


async def test_a_blocked_key_is_unblocked_before_a_skipped_record_has_ended() -> None:
    """Repeated until it is written; what is committed never passes the record before that, nor does a crash."""
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
        assert (harness.commits, harness.why()) == ({}, "blocked keys are not written")
        down = False
        await harness.clock.advance(2)
        assert await skipped == ["skipped"]
        harness.pump.resume([P0])
        await harness.clock.advance(1)
        assert (unblocked, harness.delivered, harness.commits[P0]) == ([0], [[1]], Committed(2))


@pytest.mark.parametrize("way", ["lost", "revoked"])
async def test_a_key_is_unblocked_when_its_partition_is_given_up(way: str) -> None:
    """What was skipped then has not ended here: nothing is committed of it, and the pump continues."""
    written = asyncio.Event()

    async def unblock(_: Record) -> None:
        await written.wait()

    async with running(Harness(hooks={"blocked_keys": SimpleNamespace(unblock=unblock)})) as harness:
        harness.pump.pause([P0], "paused")
        harness.feed(0)
        skipped = asyncio.ensure_future(harness.pump.moves.skip(P0, 0, "it is wrong"))
        await harness.clock.settle()
        if way == "lost":
            harness.pump.on_lost([P0])
        else:
            assert await harness.pump.on_revoked([P0], Deadline(harness.clock, 5)) == {P0: Committed(0)}
        written.set()
        await harness.clock.advance(1)
        assert (await skipped, harness.pump.numbers()["skipped_by_hand"], harness.commits) == ("not assigned", 0, {})


async def test_a_skip_while_a_partition_is_sought_counts_where_it_begins() -> None:
    """What is drained then is gone; the skip waits for the record to come again."""
    async with running(Harness()) as harness:
        harness.free.clear()
        harness.feed(0, 1)
        await harness.clock.settle()
        seek = asyncio.create_task(harness.pump.moves.seek(P0, 1))
        await harness.clock.settle()
        assert [await harness.pump.moves.skip(P0, offset, "it is wrong") for offset in (1, 3)] == [
            "will be skipped"
        ] * 2
        harness.feed(2, 3)
        harness.free.set()
        assert await seek
        for _ in range(3):
            harness.feed_again()
            await harness.clock.settle()
        await harness.clock.advance(1)
        assert harness.delivered[1:] == [[2]]
        assert harness.pump.numbers()["skipped_by_hand"] == 2


async def test_a_skip_goes_with_its_assignment() -> None:
    """Another process may have skipped it, or the group was moved back; the control table repeats the command."""
    async with running(Harness()) as harness:
        assert await skip(harness, 1) == ["will be skipped"]
        harness.pump.on_lost([P0])
        harness.pump.on_assigned({P0: 3}, {})
        harness.feed(0, 1)
        await harness.clock.settle()
        assert harness.delivered == [[0, 1]]


async def test_a_skip_too_far_ahead_for_an_offset_map_waits_until_it_is_not() -> None:
    """After a hole of the log, while the first record hangs; what is committed stays writable all the while."""
    async with running(Harness(ordering="none")) as harness:
        harness.free.clear()
        harness.feed(0, 10, 30_000, 30_001, 60_000)
        await harness.clock.settle()
        assert await skip(harness, 30_000, 60_000) == ["will be skipped"] * 2
        assert harness.pump.lanes[P0].tracker.commit == Committed(0)
        harness.free.set()
        for _ in range(3):
            await harness.clock.advance(1)
            harness.feed_again()
        await harness.clock.advance(1)
        assert {0, 10, 30_001} == {offset for offsets in harness.delivered for offset in offsets}
        assert (harness.pump.numbers()["skipped_by_hand"], harness.commits[P0]) == (2, Committed(60_001))


async def test_a_seek_ends_the_skips_that_wait() -> None:
    """They were meant for what would have come; a record that is to come again must not be skipped once more."""
    async with running(Harness()) as harness:
        assert await skip(harness, 3) == ["will be skipped"]
        harness.feed(0, 1)
        await harness.clock.settle()
        assert await harness.pump.moves.seek(P0, 0)
        harness.feed_again()
        harness.feed(2, 3)
        await harness.clock.settle()
        assert harness.delivered == [[0, 1], [0, 1], [2, 3]]


@pytest.mark.parametrize("turns", range(8))
async def test_a_pump_stops_though_what_a_skip_waits_for_ends_at_that_moment(turns: int) -> None:
    """The cancellation that meets the end of the wait counts; else the skip would go on, to a write of minutes."""

    async def unblock(_: Record) -> None:
        await asyncio.Event().wait()

    async with running(Harness(hooks={"blocked_keys": SimpleNamespace(unblock=unblock)})) as harness:
        harness.free.clear()
        harness.feed(0, 1)
        await harness.clock.settle()
        harness.feed(2)
        skipped = asyncio.ensure_future(harness.pump.moves.skip(P0, 2, "it is wrong"))
        await harness.clock.settle()
        harness.free.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        stopped = asyncio.ensure_future(harness.pump.stop())
        await asyncio.wait([stopped], timeout=1)
        assert stopped.done()
        await skipped
