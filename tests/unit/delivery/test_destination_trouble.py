"""What a destination in trouble gets, and what it does not, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from headrace.delivery.outcomes import ACK, HANDED_OFF, Delivery, Reply
from headrace.errors import DestinationUnavailable
from headrace.records import Committed, Record, TopicPartition
from headrace.testing.pump_harness import Harness

PARTITIONS = [TopicPartition("t", number) for number in range(8)]
FAILED = Reply("TypeError", "a bug")
HTTP_500 = Reply("HTTP 500", "", 500)
Response = Callable[[Delivery], Awaitable[Sequence[Reply]]]


class Troubled(Harness):
    """A pump with eight partitions before a destination whose behaviour can be exchanged."""

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

    async def open(self) -> None:
        await self.pump.start()
        self.pump.on_assigned(dict.fromkeys(self.partitions, 1), {})

    def give(self, records: int) -> None:
        """Hand over so many records to each partition."""
        for partition in self.partitions:
            news = [Record(*partition, n, 0, b"%d" % n, b"v") for n in range(self.count, self.count + records)]
            self.pump.on_records(partition, 1, news)
        self.count += records

    @property
    def drained(self) -> bool:
        return self.commits == {partition: Committed(self.count) for partition in self.partitions}

    @property
    def standing(self) -> list[str]:
        return [partition.why for partition in self.pump.status().partitions.values()]


async def fine(delivery: Delivery) -> Sequence[Reply]:
    return [ACK] * len(delivery.records)


async def dead(delivery: Delivery) -> Sequence[Reply]:
    raise DestinationUnavailable("connection refused")


async def broken(delivery: Delivery) -> Sequence[Reply]:
    return [FAILED] * len(delivery.records)


async def internal_error(delivery: Delivery) -> Sequence[Reply]:
    return [HTTP_500] * len(delivery.records)


@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
async def test_a_dead_backend_gets_one_delivery_per_pause_and_spills_nothing(ordering: str) -> None:
    """five minutes with 10,000 records waiting; within ten seconds of its return it is used again."""
    harness = Troubled(ordering=ordering)
    await harness.open()
    harness.response = dead
    harness.give(1250)
    await harness.clock.advance(300)
    assert len(harness.begun) <= 300 / 5
    assert harness.most_under_way == 1
    assert all("the breaker of pump is open until 13:5" in why for why in harness.standing)
    assert all("failures: connection refused" in why for why in harness.standing)
    assert harness.pump.numbers()["breaker_open"] == 1
    tried = len(harness.begun)
    harness.response = fine
    await harness.clock.advance(10)
    assert len(harness.begun) > tried
    assert harness.pump.numbers()["breaker_open"] == 0
    await harness.clock.advance(1)
    assert harness.drained
    assert harness.standing == [""] * 8
    assert not harness.letters
    assert set(harness.attempts.values()) == {1}
    await harness.pump.stop()


@pytest.mark.parametrize(
    ("ordering", "partitions", "response"), [("partition", 1, broken), ("key", 8, broken), ("none", 8, internal_error)]
)
async def test_a_bad_deploy_spills_nothing(ordering: str, partitions: int, response: Response) -> None:
    """Whatever every record fails with, all of them wait for a better one, and then go as if they had never failed."""
    harness = Troubled(partitions, ordering=ordering)
    await harness.open()
    harness.give(500)
    await harness.clock.advance(1)
    harness.response = response
    harness.give(500)
    await harness.clock.advance(3600)
    assert not harness.letters
    assert "nearly all that is delivered fails, the last with" in harness.pump.readiness().reason
    harness.response = fine
    await harness.clock.advance(60)
    assert harness.drained
    assert not harness.letters
    await harness.pump.stop()


@pytest.mark.parametrize("outcome", [FAILED, HTTP_500])
@pytest.mark.parametrize("bad", [1, 10])
async def test_bad_records_in_a_quiet_topic_are_dead_letters_after_their_attempts(bad: int, outcome: Reply) -> None:
    """Nothing else happens that would speak for the destination: so few are believed to be bad themselves."""
    harness = Troubled(1, max_records=1)

    async def fail(delivery: Delivery) -> Sequence[Reply]:
        return [outcome] * len(delivery.records)

    await harness.open()
    harness.response = fail
    for _ in range(bad):
        harness.give(1)
        await harness.clock.advance(100)
    assert [harness.attempts[PARTITIONS[0], offset] for offset in harness.letters] == [5] * bad
    assert harness.drained
    await harness.pump.stop()


@pytest.mark.parametrize(("ordering", "bad"), [("partition", 20), ("key", 400), ("none", 100)])
async def test_a_run_of_bad_records_ends_while_others_succeed(ordering: str, bad: int) -> None:
    """More failures at once than there are tokens: each success elsewhere pays for one, so the run ends."""
    harness = Troubled(ordering=ordering)

    async def answer(delivery: Delivery) -> Sequence[Reply]:
        return [FAILED if r.partition == 0 and r.offset < bad else ACK for r in delivery.records]

    await harness.open()
    harness.response = answer
    harness.give(bad)
    for _ in range(400):
        harness.give(5)
        await harness.clock.advance(1)
    await harness.clock.advance(60)
    assert sorted(harness.letters) == list(range(bad))
    assert harness.drained
    await harness.pump.stop()


@pytest.mark.parametrize(("wish", "seconds"), [(60.0, 60), (3.2e8, 300), (None, 0)])
async def test_a_wish_to_be_left_alone_is_kept_to_the_second(wish: float | None, seconds: float) -> None:
    """never early, at most five minutes; what makes no sense is a failure like any other."""
    harness = Troubled()

    async def busy(delivery: Delivery) -> Sequence[Reply]:
        raise DestinationUnavailable("HTTP 429", wait_seconds=wish)

    await harness.open()
    harness.response = busy
    harness.give(100)
    await harness.clock.settle()
    await harness.clock.advance(seconds - 0.001 if seconds else 0)
    assert len(harness.begun) == 1
    harness.response = fine
    await harness.clock.advance(1)
    assert harness.drained
    await harness.pump.stop()


async def test_what_fails_alone_waits_alone() -> None:
    """A delivery that the destination drops while it takes all others stops neither them nor its own partition."""
    harness = Troubled(2, ordering="key", max_records=1)

    async def drops_one(delivery: Delivery) -> Sequence[Reply]:
        await harness.clock.sleep(0.1)
        if delivery.records[0].offset == 70:
            await harness.clock.sleep(0.1)
            raise DestinationUnavailable("connection reset")
        return await fine(delivery)

    await harness.open()
    harness.response = drops_one
    for _ in range(300):
        harness.give(1)
        await harness.clock.advance(0.1)
    await harness.clock.advance(1)
    assert harness.commits[PARTITIONS[0]].offset == 70
    assert {offset for _, offset in harness.attempts} == set(range(300))
    assert harness.attempts[PARTITIONS[0], 70] == 1
    assert not harness.letters
    harness.response = fine
    await harness.clock.advance(40)
    assert harness.drained
    await harness.pump.stop()


def closes_at(*bad: int, is_alive: bool = False) -> Response:
    """Close the connection at these offsets; without any at all."""

    async def answer(delivery: Delivery) -> Sequence[Reply]:
        if bad and {record.offset for record in delivery.records}.isdisjoint(bad):
            return await fine(delivery)
        error = DestinationUnavailable("it closed the connection", broken_off=True)
        error.is_alive = is_alive and len(delivery.records) == 1
        raise error

    return answer


@pytest.mark.parametrize("bad", [{22}, {99}, {3, 22, 23}])
@pytest.mark.parametrize(("ordering", "partitions"), [("partition", 1), ("partition", 3), ("key", 1), ("none", 2)])
async def test_a_record_at_which_a_backend_closes_the_connection_is_found(
    ordering: str, partitions: int, bad: set[int]
) -> None:
    """Among a hundred it costs 3 + 7 deliveries and its attempts, and the others none."""
    harness = Troubled(partitions, ordering=ordering)
    await harness.open()
    harness.response = closes_at(*bad)
    harness.give(100)
    await harness.clock.advance(600)
    assert harness.drained
    assert sorted(harness.letters) == sorted([*bad] * partitions)
    assert {offset for (_, offset), attempt in harness.attempts.items() if attempt > 1} == bad
    tries = Counter(offset for each in harness.deliveries for offset in {r.offset for r in each.records} & bad)
    assert max(tries.values()) <= (3 + 7 + 5) * partitions
    await harness.pump.stop()


@pytest.mark.parametrize(("ordering", "max_records"), [("partition", 100), ("key", 10), ("none", 1)])
async def test_a_crash_costs_records_in_flight_no_attempt(ordering: str, max_records: int) -> None:
    """Also if every partition has two records at which the backend ends, with all that it has at work."""
    harness = Troubled(ordering=ordering, max_records=max_records, attempts=3, max_in_flight=16)
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

    await harness.open()
    harness.response = answer
    harness.give(30)
    await harness.clock.advance(300)
    assert harness.drained
    assert sorted(harness.letters) == [7] * 8 + [23] * 8
    assert {offset for (_, offset), attempt in harness.attempts.items() if attempt > 1} == {7, 23}
    await harness.pump.stop()


@pytest.mark.parametrize("later", ["letter", "hangs"])
async def test_a_suspected_record_stops_no_others(later: str) -> None:
    """Neither while its dead letter is being written, nor if the backend only hangs at it from then on."""
    harness = Troubled(ordering="none", max_records=1, attempts=2, max_in_flight=4)

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

    await harness.open()
    harness.response = answer
    harness.writing.clear()
    harness.give(2000)
    await harness.clock.advance(60)
    for _ in range(6):
        before = len(harness.deliveries)
        await harness.clock.advance(20)
        assert len(harness.deliveries) - before > 900
    await harness.pump.stop()


@pytest.mark.parametrize("is_alive", [False, True])
async def test_a_record_that_is_alone_is_to_blame_if_the_backend_answers_else(is_alive: bool) -> None:
    """Without that nothing proves that the backend is up: it waits, and is named, until the backend takes it."""
    harness = Troubled(1, ordering="partition")
    await harness.open()
    harness.response = closes_at(*([0] if is_alive else []), is_alive=is_alive)
    harness.give(9)
    await harness.clock.advance(600)
    assert (harness.letters, harness.drained) == (([0], True) if is_alive else ([], False))
    if not is_alive:
        assert "closed the connection, always at t-0 offset 0; to skip it: headrace" in harness.standing[0]
        assert set(harness.attempts.values()) == {1}
        harness.response = fine
        await harness.clock.advance(30)
    assert harness.drained
    await harness.pump.stop()


async def test_a_breaker_closes_when_nothing_is_left_to_try() -> None:
    """As after a skip of the record that it waited for."""
    harness = Troubled(1, ordering="partition")
    await harness.open()
    harness.response = dead
    harness.give(1)
    await harness.clock.advance(60)
    assert harness.pump.status().breaker.state != "closed"
    skipped = asyncio.ensure_future(harness.pump.moves.skip(PARTITIONS[0], 0, "no order"))
    await harness.clock.advance(15)
    assert await skipped == "skipped"
    assert harness.pump.status().breaker.state == "closed"
    await harness.pump.stop()


async def test_a_destination_gets_as_many_deliveries_at_a_time_as_it_takes() -> None:
    """One that pushes back above five soon gets about five; once it takes more, it gets more."""
    harness = Troubled(ordering="none", max_records=1, max_in_flight=32)
    room = 5

    async def crowded(delivery: Delivery) -> Sequence[Reply]:
        crowd = harness.under_way
        await harness.clock.sleep(0.01)
        if crowd > room:
            raise DestinationUnavailable("HTTP 429")
        return await fine(delivery)

    await harness.open()
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
    await harness.pump.stop()


async def test_partitions_try_a_dead_backend_in_turns() -> None:
    """So that a record which a destination dies of does not hide that others would be taken."""
    harness = Troubled(ordering="key", max_records=1)

    async def dies_of_some(delivery: Delivery) -> Sequence[Reply]:
        if delivery.partition.partition < 3 and delivery.records[0].offset == 0:
            raise DestinationUnavailable("connection reset")
        return await fine(delivery)

    await harness.open()
    harness.response = dies_of_some
    harness.give(20)
    await harness.clock.advance(300)
    assert {place.partition for place, commit in harness.commits.items() if commit.offset < 20} == {0, 1, 2}
    assert {offset for _, offset in harness.attempts} == set(range(20))
    await harness.pump.stop()


UNDECODABLE = Reply("DecodeError", "no JSON", reached=False, permanent=True)


@pytest.mark.parametrize("outcome", [HANDED_OFF, UNDECODABLE])
async def test_what_never_reached_the_destination_earns_it_no_trust(outcome: Reply) -> None:
    """Half of the records go elsewhere or cannot be decoded: as few of the others use up attempts as without them."""
    harness = Troubled(
        1, ordering="key", max_records=1, retry={"attempts": 3, "max_delay_seconds": 5}, max_in_flight=16
    )

    async def half(delivery: Delivery) -> Sequence[Reply]:
        return [outcome if record.offset % 2 else FAILED for record in delivery.records]

    harness.response = half
    await harness.open()
    closed = 0
    for _ in range(600):
        harness.give(5)
        await harness.clock.advance(1)
        closed += harness.pump.breaker.status.state == "closed"
    assert len([offset for offset in harness.letters if offset % 2 == 0]) <= 11
    assert closed <= 5
    assert harness.pump.numbers()["delivered"] == 0
    await harness.pump.stop()
