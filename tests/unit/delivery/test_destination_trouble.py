"""What a destination in trouble gets, and what it does not, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.errors import DestinationUnavailable
from headrace.records import Committed, Record, TopicPartition
from headrace_devkit.testing.pump_harness import Harness

PARTITIONS = [TopicPartition("t", number) for number in range(8)]
FAILED = Reply("TypeError", "a bug")
HTTP_500 = Reply("HTTP 500", "", 500)
Response = Callable[[Delivery], Awaitable[Sequence[Reply]]]


def each(reply: Callable[[Record], Reply]) -> Response:
    """Answer for each record."""

    async def answer(delivery: Delivery) -> Sequence[Reply]:
        return [reply(record) for record in delivery.records]

    return answer


fine, broken, internal_error = each(lambda record: ACK), each(lambda record: FAILED), each(lambda record: HTTP_500)


class Troubled(Harness):
    """A pump with eight partitions, and a destination whose behaviour can be replaced."""

    def __init__(self, partitions: int = 8, **given: Any) -> None:
        super().__init__(**{"max_records": 100, "ordering": "key", "attempts": 5, **given})
        self.response: Response = fine
        self.begun: list[float] = []
        self.attempts: Counter[tuple[TopicPartition, int]] = Counter()
        self.partitions = PARTITIONS[:partitions]
        self.count = 0

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        await super().deliver(delivery)
        self.begun.append(self.clock.monotonic())
        self.under_way += 1
        try:
            for record in delivery.records:
                place = (record.topic_partition, record.offset)
                self.attempts[place] = max(self.attempts[place], delivery.attempt)
            return await self.response(delivery)
        finally:
            self.under_way -= 1

    def give(self, records: int) -> None:
        """Hand over this many records to each partition."""
        for partition in self.partitions:
            news = [Record(*partition, n, 0, b"%d" % n, b"v") for n in range(self.count, self.count + records)]
            self.pump.on_records(partition, 1, news)
        self.count += records

    @property
    def drained(self) -> bool:
        return self.source.commits == {partition: Committed(self.count) for partition in self.partitions}

    @property
    def standing(self) -> list[str]:
        return [partition.why for partition in self.pump.status().partitions.values()]


@contextlib.asynccontextmanager
async def troubled(partitions: int = 8, **given: Any) -> AsyncIterator[Troubled]:
    """Give a harness whose pump is started, and stopped at the end."""
    harness = Troubled(partitions, **given)
    await harness.pump.start()
    harness.pump.on_assigned(dict.fromkeys(harness.partitions, 1), {})
    yield harness
    await harness.pump.stop()


@pytest.mark.parametrize(
    ("ordering", "partitions", "response"), [("partition", 1, broken), ("key", 8, broken), ("none", 8, internal_error)]
)
async def test_a_bad_deploy_spills_nothing(ordering: str, partitions: int, response: Response) -> None:
    """Whatever the failure, all records wait for the repair, and are then delivered as if none had failed."""
    async with troubled(partitions, ordering=ordering) as harness:
        harness.give(500)
        await harness.clock.advance(1)
        harness.response = response
        harness.give(500)
        await harness.clock.advance(3600)
        assert not harness.dead_letters.offsets
        assert "nearly all deliveries fail, the last with" in harness.pump.readiness().reason
        harness.response = fine
        await harness.clock.advance(60)
        assert harness.drained
        assert not harness.dead_letters.offsets


def closes_at(*bad: int, is_alive: bool = False) -> Response:
    """Close the connection at these offsets; at all if none is given."""

    async def answer(delivery: Delivery) -> Sequence[Reply]:
        if bad and {record.offset for record in delivery.records}.isdisjoint(bad):
            return await fine(delivery)
        error = DestinationUnavailable("it closed the connection", broken_off=True)
        error.is_alive = is_alive and len(delivery.records) == 1
        error.advice = "skip it"
        raise error

    return answer


@pytest.mark.parametrize("bad", [{22}, {99}, {3, 22, 23}])
@pytest.mark.parametrize(("ordering", "partitions"), [("partition", 1), ("partition", 3), ("key", 1), ("none", 2)])
async def test_a_record_at_which_a_backend_closes_the_connection_is_found(
    ordering: str, partitions: int, bad: set[int]
) -> None:
    """Among a hundred it costs 3 + 7 deliveries and its attempts, and the others none."""
    async with troubled(partitions, ordering=ordering) as harness:
        harness.response = closes_at(*bad)
        harness.give(100)
        await harness.clock.advance(600)
        assert harness.drained
        assert sorted(harness.dead_letters.offsets) == sorted([*bad] * partitions)
        assert {offset for (_, offset), attempt in harness.attempts.items() if attempt > 1} == bad
        tries = Counter(offset for each in harness.deliveries for offset in {r.offset for r in each.records} & bad)
        assert max(tries.values()) <= (3 + 7 + 5) * partitions


@pytest.mark.parametrize(("ordering", "max_records"), [("partition", 100), ("key", 10), ("none", 1)])
async def test_a_crash_costs_records_in_flight_no_attempt(ordering: str, max_records: int) -> None:
    """Every partition has two records at which the backend crashes, with all its deliveries in flight."""
    async with troubled(ordering=ordering, max_records=max_records, attempts=3, max_in_flight=16) as harness:
        crashed = asyncio.Event()

        async def answer(delivery: Delivery) -> Sequence[Reply]:
            nonlocal crashed
            crash = crashed
            await harness.clock.sleep(0.05)
            if not {record.offset for record in delivery.records}.isdisjoint({7, 23}):
                crash.set()
                crashed = asyncio.Event()
            if crash.is_set():
                raise DestinationUnavailable("it closed the connection", broken_off=True)
            return await fine(delivery)

        harness.response = answer
        harness.give(30)
        await harness.clock.advance(300)
        assert harness.drained
        assert sorted(harness.dead_letters.offsets) == [7] * 8 + [23] * 8
        assert {offset for (_, offset), attempt in harness.attempts.items() if attempt > 1} == {7, 23}


@pytest.mark.parametrize("later", ["letter", "hangs"])
async def test_a_suspected_record_stops_no_others(later: str) -> None:
    """Neither while its dead letter is being written, nor if the backend then only hangs at it."""
    async with troubled(ordering="none", max_records=1, attempts=2, max_in_flight=4) as harness:

        async def answer(delivery: Delivery) -> Sequence[Reply]:
            record = delivery.records[0]
            await harness.clock.sleep(0.05)
            if (record.partition, record.offset) != (0, 3):
                return await fine(delivery)
            tries = sum(one.records[0] == record for one in harness.deliveries)
            if later == "hangs" and tries > 3:
                await harness.clock.sleep(30)
                raise DestinationUnavailable("no response in time")
            raise DestinationUnavailable("it closed the connection", broken_off=True)

        harness.response = answer
        harness.dead_letters.may_write.clear()
        harness.give(2000)
        await harness.clock.advance(60)
        for _ in range(6):
            before = len(harness.deliveries)
            await harness.clock.advance(20)
            assert len(harness.deliveries) - before > 900


@pytest.mark.parametrize("is_alive", [False, True])
async def test_a_record_that_is_alone_is_to_blame_if_the_backend_answers_else(is_alive: bool) -> None:
    """Otherwise nothing proves that the backend is up: the record waits, and is named, until it is taken."""
    async with troubled(1, ordering="partition") as harness:
        harness.response = closes_at(*([0] if is_alive else []), is_alive=is_alive)
        harness.give(9)
        await harness.clock.advance(600)
        assert (harness.dead_letters.offsets, harness.drained) == (([0], True) if is_alive else ([], False))
        if not is_alive:
            assert "closed the connection, always at t-0 offset 0; skip it" in harness.standing[0]
            assert set(harness.attempts.values()) == {1}
            harness.response = fine
            await harness.clock.advance(30)
        assert harness.drained


async def test_a_destination_gets_as_many_deliveries_at_a_time_as_it_takes() -> None:
    """A destination that rejects more than five soon gets about five; when it takes more, it gets more."""
    async with troubled(ordering="none", max_records=1, max_in_flight=32) as harness:
        room = 5

        async def crowded(delivery: Delivery) -> Sequence[Reply]:
            crowd = harness.under_way
            await harness.clock.sleep(0.01)
            if crowd > room:
                raise DestinationUnavailable("HTTP 429")
            return await fine(delivery)

        harness.response = crowded
        harness.give(300)
        await harness.clock.advance(5)
        harness.most_under_way = 0
        await harness.clock.advance(5)
        assert 2 <= harness.most_under_way <= room + 3
        room = 1000
        harness.give(600)
        await harness.clock.advance(30)
        assert harness.most_under_way == 32
        assert harness.drained
