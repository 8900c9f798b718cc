"""The policy at work in the pump: splitting, roll-backs, last retries, and letters that are not written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.protocols import ACK, NOT_BEGUN, DeadLetter, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.errors import DeadLetterFailed
from headrace.records import Committed, Record, TopicPartition
from headrace.testing import ManualClock

P0 = TopicPartition("t", 0)
FAILED = Reply("E", "again")
Answer = Callable[[Delivery], Sequence[Reply]]


def status(code: int, *bad: int) -> Answer:
    """Answer for all with a status when a bad record is there."""

    def answer(delivery: Delivery) -> Sequence[Reply]:
        spoiled = any(record.offset in bad for record in delivery.records)
        return [Reply(f"HTTP {code}", "text", code) if spoiled else ACK] * len(delivery.records)

    return answer


def results(*bad: int) -> Answer:
    """Answer for each: a bad one fails."""
    return lambda delivery: [FAILED if record.offset in bad else ACK for record in delivery.records]


def stopping(failures: Mapping[int, int], begun: list[int]) -> Answer:
    """Begin no record after one that fails before its last attempt; `failures` are attempts by offset."""

    def answer(delivery: Delivery) -> Sequence[Reply]:
        replies: list[Reply] = []
        for record in delivery.records:
            begun.append(record.offset)
            replies.append(FAILED if begun.count(record.offset) <= failures.get(record.offset, 0) else ACK)
            if replies[-1] is FAILED and delivery.attempt < 3:
                break
        return replies + [NOT_BEGUN] * (len(delivery.records) - len(replies))

    return answer


class Bed:
    """A pump, and all that is around it."""

    def __init__(self, answer: Answer, *, max_records: int = 100, ordering: str = "partition", **retry: Any) -> None:
        self.clock = ManualClock()
        self.answer = answer
        self.deliveries: list[Delivery] = []
        self.letters: list[DeadLetter] = []
        self.missing: list[int] | None = None
        self.hold: asyncio.Event | None = None
        self.committed = 0
        policy = RetryConfig(**{"attempts": 3, "first_delay_seconds": 1, "max_delay_seconds": 8, **retry})
        batch = BatchConfig(max_records=max_records)
        delivery = DeliveryConfig(ordering=ordering, batch=batch, retry=policy)
        self.pump = Pump("pump", "g", self, self, delivery=delivery, clock=self.clock, chance=Random(1))
        self.pump.connect(self)

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.deliveries.append(delivery)
        await asyncio.sleep(0)
        return self.answer(delivery)

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        if self.hold:
            await self.hold.wait()
        failed = self.missing or []
        self.letters += [letter for index, letter in enumerate(letters) if index not in failed]
        if failed:
            raise DeadLetterFailed("no room", missing=failed)

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        pass

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        self.committed = offsets[P0].offset

    @property
    def delivered(self) -> list[list[int]]:
        return [[record.offset for record in delivery.records] for delivery in self.deliveries]

    @property
    def buried(self) -> list[int]:
        return [letter.record.offset for letter in self.letters]

    def run(self, records: int, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            await self.pump.start()
            self.pump.on_assigned({P0: 1}, {})
            self.pump.on_records(P0, 1, [Record("t", 0, n, 0, b"%d" % n, b"v") for n in range(records)])
            await test()
            assert self.pump.death is None
            await self.pump.stop()

        asyncio.run(whole())

    def end(self, records: int) -> None:
        """Run until each of so many records has ended."""

        async def wait() -> None:
            await self.clock.advance(300)

        self.run(records, wait)
        assert self.committed == records


@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
def test_one_bad_record_costs_its_hundred_neighbours_nothing(ordering: str) -> None:
    """Two deliveries for each time the hundred can be halved; then its attempts are its own."""
    bed = Bed(status(500, 70), ordering=ordering)
    bed.end(100)
    assert bed.buried == [70]
    assert bed.letters[0].attempts == 3
    attempts = [delivery.attempt for delivery in bed.deliveries if delivery.records[0].offset == 70]
    assert attempts[-3:] == [1, 2, 3]
    assert len(bed.deliveries) <= 1 + 2 * 7 + 2
    assert bed.pump.numbers()["delivered"] == 99


def test_halves_keep_the_order_of_their_partition() -> None:
    """What lies behind the bad record waits until it has ended."""
    bed = Bed(status(500, 1), max_records=4)
    bed.end(6)
    assert bed.delivered == [[0, 1, 2, 3], [0, 1], [0], [1], [1], [1], [2, 3], [4, 5]]


@given(st.integers(1, 40), st.integers(1, 50), st.dictionaries(st.integers(0, 39), st.integers(1, 4), max_size=6))
def test_what_is_not_begun_after_a_failure_waits_until_that_has_ended(
    records: int, size: int, failures: dict[int, int]
) -> None:
    """So each record is called again and again until it has ended, before the next one is called at all."""
    begun: list[int] = []
    bed = Bed(stopping(failures, begun), max_records=size)
    bed.end(records)
    calls = [min(3, failures.get(offset, 0) + 1) for offset in range(records)]
    assert begun == [offset for offset, count in enumerate(calls) for _ in range(count)]
    assert bed.buried == [offset for offset in range(records) if failures.get(offset, 0) >= 3]
    assert all(letter.attempts == 3 for letter in bed.letters)
    assert bed.committed == records
    assert bed.pump.numbers()["redeliveries"] == sum(calls) - records


def test_what_is_not_begun_uses_up_none_of_the_rate() -> None:
    """Ten failures in a hundred records a second take their ten pauses, and not ten seconds."""
    begun: list[int] = []
    bed = Bed(stopping(dict.fromkeys(range(0, 100, 10), 1), begun), first_delay_seconds=0.01)

    async def wait() -> None:
        bed.pump.change(msgspec.structs.replace(bed.pump.settings, rate_records=100))
        await bed.clock.advance(3)
        assert bed.committed == 100

    bed.run(100, wait)


def test_halves_of_other_orders_do_not_wait_for_each_other() -> None:
    """Only the bad record waits for its retries."""
    bed = Bed(status(500, 1), max_records=4, ordering="key")
    bed.end(4)
    assert bed.delivered.index([2, 3]) < [n for n, offsets in enumerate(bed.delivered) if offsets == [1]][-1]


def test_a_status_that_is_final_ends_only_the_record_it_is_about() -> None:
    """One attempt, alone."""
    bed = Bed(status(422, 2), max_records=4)
    bed.end(4)
    assert bed.buried == [2]
    assert bed.letters[0].attempts == 1
    assert bed.delivered == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]


def test_a_status_that_means_handled_already_ends_only_that_record(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, and the log says so."""
    caplog.set_level("INFO")
    bed = Bed(status(409, 2), max_records=4, statuses={"409": "skip"})
    bed.end(4)
    assert (bed.letters, bed.pump.numbers()["skipped"], bed.pump.numbers()["delivered"]) == ([], 1, 3)
    assert "group g, t-0: skipped=1 by policy: HTTP 409" in caplog.messages


