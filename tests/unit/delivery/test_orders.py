"""Concurrency, fairness and progress of the three orders, under a clock that tests own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from headrace.config.consumers import BatchConfig, DeliveryConfig
from headrace.delivery.limit import AdaptiveLimit, SharedSlots
from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.records import Committed, Record, TopicPartition
from headrace.runtime import Deadline
from headrace.testing.pump_harness import P0, P1, RETRY, Harness, running


async def test_a_slow_key_holds_only_itself() -> None:
    """The others go on as far as they come, and only what has ended is committed."""
    async with running(Harness(ordering="key", max_records=1)) as harness:
        harness.hold(0)
        harness.feed_keys("abacb")
        await harness.clock.advance(1)
        assert sorted(harness.delivered) == [[0], [1], [3], [4]]
        assert harness.commits[P0].offset == 0
        harness.held.pop(0).set()
        await harness.clock.advance(1)
        assert (harness.delivered[-1], harness.commits[P0]) == ([2], Committed(5))


async def test_records_without_key_wait_for_nothing() -> None:
    """They are no records of one key."""
    async with running(Harness(ordering="key", max_records=10)) as harness:
        harness.feed_keys("...")
        await harness.clock.advance(1)
        assert harness.delivered == [[0, 1, 2]]


async def test_without_order_nothing_waits() -> None:
    """A partition fills every place, and a record that fails is passed by all others but not by the commit."""
    async with running(Harness(ordering="none", max_in_flight=3, max_records=1)) as harness:
        harness.responses[0] = RETRY
        harness.hold(1, 2, 3)
        harness.feed_keys("aaaaaa")
        await harness.clock.settle()
        assert harness.under_way == 3
        harness.held[2].set()
        await harness.clock.settle()
        assert harness.delivered == [[0], [3], [1], [2], [4], [5]]
        harness.responses.clear()
        await harness.clock.advance(20)
        assert (harness.delivered[6:], harness.commits[P0].offset) == ([[0]], 1)


async def test_a_busy_partition_leaves_places_to_the_others() -> None:
    """A quarter of the places is for partitions with nothing under way; alone or among busy ones none is kept."""
    async with running(Harness(ordering="none", max_in_flight=8, max_records=1)) as harness:
        harness.free.clear()
        harness.feed_keys("a" * 20)
        await harness.clock.settle()
        assert harness.under_way == 7
        harness.feed_keys("a" * 20, partition=P1)
        await harness.clock.settle()
        assert [d.partition for d in harness.deliveries].count(P1) == 1
        harness.free.set()
        await harness.clock.advance(1)
        assert harness.most_under_way == 8
        assert harness.commits == {P0: Committed(20), P1: Committed(20)}


async def test_partitions_take_turns() -> None:
    """Of two partitions with much to do none waits for the end of the other."""
    async with running(Harness(ordering="key", max_in_flight=1, max_records=1)) as harness:
        for partition in (P0, P1):
            harness.feed_keys("abcd", partition=partition)
        await harness.clock.advance(1)
        assert [d.partition.partition for d in harness.deliveries][:6] == [0, 0, 1, 0, 1, 0]


async def test_nothing_is_begun_too_far_ahead_of_an_unfinished_record() -> None:
    """So the offset map always fits; its head is named, its retries go on, and with it everything goes on."""
    async with running(Harness(ordering="none", max_records=1000)) as harness:
        harness.hold(0)
        harness.feed_keys(".")
        await harness.clock.settle()
        for start in range(1, SPAN_OFFSETS + 100, 1000):
            harness.feed_keys("." * 1000, start)
            await harness.clock.advance(1)
        assert max(offsets[-1] for offsets in harness.delivered) == SPAN_OFFSETS - 1
        await harness.clock.advance(10)
        assert "offset 0 has not ended" in harness.pump.readiness().reason
        assert len(harness.commits[P0].metadata) < 100
        harness.held.pop(0).set()
        await harness.clock.advance(1)
        assert harness.pump.readiness().ready
        assert harness.commits[P0] == Committed(SPAN_OFFSETS + 1001)


async def test_what_a_new_owner_gets_of_what_had_ended_is_counted() -> None:
    """The map is read on assignment; what it has ended is given back, not delivered."""
    async with running(Harness(ordering="key", max_records=1)) as harness:
        harness.hold(0, 3)
        harness.feed_keys("abcdefg")
        await harness.clock.advance(1)
        commits = await harness.pump.on_revoked([P0], Deadline(harness.clock, 0))
    async with running(Harness(ordering="key", max_records=1)) as after:
        after.pump.on_assigned({P0: 3}, commits)
        after.feed_keys("abcdefg")
        await after.clock.advance(1)
        assert (after.delivered, after.pump.counts.already_completed) == ([[0], [3]], 5)


@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
async def test_a_delivery_waits_to_fill_up(ordering: str) -> None:
    """Until it is full, or the time is over, which begins anew with each delivery."""
    async with running(Harness(ordering=ordering, max_records=3, linger_seconds=2)) as harness:
        harness.feed_keys("a")
        await harness.clock.advance(1.5)
        assert harness.delivered == []
        harness.feed_keys("bcd", 1)
        await harness.clock.advance(1)
        assert harness.delivered == [[0, 1, 2]]
        await harness.clock.advance(1.5)
        assert harness.delivered[1:] == [[3]]


async def test_in_order_of_partitions_what_a_mixed_result_leaves_is_delivered_one_after_the_other() -> None:
    """One record failed and others by one response: several batches are left, and one is in flight at a time."""
    async with running(Harness(ordering="partition", max_records=3)) as harness:
        together = Reply("HTTP 500", "", 500)
        harness.responses = {0: RETRY, 1: together, 2: together}
        harness.feed_keys("abc")
        await harness.clock.settle()
        harness.responses.clear()
        harness.free.clear()
        for _ in range(10):
            await harness.clock.advance(5)
            harness.free.set()
            await harness.clock.settle()
            harness.free.clear()
        assert (harness.commits[P0], harness.most_under_way) == (Committed(3), 1)
        harness.free.set()


class Crowd:
    """A pump, and others beside it that deliver to the same destination."""

    def __init__(self, max_in_flight: int, beside: int) -> None:
        self.harness = Harness(ordering="none", max_in_flight=max_in_flight, max_records=1)
        self.harness.deliver = self.deliver  # type: ignore[method-assign]
        self.fed = 0
        self.in_flight: Counter[TopicPartition] = Counter()
        self.delivered: Counter[TopicPartition] = Counter()
        self.most = 0
        config = DeliveryConfig(ordering="none", batch=BatchConfig(max_records=1), max_in_flight=99)
        self.places = [TopicPartition("t", number) for number in range(beside + 1)]
        self.pumps = [self.harness.pump]
        for number in range(beside):
            pump = Pump(
                f"job {number}",
                "g",
                self.harness,
                None,
                delivery=config,
                clock=self.harness.clock,
                shares_with=self.harness.pump,
            )
            pump.connect(self.harness)
            self.pumps.append(pump)

    async def start(self) -> None:
        for pump, place in zip(self.pumps, self.places, strict=True):
            await pump.start()
            pump.on_assigned({place: 1}, {place: Committed(0)})

    async def stop(self) -> None:
        for pump in self.pumps:
            await pump.stop()

    def feed(self, *numbers: int, records: int = 1000) -> None:
        for number in numbers:
            place = self.places[number]
            news = [Record(*place, o, 0, None, b"v") for o in range(self.fed, self.fed + records)]
            self.pumps[number].on_records(place, 1, news)
        self.fed += records

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.in_flight[delivery.partition] += 1
        self.most = max(self.most, self.in_flight.total())
        try:
            await self.harness.clock.sleep(1)
        finally:
            self.in_flight[delivery.partition] -= 1
        self.delivered[delivery.partition] += 1
        return [ACK]


async def test_one_slot_is_reserved_for_live_delivery() -> None:
    """Whatever is replayed, a record that comes is delivered at once; what is busy leaves its share to the others."""
    crowd = Crowd(4, 2)
    live, *others = crowd.places
    await crowd.start()
    crowd.feed(1, 2)
    await crowd.harness.clock.advance(9.5)
    assert sorted(crowd.in_flight[place] for place in others) == [1, 2]
    crowd.feed(0)
    await crowd.harness.clock.settle()
    assert crowd.in_flight[live] == 1
    await crowd.harness.clock.advance(30)
    assert 30 <= crowd.delivered[live] <= 60
    await crowd.pumps[1].stop()
    await crowd.pumps[2].stop()
    await crowd.harness.clock.advance(1)
    assert crowd.in_flight[live] == 4
    await crowd.stop()


async def test_a_call_beside_the_pump_waits_for_a_slot_of_its_own() -> None:
    """So a redelivery of dead letters stays within the bound; one that is cancelled leaves no slot taken."""
    crowd = Crowd(2, 0)
    limit = crowd.harness.pump.breaker.limit
    slots, held = SharedSlots(limit), 0

    async def call() -> None:
        nonlocal held
        async with slots.slot():
            held += 1
            assert crowd.in_flight.total() + held <= 2
            await crowd.harness.clock.sleep(1)
            held -= 1

    await crowd.start()
    crowd.feed(0)
    calls = [asyncio.ensure_future(call()) for _ in range(5)]
    calls[3].cancel()
    await crowd.harness.clock.advance(0.5)
    next(each for each in calls if not each.done()).cancel()
    await crowd.harness.clock.advance(30)
    assert all(each.done() for each in calls)
    assert crowd.in_flight.total() == limit.in_flight == 2
    await crowd.stop()


def test_no_slot_stays_reserved_for_a_live_pump_that_has_left() -> None:
    """A replay that outlives its consumer uses the whole limit."""
    limit, live, replay = AdaptiveLimit(2), SharedSlots(AdaptiveLimit(1)), SharedSlots(AdaptiveLimit(1))
    limit.join(live, live=True)
    limit.join(replay)
    assert limit.free_for(replay) == 1
    limit.leave(live)
    assert limit.free_for(replay) == 2


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
async def test_max_in_flight_holds_for_all_pumps_of_a_consumer_together(max_in_flight: int) -> None:
    """Retry topics, replays and redrives come on top of nothing, and all of them get on."""
    crowd = Crowd(max_in_flight, 3)
    await crowd.start()
    crowd.feed(0, 1, 2, 3)
    await crowd.harness.clock.advance(60)
    assert crowd.most == max_in_flight
    assert min(crowd.delivered[place] for place in crowd.places) >= 10
    await crowd.stop()
