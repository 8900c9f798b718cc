"""Explicit acknowledgements in the delivery core: single rules; their model has random events."""

from __future__ import annotations

import asyncio

from headrace.delivery.explicit_acks import AckRules
from headrace.delivery.outcomes import AWAITING_ACK, NOT_BEGUN
from headrace.records import Committed
from headrace.runtime import Deadline
from headrace.testing.pump_harness import P0, Harness, running


async def test_records_that_were_not_begun_before_a_revoke_are_not_failures() -> None:
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
        harness.feed_again()
        await harness.clock.advance(1)
        assert harness.delivered == [[0, 1, 2], [0, 2]]
        assert not harness.pump.acknowledge(P0, 2, up_to=True)
        await harness.clock.advance(1)
        assert (harness.commits[P0], harness.pump.numbers()["skipped_by_hand"]) == (Committed(3), 1)


async def test_the_commit_stays_behind_also_where_the_partition_was_empty() -> None:
    """The first known offset is the end of an empty partition."""
    async with running(Harness(hooks={"acks": AckRules(window=2)})) as harness:
        harness.pump.on_end(P0, harness.epoch, 5)
        harness.feed(5, 6, 7)
        await harness.clock.advance(1)
        assert harness.commits[P0] == Committed(6)
