"""Concurrency, fairness and progress of the three orders, under a clock that tests own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import pytest

from headrace.config.consumers import BatchConfig, DeliveryConfig
from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.records import Committed, Record, TopicPartition
from headrace_devkit.testing.pump_harness import P0, P1, Harness, MovingClock, running


async def test_a_busy_partition_leaves_slots_to_the_others() -> None:
    """A quarter of the slots is for idle partitions; without idle partitions none is reserved."""
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
        assert harness.source.commits == {P0: Committed(20), P1: Committed(20)}


@pytest.mark.parametrize("hangs", [False, True])
async def test_partitions_take_turns(hangs: bool) -> None:
    """Of two busy partitions, neither waits until the other has no records, also while a record of its own hangs."""
    async with running(Harness(ordering="key", max_in_flight=1 + hangs, max_records=1, clock=MovingClock())) as harness:
        harness.hold(*[0] * hangs)
        for partition, start in ((P0, 0), (P1, 1000)):
            harness.feed_keys("." * 100, start, partition)
        await harness.clock.advance(1)
        assert 20 < sum(d.partition is P0 for d in harness.deliveries[:100]) < 80
        assert max(len([*same]) for _, same in groupby(d.partition for d in harness.deliveries)) < 60


@pytest.mark.parametrize(
    ("ordering", "keys", "share"),
    [
        ("key", "a" * 40 + "b" * 30 + "." * 30, 0.4),
        ("key", "a" * 19 + "." * 81, None),
        ("key", "." * 100, None),
        ("key", "a" * 49, None),
        ("none", "a" * 100, None),
    ],
)
async def test_the_status_has_the_share_of_a_key_whose_records_wait_for_each_other(
    ordering: str, keys: str, share: float | None
) -> None:
    """Of what was received and is not completed; it is exact, and gone when the records are."""
    async with running(Harness(ordering=ordering, max_in_flight=1, max_records=1)) as harness:
        harness.free.clear()
        harness.feed_keys(keys)
        await harness.clock.settle()
        assert harness.pump.status().partitions[P0].key_share == share
        harness.free.set()
        await harness.clock.advance(1)
        assert harness.pump.status().partitions[P0].key_share is None


async def test_nothing_begins_too_far_ahead_of_a_record_in_flight() -> None:
    """So the offset map always fits; the first record is named, and once it is completed the partition continues."""
    async with running(Harness(ordering="none", max_records=1000)) as harness:
        harness.hold(0)
        harness.feed_keys(".")
        await harness.clock.settle()
        for start in range(1, SPAN_OFFSETS + 100, 1000):
            harness.feed_keys("." * 1000, start)
            await harness.clock.advance(1)
        assert max(offsets[-1] for offsets in harness.delivered) == SPAN_OFFSETS - 1
        await harness.clock.advance(10)
        assert "offset 0 is not completed" in harness.pump.readiness().reason
        assert len(harness.source.commits[P0].metadata) < 100
        harness.held.pop(0).set()
        await harness.clock.advance(1)
        assert harness.pump.readiness().ready
        assert harness.source.commits[P0] == Committed(SPAN_OFFSETS + 1001)


@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
async def test_a_delivery_waits_to_fill_up(ordering: str) -> None:
    """Until it is full or timed out; the time starts again with each delivery."""
    async with running(Harness(ordering=ordering, max_records=3, linger_seconds=2)) as harness:
        harness.feed_keys("a")
        await harness.clock.advance(1.5)
        assert harness.delivered == []
        harness.feed_keys("bcd", 1)
        await harness.clock.advance(1)
        assert harness.delivered == [[0, 1, 2]]
        await harness.clock.advance(1.5)
        assert harness.delivered[1:] == [[3]]
        harness.feed_keys("aa", 4)
        await harness.clock.advance(2.5)
        assert harness.delivered[2:] == ([[4], [5]] if ordering == "key" else [[4, 5]])  # a key has waited once


class SharedLimit:
    """A pump, and others that share its destination and limit."""

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
                shares_with=self.pumps[0],
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
    """During replays a new record is delivered at once, and a busy pump leaves the others their share."""
    shared = SharedLimit(4, 2)
    live, *others = shared.places
    await shared.start()
    shared.feed(1, 2)
    await shared.harness.clock.advance(9.5)
    assert sorted(shared.in_flight[place] for place in others) == [1, 2]
    shared.feed(0)
    await shared.harness.clock.settle()
    assert shared.in_flight[live] == 1
    await shared.harness.clock.advance(30)
    assert 30 <= shared.delivered[live] <= 60
    await shared.pumps[0].stop()
    await shared.harness.clock.advance(2)
    assert sum(shared.in_flight[place] for place in others) == 4  # none stays reserved
    await shared.stop()


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
async def test_max_in_flight_holds_for_all_pumps_of_a_consumer_together(max_in_flight: int) -> None:
    """Retry topics, replays and redrives share the limit, and all of them make progress."""
    shared = SharedLimit(max_in_flight, 3)
    await shared.start()
    shared.feed(0, 1, 2, 3)
    await shared.harness.clock.advance(60)
    assert shared.most == max_in_flight
    assert min(shared.delivered[place] for place in shared.places) >= 10
    await shared.stop()
