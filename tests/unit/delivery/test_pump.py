"""The pump under a clock that tests own: order, retries, dead letters, drain."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.context import PumpHooks
from headrace.delivery.protocols import ACK, HELD, DeadLetter, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.errors import DeadLetterFailed, DestinationUnavailable
from headrace.lifecycle import Deadline
from headrace.records import Committed, Record, TopicPartition
from headrace.testing import ManualClock

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
RETRY = Reply("E", "again")
BURY = Reply("E", "never", permanent=True)


def record(offset: int, partition: TopicPartition = P0) -> Record:
    return Record(partition.topic, partition.partition, offset, 0, None, b"v")


class FakeSource:
    """Remembers what the pump tells it."""

    def __init__(self) -> None:
        self.commits: list[dict[TopicPartition, Committed]] = []
        self.released = 0

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        self.released += records

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        self.commits.append(dict(offsets))

    def committed(self, partition: TopicPartition) -> int | None:
        found = [offsets[partition].offset for offsets in self.commits if partition in offsets]
        return found[-1] if found else None


class FakeDestination:
    """Answers by a function of the record and the attempt; can be held."""

    def __init__(self, answer: Callable[[Record, int], Reply] = lambda record, attempt: ACK) -> None:
        self.answer = answer
        self.deliveries: list[Delivery] = []
        self.hold: asyncio.Event | None = None
        self.down = False

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.deliveries.append(delivery)
        if self.hold:
            await self.hold.wait()
        if self.down:
            raise DestinationUnavailable("down")
        return [self.answer(record, delivery.attempt) for record in delivery.records]


class FakeLetters:
    """Keeps letters; can fail."""

    def __init__(self) -> None:
        self.letters: list[DeadLetter] = []
        self.broken = False
        self.tries = 0

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        self.tries += 1
        if self.broken:
            raise DeadLetterFailed("broken")
        self.letters += letters


class Bed:
    """A pump with fakes around it."""

    def __init__(self, destination: FakeDestination, *, attempts: int = 3, max_records: int = 2, **given: Any) -> None:
        self.clock = given.pop("clock", None) or ManualClock()
        hooks, writes = given.pop("hooks", None), given.pop("writes", True)
        self.destination, self.letters, self.source = destination, FakeLetters(), FakeSource()
        self.pump = Pump(
            "pump",
            "g",
            destination,
            self.letters if writes else None,
            delivery=DeliveryConfig(
                batch=BatchConfig(max_records=max_records),
                retry=RetryConfig(attempts=attempts, first_delay_seconds=1, max_delay_seconds=8),
                **given,
            ),
            clock=self.clock,
            chance=Random(1),
            hooks=hooks,
        )
        self.pump.connect(self.source)

    def feed(self, *offsets: int, partition: TopicPartition = P0) -> None:
        epoch = self.pump.lanes[partition].tracker.epoch
        self.pump.on_records(partition, epoch, [record(offset, partition) for offset in offsets])


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def opened(bed: Bed) -> Bed:
    await bed.pump.start()
    bed.pump.on_assigned({P0: 1, P1: 2}, {})
    return bed


async def test_records_are_delivered_in_order_and_committed() -> None:
    """Batches of a partition follow one another, and the commit ends behind the last record."""
    bed = await opened(Bed(FakeDestination()))
    bed.feed(3, 4, 7)
    await bed.clock.advance(1)
    assert [[r.offset for r in d.records] for d in bed.destination.deliveries] == [[3, 4], [7]]
    assert bed.source.committed(P0) == 8
    assert bed.source.released == 3
    await bed.pump.stop()


async def test_what_is_open_is_a_gauge_and_what_came_is_counted() -> None:
    """Records count as open from the source's hand until they have ended; the gauge goes with the pump."""
    bed = await opened(Bed(FakeDestination()))
    bed.destination.hold = asyncio.Event()
    bed.feed(0, 1, 2)
    bed.feed(9, partition=P1)
    assert (bed.pump.counts.taken, bed.pump.numbers()["open"]) == (4, 4)
    bed.destination.hold.set()
    await bed.clock.advance(1)
    assert (bed.pump.numbers()["delivered"], bed.pump.numbers()["open"]) == (4, 0)
    await bed.pump.stop()


