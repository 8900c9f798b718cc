"""The three orders, concurrency and fairness, under a clock that tests own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Any

import pytest

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.limit import AdaptiveLimit, SharedSlots
from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.delivery.protocols import ACK, DeadLetter, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.errors import DestinationUnavailable
from headrace.lifecycle import Deadline
from headrace.records import Committed, Record, TopicPartition
from headrace.testing import ManualClock

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
RETRY = Reply("E", "again")


class Bed:
    """A pump whose destination holds back chosen records until they are let go."""

    def __init__(self, **delivery: Any) -> None:
        self.clock = ManualClock()
        self.commits: dict[TopicPartition, Committed] = {}
        self.deliveries: list[Delivery] = []
        self.held: dict[int, asyncio.Event] = {}
        self.fails: dict[int, int] = {}
        """Offset to the attempts that fail."""
        self.down = False
        self.under_way = self.most_under_way = 0
        delivery = {"retry": RetryConfig(first_delay_seconds=1, max_delay_seconds=8), **delivery}
        config = DeliveryConfig(**delivery)
        self.pump = Pump("pump", "g", self, None, delivery=config, clock=self.clock, chance=Random(1))
        self.pump.connect(self)

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.deliveries.append(delivery)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            for record in delivery.records:
                if held := self.held.get(record.offset):
                    await held.wait()
        finally:
            self.under_way -= 1
        if self.down:
            raise DestinationUnavailable("down")
        return [RETRY if delivery.attempt <= self.fails.get(r.offset, 0) else ACK for r in delivery.records]

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        raise AssertionError

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        pass

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        self.commits.update(offsets)

    def hold(self, *offsets: int) -> None:
        self.held.update({offset: asyncio.Event() for offset in offsets})

    def feed(self, keys: str, start: int = 0, partition: TopicPartition = P0) -> None:
        """Hand over one record per letter, which is its key; a dot means no key."""
        records = [
            Record(*partition, start + n, 0, None if key == "." else key.encode(), None) for n, key in enumerate(keys)
        ]
        self.pump.on_records(partition, self.pump.lanes[partition].tracker.epoch, records)

    def delivered(self) -> list[list[int]]:
        return [[record.offset for record in delivery.records] for delivery in self.deliveries]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def opened(bed: Bed, committed: Mapping[TopicPartition, Committed] | None = None) -> Bed:
    await bed.pump.start()
    bed.pump.on_assigned({P0: 1, P1: 2}, committed or {})
    return bed


async def test_a_slow_key_holds_only_itself() -> None:
    """The others go on as far as they come, and only what has ended is committed."""
    bed = await opened(Bed(ordering="key", batch=BatchConfig(max_records=1)))
    bed.hold(0)
    bed.feed("abacb")
    await bed.clock.advance(1)
    assert sorted(bed.delivered()) == [[0], [1], [3], [4]]
    assert bed.commits[P0].offset == 0
    bed.held.pop(0).set()
    await bed.clock.advance(1)
    assert bed.delivered()[-1] == [2]
    assert bed.commits[P0] == Committed(5)
    await bed.pump.stop()


async def test_a_delivery_in_order_of_keys_has_one_record_per_key() -> None:
    """So no record of a key can succeed while an earlier one failed; inside a delivery offsets ascend."""
    bed = await opened(Bed(ordering="key"))
    bed.feed("aabbcaa")
    await bed.clock.advance(1)
    assert bed.delivered() == [[0, 2, 4], [1, 3], [5], [6]]
    await bed.pump.stop()


async def test_a_delivery_in_order_of_keys_has_no_more_than_it_may_and_ascends() -> None:
    """A record that waited for its key comes after later ones of others, and goes before them in its delivery."""
    bed = await opened(Bed(ordering="key", max_in_flight=1, batch=BatchConfig(max_records=2)))
    bed.feed("aabc")
    await bed.clock.advance(1)
    assert bed.delivered() == [[0, 2], [1, 3]]
    await bed.pump.stop()
    bed = await opened(Bed(ordering="key", max_in_flight=1, batch=BatchConfig(max_bytes=10)))
    bed.pump.on_records(P0, 1, [Record(*P0, n, 0, b"%d" % n, None, size_bytes=4) for n in range(5)])
    await bed.clock.advance(1)
    assert bed.delivered() == [[0, 1], [2, 3], [4]]
    await bed.pump.stop()


async def test_a_failed_record_holds_only_its_key() -> None:
    """The later record of its key waits for the retry, all others do not, and nobody waits in its place."""
    bed = await opened(Bed(ordering="key", max_in_flight=1))
    bed.fails = {0: 2}
    bed.feed("abca")
    await bed.clock.settle()
    bed.feed("bd", 4)
    await bed.clock.settle()
    assert bed.delivered() == [[0, 1, 2], [4, 5]]
    await bed.clock.advance(20)
    assert bed.delivered()[2:] == [[0], [0], [3]]
    assert [d.attempt for d in bed.deliveries] == [1, 1, 2, 3, 1]
    assert bed.commits[P0] == Committed(6)
    await bed.pump.stop()


@pytest.mark.parametrize(("choice", "first"), [("unordered", [[0, 1, 2]]), ("ordered", [[0], [1], [2]])])
async def test_records_without_key_are_ordered_by_choice(choice: str, first: list[list[int]]) -> None:
    """They wait for nothing, or for each other like the records of a key."""
    bed = await opened(Bed(ordering="key", null_keys=choice))
    bed.feed("...")
    await bed.clock.advance(1)
    assert bed.delivered() == first
    await bed.pump.stop()


async def test_without_order_nothing_waits() -> None:
    """A partition fills every place, and a record that fails is passed by all others but not by the commit."""
    bed = await opened(Bed(ordering="none", max_in_flight=3, batch=BatchConfig(max_records=1)))
    bed.fails = {0: 1}
    bed.hold(1, 2, 3)
    bed.feed("aaaaaa")
    await bed.clock.settle()
    assert bed.under_way == 3
    bed.held[2].set()
    await bed.clock.settle()
    assert bed.delivered() == [[0], [3], [1], [2], [4], [5]]
    await bed.clock.advance(20)
    assert bed.delivered()[6:] == [[0]]
    assert bed.commits[P0].offset == 1
    await bed.pump.stop()


async def test_a_busy_partition_leaves_places_to_the_others() -> None:
    """A quarter of the places is for partitions with nothing under way; alone or among busy ones none is kept."""
    bed = await opened(Bed(ordering="none", max_in_flight=8, batch=BatchConfig(max_records=1)))
    bed.hold(*range(20))
    bed.feed("a" * 20)
    await bed.clock.settle()
    assert bed.under_way == 7
    bed.feed("a" * 20, partition=P1)
    await bed.clock.settle()
    assert [d.partition for d in bed.deliveries].count(P1) == 1
    for held in bed.held.values():
        held.set()
    await bed.clock.advance(1)
    assert bed.most_under_way == 8
    assert bed.commits == {P0: Committed(20), P1: Committed(20)}
    await bed.pump.stop()


async def test_partitions_take_turns() -> None:
    """Of two partitions with much to do none waits for the end of the other."""
    bed = await opened(Bed(ordering="key", max_in_flight=1, batch=BatchConfig(max_records=1)))
    bed.feed("abcd")
    bed.feed("abcd", partition=P1)
    await bed.clock.advance(1)
    assert [d.partition.partition for d in bed.deliveries][:6] == [0, 0, 1, 0, 1, 0]
    await bed.pump.stop()


async def test_nothing_is_begun_too_far_ahead_of_an_unfinished_record() -> None:
    """So the offset map always fits; its head is named, its retries go on, and with it everything goes on."""
    bed = await opened(Bed(ordering="none", batch=BatchConfig(max_records=1000, max_bytes=10**9)))
    bed.hold(0)
    bed.feed(".")
    await bed.clock.settle()
    for start in range(1, SPAN_OFFSETS + 100, 1000):
        bed.feed("." * 1000, start)
        await bed.clock.advance(1)
    assert max(offsets[-1] for offsets in bed.delivered()) == SPAN_OFFSETS - 1
    await bed.clock.advance(10)
    assert "offset 0 has not ended" in bed.pump.readiness().reason
    assert len(bed.commits[P0].metadata) < 100
    bed.held.pop(0).set()
    await bed.clock.advance(1)
    assert bed.pump.readiness().ready
    assert bed.commits[P0] == Committed(SPAN_OFFSETS + 1001)
    await bed.pump.stop()


async def test_a_new_owner_repeats_only_what_had_not_ended() -> None:
    """The map is read on assignment; what it has ended is counted and given back, not delivered."""
    bed = await opened(Bed(ordering="key", batch=BatchConfig(max_records=1)))
    bed.hold(0, 3)
    bed.feed("abcdefg")
    await bed.clock.advance(1)
    commits = await bed.pump.on_revoked([P0], Deadline(bed.clock, 0))
    assert bed.pump.counts.abandoned == 2
    await bed.pump.stop()
    after = await opened(Bed(ordering="key", batch=BatchConfig(max_records=1)), commits)
    after.feed("abcdefg")
    await after.clock.advance(1)
    assert after.delivered() == [[0], [3]]
    assert after.pump.counts.spared == 5
    assert after.commits[P0] == Committed(7)
    await after.pump.stop()


async def test_a_destination_that_is_down_is_tried_by_one_delivery_at_a_time() -> None:
    """Whatever was under way when it went down comes again, in turns with what is fresh; no attempt is used up."""
    bed = await opened(Bed(ordering="none", max_in_flight=4, batch=BatchConfig(max_records=1)))
    bed.hold(0, 1, 2)
    bed.feed("aaaaaaaa")
    await bed.clock.settle()
    assert bed.under_way == 3
    bed.down = True
    for offset in range(3):
        bed.held.pop(offset).set()
    await bed.clock.settle()
    assert len(bed.deliveries) == 3
    bed.most_under_way = 0
    await bed.clock.advance(60)
    assert bed.most_under_way == 1
    bed.down = False
    await bed.clock.advance(20)
    assert bed.commits[P0] == Committed(8)
    assert {d.attempt for d in bed.deliveries} == {1}
    await bed.pump.stop()


@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
async def test_a_delivery_waits_to_fill_up(ordering: str) -> None:
    """Until it is full, or the time is over."""
    batch = BatchConfig(max_records=3, linger_seconds=2)
    bed = await opened(Bed(ordering=ordering, batch=batch))
    bed.feed("a")
    await bed.clock.advance(1)
    assert bed.delivered() == []
    bed.feed("bc", 1)
    await bed.clock.settle()
    assert bed.delivered() == [[0, 1, 2]]
    bed.feed("d", 3)
    await bed.clock.advance(3)
    assert bed.delivered()[1:] == [[3]]
    await bed.pump.stop()


@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
async def test_the_wait_to_fill_up_begins_anew_with_each_delivery(ordering: str) -> None:
    """Or what arrives behind a full delivery would be delivered at the end of that one's time."""
    batch = BatchConfig(max_records=3, linger_seconds=2)
    bed = await opened(Bed(ordering=ordering, batch=batch))
    bed.feed("a")
    await bed.clock.advance(1.5)
    bed.feed("bcd", 1)
    await bed.clock.advance(1)
    assert bed.delivered() == [[0, 1, 2]]
    await bed.clock.advance(1.5)
    assert bed.delivered()[1:] == [[3]]
    await bed.pump.stop()


