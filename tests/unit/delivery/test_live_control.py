"""Pauses, seeks, changed settings and the status of a pump, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.delivery.outcomes import Delivery, Reply
from headrace.delivery.status import SettingsInForce
from headrace.errors import InvalidRequest, OffsetsKeptElsewhere
from headrace.records import Committed
from headrace.runtime.telemetry.correlation import caller, correlation_id
from headrace.runtime.telemetry.tracing import current_span
from headrace_devkit.testing.pump_harness import BURY, P0, P1, RETRY, Harness, running

# Pause ---------------------------------------------------------------------------------------------------------------


async def test_a_pause_stops_retries_and_dead_letters() -> None:
    """Neither a retry nor a dead letter that failed before is attempted before the end of the pause."""
    async with running(Harness()) as harness:
        harness.dead_letters.is_down, harness.responses[0] = True, BURY
        harness.responses[5] = RETRY
        harness.feed(0)
        harness.feed(5, partition=P1)
        await harness.clock.settle()
        harness.pump.pause([P0, P1], "paused")
        harness.dead_letters.is_down = False
        await harness.clock.advance(60)
        assert (harness.delivered, harness.dead_letters.offsets) == ([[0], [5]], [])
        harness.pump.resume([P0, P1])
        await harness.clock.advance(60)
        assert harness.dead_letters.offsets == [0, 5]


async def test_deliveries_do_not_belong_to_the_request_that_ended_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those behind them: their log lines and the traces of their records would be those of an operator.

    The pump of a job keeps the caller of the job, for the audit, and not the span of the request for the job.
    """
    seen: list[tuple[str, str, Any]] = []
    request: Any = SimpleNamespace()
    caller.set("of the job")
    current_span.set(request)
    async with running(Harness(max_records=1)) as harness:
        deliver = harness.deliver

        async def see(delivery: Delivery) -> Sequence[Reply]:
            seen.append((caller.get(), correlation_id.get(), current_span.get()))
            return await deliver(delivery)

        async def resume() -> None:
            for each in (caller, correlation_id):
                each.set("of the operator")
            harness.pump.resume(None)

        monkeypatch.setattr(harness.pump._deliverer, "_destination", SimpleNamespace(deliver=see))
        harness.pump.pause(None, "paused")
        harness.feed(0, 1)
        await asyncio.create_task(resume())
        await harness.clock.settle()
        harness.feed(2)
        await harness.clock.settle()
    assert seen == [("of the job", "", None)] * 3


# Seek ----------------------------------------------------------------------------------------------------------------


async def test_a_seek_waits_for_what_is_in_flight_and_begins_in_a_new_epoch() -> None:
    """Nothing new begins meanwhile; the new offset is committed without a map."""
    async with running(Harness()) as harness:
        harness.free.clear()
        harness.feed(10, 11, 12, 13)
        await harness.clock.settle()
        seek = asyncio.create_task(harness.pump.seeks.seek(P0, 5))
        await harness.clock.settle()
        assert harness.why() == "a seek to offset 5 waits for deliveries in flight"
        harness.free.set()
        assert await seek
        assert (harness.delivered, harness.source.seeks) == ([[10, 11]], [(P0, 1, 5)])
        harness.feed(5, 6)
        await harness.clock.advance(1)
        assert harness.delivered == [[10, 11], [5, 6]]
        assert harness.deliveries[1].epoch == 3
        assert harness.source.commits[P0] == Committed(7)


async def test_seeks_of_a_partition_run_in_turn_even_if_their_callers_are_cancelled() -> None:
    """Both happen, in their order; a cancelled caller leaves no stalled partition."""
    async with running(Harness()) as harness:
        harness.free.clear()
        harness.feed(0)
        await harness.clock.settle()
        first, second = (asyncio.create_task(harness.pump.seeks.seek(P0, offset)) for offset in (5, 6))
        await harness.clock.settle()
        first.cancel()
        harness.free.set()
        assert await second
        assert [offset for _, _, offset in harness.source.seeks] == [5, 6]
        assert harness.why() == ""


async def test_a_group_whose_offsets_the_backend_stores_cannot_seek() -> None:
    """The rejected seek changes nothing: the partition continues."""
    async with running(Harness()) as harness:
        harness.source.keeps_offsets_elsewhere = True
        with pytest.raises(OffsetsKeptElsewhere):
            await harness.pump.seeks.seek(P0, 5)
        harness.feed(0)
        await harness.clock.settle()
        assert harness.delivered == [[0]]


@pytest.mark.parametrize("offset", [-1, 2**63])
async def test_an_invalid_offset_is_rejected(offset: int) -> None:
    """It would end the client, and the client of each next owner of the partition."""
    async with running(Harness()) as harness:
        with pytest.raises(InvalidRequest, match="not a valid offset"):
            await harness.pump.seeks.seek(P0, offset)
        assert (harness.source.seeks, harness.why()) == ([], "")