async def test_a_failed_record_is_retried_alone_and_holds_the_commit() -> None:
    """The neighbour's success does not pass it."""
    bed = await opened(Bed(FakeDestination(lambda r, attempt: RETRY if r.offset == 0 and attempt < 3 else ACK)))
    bed.feed(0, 1)
    await bed.clock.settle()
    await bed.clock.advance(0.05)
    assert bed.source.committed(P0) == 0
    await bed.clock.advance(20)
    assert [([r.offset for r in d.records], d.attempt) for d in bed.destination.deliveries] == [
        ([0, 1], 1),
        ([0], 2),
        ([0], 3),
    ]
    assert bed.source.committed(P0) == 2
    await bed.pump.stop()


async def test_the_last_attempt_ends_in_a_dead_letter() -> None:
    """Attempts are counted, and the letter says how many there were."""
    bed = await opened(Bed(FakeDestination(lambda r, attempt: RETRY if r.offset == 1 else ACK)))
    bed.feed(0, 1)
    await bed.clock.advance(60)
    assert [(letter.record.offset, letter.attempts) for letter in bed.letters.letters] == [(1, 3)]
    assert bed.source.committed(P0) == 2
    assert bed.pump.numbers()["delivered"] == 1
    await bed.pump.stop()


async def test_a_dead_letter_that_is_not_written_holds_the_commit() -> None:
    """The partition stands, says why, and goes on by itself once letters can be written."""
    bed = await opened(Bed(FakeDestination(lambda r, attempt: BURY if r.offset == 0 else ACK)))
    bed.letters.broken = True
    bed.feed(0, 1, 2)
    await bed.clock.advance(30)
    assert bed.source.committed(P0) == 0
    assert bed.letters.tries > 3
    bed.pump.readiness()
    await bed.clock.advance(10)
    assert "broken" in bed.pump.readiness().reason
    bed.letters.broken = False
    await bed.clock.advance(30)
    assert bed.source.committed(P0) == 3
    assert bed.pump.readiness().ready
    await bed.pump.stop()


async def test_without_dead_letters_a_failed_record_stops_its_partition_only() -> None:
    """Nothing is passed over, and the other partition goes on."""
    bed = Bed(FakeDestination(lambda r, attempt: BURY if r.partition == 0 else ACK), writes=False)
    await opened(bed)
    bed.feed(0)
    bed.feed(0, partition=P1)
    await bed.clock.advance(30)
    assert (bed.source.committed(P0), bed.source.committed(P1)) == (None, 1)
    assert "dead letters are off" in bed.pump.status().partitions[P0].why
    await bed.pump.stop()


async def test_a_destination_that_is_down_uses_up_no_attempts() -> None:
    """However long it is down, no record becomes a dead letter."""
    bed = await opened(Bed(FakeDestination()))
    bed.destination.down = True
    bed.feed(0)
    await bed.clock.advance(1000)
    bed.destination.down = False
    await bed.clock.advance(20)
    assert not bed.letters.letters
    assert {d.attempt for d in bed.destination.deliveries} == {1}
    assert bed.source.committed(P0) == 1
    await bed.pump.stop()


def test_who_stands_still_is_said_without_being_asked_before(caplog: pytest.LogCaptureFixture) -> None:
    """Readiness counts from the first refusal, not from the first look; the log says it once, and when it is over."""

    async def test() -> None:
        bed = await opened(Bed(FakeDestination()))
        bed.destination.down = True
        bed.feed(0)
        await bed.clock.advance(3)
        assert bed.pump.readiness().ready
        assert caplog.records == []
        await bed.clock.advance(20)
        ready, why = bed.pump.readiness()
        assert not ready
        assert re.fullmatch(r"t-0 is stalled: the breaker of pump is .+ after \d failures: down", why)
        bed.destination.down = False
        await bed.clock.advance(10)
        assert bed.pump.readiness().ready

    caplog.set_level("INFO")
    run(test)
    opened_again, closed = caplog.messages
    assert re.fullmatch(r"the breaker of pump is open until 13:4\d:\d\d UTC after \d failures: down", opened_again)
    assert closed == "the breaker of pump is closed again"