def test_in_order_of_partitions_what_a_mixed_result_leaves_is_delivered_one_after_the_other() -> None:
    """One record failed and others by one answer: several batches are left, and one is in flight at a time."""

    async def test() -> None:
        bed = await opened(Bed(ordering="partition", retry=RetryConfig(first_delay_seconds=1, max_delay_seconds=1)))
        together = Reply("HTTP 500", "", 500)
        first = True

        async def deliver(delivery: Delivery) -> Sequence[Reply]:
            nonlocal first
            bed.under_way += 1
            bed.most_under_way = max(bed.most_under_way, bed.under_way)
            await bed.clock.sleep(10)
            bed.under_way -= 1
            ends = [RETRY, together, together] if first else [ACK] * len(delivery.records)
            first = False
            return ends

        bed.deliver = deliver  # type: ignore[method-assign]
        bed.feed("abc")
        await bed.clock.advance(60)
        assert bed.commits[P0] == Committed(3)
        assert bed.most_under_way == 1
        await bed.pump.stop()

    run(test)


class Crowd:
    """A pump, and others beside it that deliver to the same destination."""

    def __init__(self, max_in_flight: int, beside: int) -> None:
        self.bed = Bed(ordering="none", max_in_flight=max_in_flight, batch=BatchConfig(max_records=1))
        self.bed.deliver = self.deliver  # type: ignore[method-assign]
        self.fed = 0
        self.in_flight: Counter[TopicPartition] = Counter()
        self.delivered: Counter[TopicPartition] = Counter()
        self.most = 0
        config = DeliveryConfig(ordering="none", batch=BatchConfig(max_records=1), max_in_flight=99)
        self.places = [TopicPartition("t", number) for number in range(beside + 1)]
        self.pumps = [self.bed.pump]
        for number in range(beside):
            pump = Pump(
                f"job {number}", "g", self.bed, None, delivery=config, clock=self.bed.clock, shares_with=self.bed.pump
            )
            pump.connect(self.bed)
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
            await self.bed.clock.sleep(1)
        finally:
            self.in_flight[delivery.partition] -= 1
        self.delivered[delivery.partition] += 1
        return [ACK]


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
async def test_max_in_flight_holds_for_all_pumps_of_a_consumer_together(max_in_flight: int) -> None:
    """Retry topics, replays and redrives come on top of nothing, and all of them get on."""
    crowd = Crowd(max_in_flight, 3)
    await crowd.start()
    crowd.feed(0, 1, 2, 3)
    await crowd.bed.clock.advance(60)
    assert crowd.most == max_in_flight
    assert min(crowd.delivered[place] for place in crowd.places) >= 10
    await crowd.stop()


