"""Explicit acknowledgements in the delivery core: single rules; their model has random events."""

from __future__ import annotations

import asyncio

from headrace.delivery.explicit_acks import AckRules
from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.delivery.outcomes import HELD, NOT_BEGUN
from headrace.records import Committed
from headrace.runtime import Deadline
from headrace.testing.pump_harness import P0, Harness, running


async def test_held_records_are_bounded_and_named() -> None:
    """The partition stops a span of the offset map behind the first, readiness says which; an ack lets it continue."""
    async with running(Harness(max_records=10_000)) as harness:
        harness.responses = dict.fromkeys(range(SPAN_OFFSETS + 10), HELD)
        harness.feed(*range(SPAN_OFFSETS + 10))
        for _ in range(9):
            await harness.clock.advance(1)
        assert harness.pump.numbers()["held"] == harness.released == SPAN_OFFSETS
        assert "offset 0 waits for its explicit acknowledgement" in harness.pump.readiness().reason
        assert not harness.pump.acknowledge(P0, 99, up_to=True)
        await harness.clock.advance(1)
        assert (harness.pump.numbers()["held"], harness.commits[P0].offset) == (SPAN_OFFSETS + 10 - 100, 100)
        assert harness.pump.readiness().ready


async def test_records_given_back_before_a_revoke_are_neither_failures_nor_ended() -> None:
    """The worker had not begun them."""
    async with running(Harness(max_records=4)) as harness:
        harness.responses = {2: NOT_BEGUN, 3: NOT_BEGUN}
        harness.free.clear()
        harness.feed(0, 1, 2, 3)
        await harness.clock.advance(0)
        revoked = asyncio.ensure_future(harness.pump.on_revoked([P0], Deadline(harness.clock, 5)))
        await harness.clock.advance(0)
        harness.free.set()
        await harness.clock.advance(0)
        assert revoked.result() == {P0: Committed(2)}
        assert (harness.pump.counts.refusals, harness.pump.numbers()["breaker_open"], harness.letters) == (0, 0, [])


async def test_a_held_record_is_skipped_by_hand() -> None:
    """It ends; what else waits for its acknowledgement is delivered again."""
    async with running(Harness(max_records=3)) as harness:
        harness.responses = dict.fromkeys(range(3), HELD)
        harness.feed(0, 1, 2)
        await harness.clock.advance(1)
        assert harness.why() == ""
        await harness.clock.advance(6)
        assert harness.why() == "offset 0 waits for its explicit acknowledgement"
        skipped = asyncio.ensure_future(harness.pump.moves.skip(P0, 1, "it is wrong"))
        await harness.clock.advance(1)
        assert skipped.result() == "skipped"
        harness.feed_again()
        await harness.clock.advance(1)
        assert harness.delivered == [[0, 1, 2], [0, 2]]
        assert not harness.pump.acknowledge(P0, 2, up_to=True)
        await harness.clock.advance(1)
        assert (harness.commits[P0], harness.pump.numbers()["skipped_by_hand"]) == (Committed(3), 1)


async def test_what_was_acknowledged_in_flight_is_committed_though_its_handler_is_too_late() -> None:
    """Its delivery is abandoned at the deadline, and the acknowledgement counts."""
    async with running(Harness()) as harness:
        harness.free.clear()
        harness.feed(0, 1)
        await harness.clock.advance(0)
        assert not harness.pump.acknowledge(P0, 0, up_to=True)
        assert await harness.pump.on_revoked([P0], Deadline(harness.clock, 0)) == {P0: Committed(1)}


async def test_the_commit_stays_behind_also_where_the_partition_was_empty() -> None:
    """The first known offset is the end of an empty partition."""
    async with running(Harness(hooks={"acks": AckRules(window=2)})) as harness:
        harness.pump.on_end(P0, harness.epoch, 5)
        harness.feed(5, 6, 7)
        await harness.clock.advance(1)
        assert harness.commits[P0] == Committed(6)