def test_dead_letters_are_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """How many, from where and why, without keys and values."""

    async def test() -> None:
        bed = await opened(Bed(FakeDestination(lambda record, attempt: BURY)))
        bed.feed(4, 5)
        await bed.clock.advance(1)

    run(test)
    assert caplog.messages == ["group g, t-0: dead letters=2, the first is offset 4: E"]


async def test_a_slow_partition_does_not_hold_the_others() -> None:
    """Partitions are lanes of their own."""
    bed = await opened(Bed(FakeDestination()))
    bed.destination.hold = asyncio.Event()
    bed.feed(0)
    await bed.clock.settle()
    bed.destination.hold = None
    bed.feed(0, partition=P1)
    await bed.clock.advance(1)
    assert bed.source.committed(P1) == 1
    assert bed.source.committed(P0) is None
    await bed.pump.stop()


async def test_a_revoke_waits_for_what_is_in_flight_and_drops_the_rest() -> None:
    """Drain, then fence: the delivery under way counts, what was not started is not committed."""
    bed = await opened(Bed(FakeDestination()))
    hold = bed.destination.hold = asyncio.Event()
    bed.feed(0, 1, 2, 3)
    await bed.clock.settle()
    revoke = asyncio.ensure_future(bed.pump.on_revoked([P0], Deadline(bed.clock, 10)))
    await bed.clock.settle()
    assert not revoke.done()
    hold.set()
    assert await revoke == {P0: Committed(2)}
    assert bed.pump.counts.abandoned == 0
    assert P0 not in bed.pump.lanes
    await bed.pump.stop()


async def test_what_is_drained_is_told_before_partitions_are_given_up() -> None:
    """A destination with state of its own writes it when nothing is in flight and the partition is still ours."""
    told: list[tuple[float, bool]] = []

    async def on_drained(partitions: Collection[TopicPartition], deadline: Deadline) -> None:
        told.append((deadline.remaining_seconds, P0 in bed.pump.lanes))

    bed = await opened(Bed(FakeDestination(), hooks=PumpHooks(on_drained=on_drained)))
    bed.feed(0, 1)
    await bed.clock.settle()
    assert await bed.pump.on_revoked([P0], Deadline(bed.clock, 10)) == {P0: Committed(2)}
    assert await bed.pump.on_revoked([P0], Deadline(bed.clock, 10)) == {}
    assert told == [(10, True), (10, False)]  # without a lane too: its events may be at work still
    bed.pump.on_assigned({P0: 2}, {})
    bed.pump.on_lost([P0])
    await bed.clock.settle()
    assert told[2:] == [(20, False)]
    await bed.pump.stop()


async def test_what_is_drained_does_not_wait_for_a_delivery_that_hangs() -> None:
    """Other workers have the time until the deadline too, and what they acknowledge is committed."""
    given_up: list[bool] = []

    async def on_drained(partitions: Collection[TopicPartition], deadline: Deadline) -> None:
        given_up.append(bed.pump.lanes[P0].is_fenced)
        bed.pump.acknowledge(P0, 0, up_to=False)

    bed = await opened(Bed(FakeDestination(lambda record, attempt: HELD), hooks=PumpHooks(on_drained=on_drained)))
    bed.feed(0)
    await bed.clock.settle()
    bed.destination.hold = asyncio.Event()
    bed.feed(1)
    await bed.clock.settle()
    assert await bed.pump.on_revoked([P0], Deadline(bed.clock, 0.05)) == {P0: Committed(1)}
    assert given_up == [False]
    await bed.pump.stop()


async def test_a_revoke_past_its_deadline_commits_the_frontier_and_counts_what_it_abandons() -> None:
    """A destination that does not answer cannot hold a rebalance."""
    bed = await opened(Bed(FakeDestination()))
    bed.feed(0, 1)
    await bed.clock.settle()
    bed.destination.hold = asyncio.Event()
    bed.feed(2, 3, 4)
    await bed.clock.settle()
    assert await bed.pump.on_revoked([P0], Deadline(bed.clock, 0)) == {P0: Committed(2)}
    assert bed.pump.counts.abandoned == 2
    await bed.pump.stop()