def test_a_roll_back_delivers_the_whole_batch_again_and_ends_with_the_attempts() -> None:
    """Two of four are more than 30 %: three times all of them, then the good ones have ended."""
    bed = Bed(results(1, 2), max_records=4, rollback_threshold_percent=30)
    bed.end(5)
    assert bed.delivered == [[0, 1, 2, 3]] * 3 + [[4]]
    assert (bed.buried, bed.pump.numbers()["delivered"]) == ([1, 2], 3)


def test_a_quiet_topic_is_never_rolled_back_for_ever() -> None:
    """One bad record of three is more than 30 %, and three are too few to say so."""
    bed = Bed(results(1), max_records=3, rollback_threshold_percent=30)
    bed.end(3)
    assert bed.delivered == [[0, 1, 2], [1], [1]]


def test_a_last_retry_ends_without_a_letter_and_names_the_record(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing else holds it then."""
    bed = Bed(results(1), last_retry=True)
    bed.end(3)
    assert (bed.letters, bed.pump.numbers()["given_up"], bed.pump.numbers()["delivered"]) == ([], 1, 2)
    assert (
        "group g, t-0: offset 1 failed 3 times (E) and is given up, because retry.last_retry is on" in caplog.messages
    )


def test_letters_that_are_written_are_not_written_again_for_the_sake_of_one_that_is_not() -> None:
    """They have ended, it has not, and the commit stays before it."""
    bed = Bed(results(0, 1, 2), attempts=1)

    async def test() -> None:
        bed.missing = [1]
        await bed.clock.settle()
        assert bed.buried == [0, 2]
        bed.missing = [0]
        await bed.clock.advance(100)
        assert (bed.buried, bed.committed) == ([0, 2], 1)
        assert "no room" in bed.pump.readiness().reason
        bed.missing = None
        await bed.clock.advance(10)
        assert (bed.buried, bed.committed) == ([0, 2, 1], 3)
        assert bed.pump.readiness().ready

    bed.run(3, test)


def test_a_dead_letter_has_the_number_of_calls_whatever_the_limit_of_attempts() -> None:
    """One call had a result, and three more ended their workers; `attempts` allows two results."""

    def answer(delivery: Delivery) -> Sequence[Reply]:
        return [FAILED if delivery.attempt == 1 else Reply("WorkerLost", "three workers", permanent=True, calls=3)]

    bed = Bed(answer, attempts=2)

    async def test() -> None:
        await bed.clock.advance(100)
        assert [letter.attempts for letter in bed.letters] == [4]

    bed.run(1, test)


def test_letters_that_take_long_are_said_before_they_fail(caplog: pytest.LogCaptureFixture) -> None:
    """Kafka may hold a write for minutes; the log and readiness say what the partition waits for within seconds."""
    bed = Bed(results(0), attempts=1)

    async def test() -> None:
        bed.hold = asyncio.Event()
        await bed.clock.advance(4)
        assert bed.pump.readiness().ready
        assert caplog.messages == []
        await bed.clock.advance(2)
        why = "dead letters=1 from offset 0 on are not acknowledged"
        assert bed.pump.readiness().reason == f"t-0 is stalled: {why}"
        assert caplog.messages == [f"group g, t-0 waits, {why} yet"]
        bed.hold.set()
        await bed.clock.advance(1)
        assert (bed.buried, bed.committed) == ([0], 1)
        assert bed.pump.readiness().ready

    bed.run(1, test)


def test_a_letter_that_fails_is_said_at_once_and_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not with every try."""
    bed = Bed(results(0), attempts=1)

    async def test() -> None:
        bed.missing = [0]
        await bed.clock.settle()
        assert caplog.messages == ["group g, t-0 waits, so that no record is lost: no room"]
        await bed.clock.advance(60)
        assert caplog.messages[1:] == ["group g, t-0 is stalled: no room"]

    bed.run(1, test)