async def test_one_slot_is_reserved_for_live_delivery() -> None:
    """Whatever is replayed, a record that comes is delivered at once; what is busy leaves its share to the others."""
    crowd = Crowd(4, 2)
    live, *others = crowd.places
    await crowd.start()
    crowd.feed(1, 2)
    await crowd.bed.clock.advance(9.5)
    assert sorted(crowd.in_flight[place] for place in others) == [1, 2]
    crowd.feed(0)
    await crowd.bed.clock.settle()
    assert crowd.in_flight[live] == 1
    await crowd.bed.clock.advance(30)
    assert 30 <= crowd.delivered[live] <= 60
    await crowd.pumps[1].stop()
    await crowd.pumps[2].stop()
    await crowd.bed.clock.advance(1)
    assert crowd.in_flight[live] == 4
    await crowd.stop()


def test_a_call_beside_the_pump_waits_for_a_slot_of_its_own() -> None:
    """So a redelivery of dead letters stays within the bound; one that is cancelled leaves no slot taken."""

    async def test() -> None:
        crowd = Crowd(2, 0)
        limit = crowd.bed.pump.breaker.limit
        slots, held = SharedSlots(limit), 0

        async def call() -> None:
            nonlocal held
            async with slots.slot():
                held += 1
                assert crowd.in_flight.total() + held <= 2
                await crowd.bed.clock.sleep(1)
                held -= 1

        await crowd.start()
        crowd.feed(0)
        calls = [asyncio.ensure_future(call()) for _ in range(5)]
        calls[3].cancel()
        await crowd.bed.clock.advance(0.5)
        next(each for each in calls if not each.done()).cancel()
        await crowd.bed.clock.advance(30)
        assert all(each.done() for each in calls)
        assert crowd.in_flight.total() == limit.in_flight == 2
        await crowd.stop()

    run(test)


def test_no_slot_stays_reserved_for_a_live_pump_that_has_left() -> None:
    """A replay that outlives its consumer uses the whole limit."""
    limit, live, replay = AdaptiveLimit(2), SharedSlots(AdaptiveLimit(1)), SharedSlots(AdaptiveLimit(1))
    limit.join(live, live=True)
    limit.join(replay)
    assert limit.free_for(replay) == 1
    limit.leave(live)
    assert limit.free_for(replay) == 2