async def test_a_revoke_does_not_wait_for_a_pause_between_attempts() -> None:
    """A record that waits for its retry comes again elsewhere, at once."""
    bed = await opened(Bed(FakeDestination(lambda r, attempt: RETRY)))
    bed.feed(0)
    await bed.clock.settle()
    assert await bed.pump.on_revoked([P0], Deadline(bed.clock, 10)) == {P0: Committed(0)}
    await bed.pump.stop()


def test_a_stop_without_a_drain_counts_what_it_abandons(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever stops at once reads how many duplicates to expect."""

    async def test() -> None:
        bed = await opened(Bed(FakeDestination()))
        bed.destination.hold = asyncio.Event()
        bed.feed(0, 1, 2)
        await bed.clock.advance(0)
        await bed.pump.stop()
        assert bed.pump.counts.abandoned == 2
        assert bed.source.commits == []

    run(test)
    assert "abandoned=2" in caplog.text


async def test_lost_partitions_commit_nothing_and_late_results_mean_nothing() -> None:
    """After a loss another member owns the partition; what still comes back is dropped."""
    bed = await opened(Bed(FakeDestination()))
    hold = bed.destination.hold = asyncio.Event()
    bed.feed(0)
    await bed.clock.settle()
    bed.pump.on_lost([P0])
    bed.pump.on_assigned({P0: 9}, {})
    bed.destination.hold = None
    hold.set()
    await bed.clock.advance(1)
    assert bed.source.committed(P0) is None
    assert bed.pump.counts.abandoned == 1
    await bed.pump.stop()


async def test_a_destination_that_ends_after_the_loss_changes_nothing() -> None:
    """Even one that does not let itself be cancelled: its late results are counted and dropped."""
    bed = Bed(FakeDestination())
    inner = bed.destination.deliver

    async def stubborn(delivery: Delivery) -> Sequence[Reply]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await inner(delivery)
        raise AssertionError

    bed.destination.deliver = stubborn  # type: ignore[method-assign]
    await opened(bed)
    bed.feed(0, 1)
    await bed.clock.settle()
    assert await bed.pump.on_revoked([P0], Deadline(bed.clock, 0)) == {P0: Committed(0)}
    await bed.clock.advance(1)
    assert bed.source.commits == []
    assert bed.pump.counts.late == 2
    assert bed.pump.death is None
    await bed.pump.stop()


async def test_a_letter_that_is_not_written_holds_only_what_comes_after_it() -> None:
    """Neighbours that ended before it in the same delivery are committed meanwhile."""
    bed = await opened(Bed(FakeDestination(lambda r, attempt: BURY if r.offset == 1 else ACK), max_records=3))
    bed.letters.broken = True
    bed.feed(0, 1, 2)
    await bed.clock.advance(5)
    assert bed.source.committed(P0) == 1
    await bed.pump.stop()


async def test_an_assignment_without_a_revoke_before_ends_what_is_under_way() -> None:
    """Two lanes of one partition would deliver its records beside each other."""
    bed = await opened(Bed(FakeDestination()))
    bed.destination.hold = asyncio.Event()
    bed.pump.on_records(P0, 1, [record(n) for n in range(6)])
    await bed.clock.settle()
    bed.pump.on_assigned({P0: 2}, {P0: Committed(0)})
    bed.destination.hold.set()
    bed.pump.on_records(P0, 2, [record(n) for n in range(6)])
    await bed.clock.advance(1)
    epochs = [delivery.epoch for delivery in bed.destination.deliveries]
    assert (epochs.count(1), sorted(epochs)) == (1, epochs)
    assert bed.source.committed(P0) == 6
    await bed.pump.stop()


async def test_lag_reaches_zero_behind_a_transaction_whose_last_record_was_in_flight() -> None:
    """The end of the partition, past the marker, is said once and before the record has ended."""
    bed = await opened(Bed(FakeDestination()))
    bed.destination.hold = asyncio.Event()
    bed.feed(0)
    await bed.clock.settle()
    bed.pump.on_end(P0, 1, 2)
    bed.destination.hold.set()
    await bed.clock.advance(1)
    assert bed.source.committed(P0) == 2
    await bed.pump.stop()


async def test_commits_of_many_partitions_leave_turns_to_others() -> None:
    """Each may take milliseconds: what has an offset map to write is told some at a time."""
    partitions = [TopicPartition("t", number) for number in range(40)]

    class Slow(ManualClock):
        def monotonic(self) -> float:
            self._now += 0.001
            return self._now

    bed = Bed(FakeDestination(), clock=Slow())
    await bed.pump.start()
    bed.pump.on_assigned(dict.fromkeys(partitions, 1), {})
    for partition in partitions:
        bed.pump.on_records(partition, 1, [record(0, partition)])
    await bed.clock.advance(5)
    assert {partition for offsets in bed.source.commits for partition in offsets} == set(partitions)
    assert max(len(offsets) for offsets in bed.source.commits) <= 10
    bed.pump._dirty.update(dict.fromkeys(partitions))
    bed.pump.commit_now()
    assert len(bed.source.commits[-1]) == 40
    await bed.pump.stop()


async def test_partitions_that_always_have_something_to_commit_are_told_once_per_round() -> None:
    """Else a steady load has the offset maps of many partitions encoded without a pause."""
    partitions = [TopicPartition("t", number) for number in range(40)]

    class Slow(ManualClock):
        def monotonic(self) -> float:
            self._now += 0.001
            return self._now

    bed = Bed(FakeDestination(), clock=Slow())
    await bed.pump.start()
    bed.pump.on_assigned(dict.fromkeys(partitions, 1), {p: Committed(0) for p in partitions})

    def commit(offsets: Mapping[TopicPartition, Committed]) -> None:
        bed.source.commits.append(dict(offsets))
        if len(bed.source.commits) < 1000:
            for partition in partitions:
                bed.pump._mark(partition)

    bed.pump.source.commit = commit  # type: ignore[method-assign, union-attr]
    bed.pump._mark(P0)
    await bed.clock.advance(1)
    told = [partition for offsets in bed.source.commits for partition in offsets]
    assert {*told} == {*partitions}
    assert max(told.count(partition) for partition in partitions) <= 6
    await bed.pump.stop()


async def test_records_of_an_older_assignment_are_ignored() -> None:
    """A batch that was under way while the partition moved away and back is not delivered twice."""
    bed = await opened(Bed(FakeDestination()))
    bed.pump.on_records(P0, 99, [record(0)])
    await bed.clock.advance(1)
    assert not bed.destination.deliveries
    await bed.pump.stop()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_fails_every_record_ends_once_and_in_time(data: st.DataObject) -> None:
    """Each record is acknowledged or a dead letter, never both, and the commit never passes an open one."""
    plans = data.draw(st.lists(st.sampled_from(["ok", "retry", "bury", "always"]), min_size=1, max_size=25))
    outages = data.draw(st.lists(st.booleans(), max_size=12))

    async def test() -> None:
        acked: list[int] = []

        def answer(r: Record, attempt: int) -> Reply:
            plan = plans[r.offset]
            if plan == "bury":
                return BURY
            if plan == "always" or (plan == "retry" and attempt == 1):
                return RETRY
            acked.append(r.offset)
            return ACK

        bed = await opened(Bed(FakeDestination(answer), max_records=4))
        for offset in range(len(plans)):
            bed.feed(offset)
        for down in outages:
            bed.destination.down = bed.letters.broken = down
            await bed.clock.advance(0.7)
            ended = set(acked) | {letter.record.offset for letter in bed.letters.letters}
            committed = bed.source.committed(P0) or 0
            assert set(range(committed)) <= ended
        bed.destination.down = bed.letters.broken = False
        await bed.clock.advance(2000)
        buried = [letter.record.offset for letter in bed.letters.letters]
        assert sorted(acked + buried) == list(range(len(plans)))
        assert sorted(buried) == [o for o, plan in enumerate(plans) if plan in ("bury", "always")]
        assert bed.source.committed(P0) == len(plans)
        await bed.pump.stop()

    run(test)


async def test_two_records_out_of_order_are_a_defect() -> None:
    """A source that repeats an offset inside an assignment is not believed."""
    bed = await opened(Bed(FakeDestination()))
    bed.feed(4)
    with pytest.raises(ValueError, match="follows"):
        bed.feed(4)
    await bed.pump.stop()