# Change --------------------------------------------------------------------------------------------------------------


async def test_a_rate_holds_for_any_delivery_size_and_can_be_removed() -> None:
    """Ten a second over all partitions, and at most ten per delivery; without a rate all are delivered at once."""
    async with running(Harness()) as harness:
        harness.pump.change(msgspec.structs.replace(harness.pump.settings, rate_records=10, max_records=100))
        harness.feed(*range(500))
        harness.feed(*range(500), partition=P1)
        await harness.clock.advance(60)
        assert 580 <= sum(len(offsets) for offsets in harness.delivered) <= 620
        assert max(len(offsets) for offsets in harness.delivered) == 10
        assert {harness.why(), harness.why(P1)} == {"deliveries are limited to 10 records a second"}
        assert harness.pump.settings == SettingsInForce(10, 100, 102_400, 0, 64)
        harness.pump.change(msgspec.structs.replace(harness.pump.settings, rate_records=None))
        await harness.clock.advance(1)
        assert harness.pump.numbers()["delivered"] == 1000


async def test_a_changed_size_applies_to_new_deliveries() -> None:
    """Records, bytes, and how long a delivery waits for more, even if records already wait."""
    async with running(Harness()) as harness:
        harness.feed(*range(4))
        await harness.clock.settle()
        harness.pump.change(msgspec.structs.replace(harness.pump.settings, max_records=3, linger_seconds=5))
        harness.feed(4, 5)
        await harness.clock.advance(1)
        assert harness.delivered == [[0, 1], [2, 3]]
        harness.feed(6)
        await harness.clock.settle()
        assert harness.delivered[2:] == [[4, 5, 6]]
        harness.feed(7, 8)
        await harness.clock.settle()
        harness.pump.change(msgspec.structs.replace(harness.pump.settings, linger_seconds=0, max_bytes=1))
        await harness.clock.settle()
        assert harness.delivered[3:] == [[7], [8]]


async def test_max_in_flight_can_be_raised_and_lowered() -> None:
    """Fewer: deliveries in flight finish, and nothing begins before a slot is free. More: at once."""
    async with running(Harness(ordering="none", max_records=1, max_in_flight=4)) as harness:
        harness.pump.on_lost([P1])
        harness.free.clear()
        harness.feed(*range(20))
        await harness.clock.settle()
        assert len(harness.deliveries) == 4
        harness.pump.change(msgspec.structs.replace(harness.pump.settings, max_in_flight=6))
        await harness.clock.settle()
        assert len(harness.deliveries) == 6
        harness.pump.change(msgspec.structs.replace(harness.pump.settings, max_in_flight=1))
        await harness.clock.settle()
        assert (len(harness.deliveries), harness.pump.settings.max_in_flight) == (6, 1)
        harness.free.set()
        await harness.clock.settle()
        harness.free.clear()
        harness.feed(*range(20, 30))
        harness.pump.on_assigned({P1: 3}, {})
        harness.feed(0, partition=P1)
        await harness.clock.settle()
        assert harness.pump.breaker.limit.in_flight == 1
        assert harness.why(P1) == "limit reached: all 1 deliveries in flight are of other partitions"


# Status --------------------------------------------------------------------------------------------------------------


async def test_the_status_names_the_cause_of_a_stall() -> None:
    """A slow handler, a backend that is down, or a problem that the consumer reports."""
    async with running(Harness()) as harness:
        harness.free.clear()
        harness.feed(0)
        await harness.clock.advance(4)
        assert harness.why() == ""
        await harness.clock.advance(3)
        assert harness.why().startswith("the handler is slow: no response for offset 0 after 7 s, attempt 1")
        harness.down = True
        harness.free.set()
        await harness.clock.settle()
        assert harness.why().startswith("the breaker of pump is open until")
        assert harness.why().endswith("connection refused")
        assert harness.pump.status().breaker.state == "open"
        harness.down = False
        await harness.clock.advance(60)
        assert harness.why() == ""
        harness.source.paused = "the bounds of flow are reached"
        assert harness.why() == "the bounds of flow are reached"
        harness.source.says = "offsets 3 to 5 are gone"
        assert harness.why() == "offsets 3 to 5 are gone"
        harness.pump.pause([P0], "paused")
        assert harness.why() == "paused"


async def test_the_start_of_a_log_is_committed_before_a_record_is_completed() -> None:
    """A topic that was created again is committed at 0 and may start higher, which would be a gap after a crash."""
    async with running(Harness()) as harness:
        harness.pump.on_lost([P0])
        harness.pump.on_assigned({P0: 3}, {P0: Committed(0)})
        harness.free.clear()
        harness.feed(100, 101)
        await harness.clock.advance(1)
        assert (harness.source.commits, len(harness.deliveries)) == ({P0: Committed(100)}, 1)
        harness.free.set()
