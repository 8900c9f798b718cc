"""Explicit acknowledgements in the delivery core: a model with random events, and single rules."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.delivery.protocols import ACK, HELD, NOT_BEGUN, DeadLetter, Delivery, Reply
from headrace.delivery.tracker import AckTracker
from headrace.lifecycle import Deadline
from headrace.records import Committed, Record
from headrace.testing.bed import BURY, P0, RETRY, Bed, running


class AckModel(Bed):
    """Says what may be committed, and what must not be delivered again."""

    def __init__(self, *, ordering: str, up_to: bool) -> None:
        super().__init__(ordering=ordering, max_records=3, hooks={"ack_wait_seconds": 0.1})
        self.up_to = up_to
        self.log: list[Record] = []
        self.begun: set[int] = set()
        """Delivered in this assignment."""
        self.over: set[int] = set()
        """Acknowledged or dead letters, so they may be passed."""
        self.named: set[int] = set()
        """Acknowledged by their own offset in this assignment."""
        self.settled: set[int] = set()
        """Acknowledged by their own offset in an assignment that was given up in order."""
        self.plans: dict[int, list[Reply]] = {}
        self.wrong: list[str] = []

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        offsets = [record.offset for record in delivery.records]
        self.begun.update(offsets)
        if again := self.settled.intersection(offsets):
            self.wrong.append(f"{again} were acknowledged and come again")
        await self.free.wait()
        return [self.plans[offset].pop(0) if self.plans.get(offset) else HELD for offset in offsets]

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        await super().write(letters)
        self.over.update(letter.record.offset for letter in letters)

    def commit(self, offsets: Any) -> None:
        super().commit(offsets)
        for committed in offsets.values():
            if passed := {r.offset for r in self.log if r.offset < committed.offset} - self.over:
                self.wrong.append(f"{committed.offset} is committed, and {passed} are open")

    def write_records(self, count: int, key: int) -> None:
        next_offset = self.log[-1].offset + 1 + key % 2 if self.log else 5
        records = [Record(*P0, next_offset + n, 1, b"%d" % (key + n % 3), b"v", size_bytes=1) for n in range(count)]
        self.log += records
        if P0 in self.pump.lanes:
            self.pump.on_records(P0, self.pump.lanes[P0].tracker.epoch, records)

    def acknowledge(self, offset: int) -> None:
        ended = P0 in self.pump.lanes and offset < self.pump.lanes[P0].tracker.frontier
        may_fail = P0 not in self.pump.lanes or not (ended or offset in self.begun)
        covered = {offset, *(each for each in self.begun if self.up_to and each <= offset)}
        if problem := self.pump.acknowledge(P0, offset, up_to=self.up_to):
            assert may_fail, problem
            return
        self.over |= covered
        self.named.add(offset)

    def assign(self) -> None:
        self.epoch += 1
        self.begun, self.named = set(), set()
        at = self.commits.get(P0)
        self.pump.on_assigned({P0: self.epoch}, {P0: at} if at else {})
        if records := [record for record in self.log if record.offset >= (at.offset if at else 0)]:
            self.pump.on_records(P0, self.epoch, records)

    async def give_up(self, seconds: float) -> None:
        if P0 not in self.pump.lanes:
            return
        revoked = asyncio.ensure_future(self.pump.on_revoked([P0], Deadline(self.clock, seconds)))
        while not revoked.done():
            await self.clock.advance(0.05)
        self.settled |= self.named
        self.commit(revoked.result())

    async def end(self) -> None:
        """Everything is acknowledged in the end, and then committed."""
        self.free.set()
        if P0 not in self.pump.lanes:
            self.assign()
        for _ in range(200):
            await self.clock.advance(1)
            await self.clock.settle()
            for offset in sorted(self.pump.lanes[P0].tracker.held):
                self.acknowledge(offset)
            if not self.pump.lanes[P0].tracker.has_open:
                break
        await self.give_up(1)
        if self.log:
            assert self.commits[P0] == Committed(self.log[-1].offset + 1)


ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 6), st.integers(0, 3)),
    st.tuples(st.just("ack"), st.integers(0, 30)),
    st.tuples(st.just("plan"), st.integers(5, 25), st.sampled_from([RETRY, BURY])),
    st.tuples(st.just("hang"), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from([0.0, 0.05, 1.0, 9.0])),
    st.tuples(st.just("give up"), st.sampled_from([0.0, 0.2, 5.0])),
    st.tuples(st.just("lose")),
    st.tuples(st.just("assign")),
)


@given(
    actions=st.lists(ACTIONS, max_size=30), ordering=st.sampled_from(["partition", "key", "none"]), up_to=st.booleans()
)
def test_no_commit_passes_an_open_record_and_all_that_is_acknowledged_is_committed(
    actions: list[tuple[Any, ...]], ordering: str, up_to: bool
) -> None:
    """Whatever is delivered, fails, hangs, is acknowledged, given up, lost or assigned again."""

    async def run() -> None:
        bed = AckModel(ordering=ordering, up_to=up_to)
        await bed.pump.start()
        for what, *given_ in actions:
            if what == "write":
                bed.write_records(*given_)
            elif what == "ack":
                await bed.clock.settle()
                bed.acknowledge(given_[0])
            elif what == "plan":
                bed.plans.setdefault(given_[0], []).append(given_[1])
            elif what == "hang":
                (bed.free.clear if given_[0] else bed.free.set)()
            elif what == "time":
                await bed.clock.advance(given_[0])
            elif what == "give up":
                await bed.give_up(given_[0])
            elif what == "lose":
                bed.pump.on_lost([P0])
            elif P0 not in bed.pump.lanes:
                bed.assign()
        await bed.end()
        assert (bed.wrong, bed.pump.death) == ([], None)
        await bed.pump.stop()

    asyncio.run(run())


async def test_held_records_are_bounded_and_named() -> None:
    """The partition stops a span of the offset map behind the first, readiness says which; an ack lets it continue."""
    async with running(Bed(max_records=10_000)) as bed:
        bed.answers = dict.fromkeys(range(SPAN_OFFSETS + 10), HELD)
        bed.feed(*range(SPAN_OFFSETS + 10))
        for _ in range(9):
            await bed.clock.advance(1)
        assert bed.pump.numbers()["held"] == bed.released == SPAN_OFFSETS
        assert "offset 0 waits for its explicit acknowledgement" in bed.pump.readiness().reason
        assert not bed.pump.acknowledge(P0, 99, up_to=True)
        await bed.clock.advance(1)
        assert (bed.pump.numbers()["held"], bed.commits[P0].offset) == (SPAN_OFFSETS + 10 - 100, 100)
        assert bed.pump.readiness().ready


async def test_problems_are_said_and_what_has_ended_may_be_acknowledged_again() -> None:
    """A partition that is not assigned, and a record that was not delivered yet."""
    async with running(Bed()) as bed:
        bed.answers = dict.fromkeys(range(10), HELD)
        bed.feed(*range(4))
        await bed.clock.advance(0.1)
        assert bed.pump.acknowledge(P0, 1, up_to=True) == bed.pump.acknowledge(P0, 1, up_to=True) == ""
        assert bed.pump.acknowledge(P0, 0, up_to=False) == ""
        assert "offset 7 of t-0 was not delivered yet" in bed.pump.acknowledge(P0, 7, up_to=True)
        bed.pump.on_lost([P0])
        assert "t-0 is not assigned to this process any more" in bed.pump.acknowledge(P0, 2, up_to=True)


async def test_late_acknowledgements_count_until_their_time_is_over() -> None:
    """Before a partition is given up."""
    async with running(Bed(hooks={"ack_wait_seconds": 0.1})) as bed:
        bed.answers = dict.fromkeys(range(10), HELD)
        bed.feed(0, 1)
        await bed.clock.advance(0.3)
        revoked = asyncio.ensure_future(bed.pump.on_revoked([P0], Deadline(bed.clock, 5)))
        await bed.clock.advance(0.05)
        assert not revoked.done()
        assert not bed.pump.acknowledge(P0, 0, up_to=False)
        await bed.clock.advance(0.06)
        assert revoked.result() == {P0: Committed(1)}
        assert bed.pump.acknowledge(P0, 1, up_to=False)


async def test_records_given_back_before_a_revoke_are_neither_failures_nor_ended() -> None:
    """The worker had not begun them."""
    async with running(Bed(max_records=4)) as bed:
        bed.answers = {2: NOT_BEGUN, 3: NOT_BEGUN}
        bed.free.clear()
        bed.feed(0, 1, 2, 3)
        await bed.clock.advance(0)
        revoked = asyncio.ensure_future(bed.pump.on_revoked([P0], Deadline(bed.clock, 5)))
        await bed.clock.advance(0)
        bed.free.set()
        await bed.clock.advance(0)
        assert revoked.result() == {P0: Committed(2)}
        assert (bed.pump.counts.refusals, bed.pump.numbers()["breaker_open"], bed.letters) == (0, 0, [])


@pytest.mark.parametrize("window", [1, 3, 5000])
def test_the_window_keeps_the_commit_behind(window: int) -> None:
    """By so many records, not offsets, never before what was committed, and not where an ack has moved it."""
    tracker = AckTracker(1, Committed(10), window)
    offsets = [*range(10, 20_010, 2)]
    tracker.delivered(offsets)
    assert tracker.to_commit == Committed(10)
    for count in range(0, 10_000, 100):
        tracker.done(offsets[count : count + 100], 1)
        ended = count + 100
        expected = offsets[ended - window] if ended >= window else 10
        assert tracker.to_commit == Committed(expected)
    tracker.delivered([30_000, 30_001])
    tracker.hold([30_000])
    tracker.acknowledge(30_000, up_to=True)
    assert tracker.to_commit == Committed(30_001)


def test_a_success_is_held_or_not() -> None:
    """The two successes are told apart, though both have no error."""
    assert (ACK.held, HELD.held, HELD.error) == (False, True, "")


@pytest.mark.parametrize("up_to", [True, False])
async def test_a_record_acknowledged_by_its_own_handler_ends_with_it(up_to: bool) -> None:
    """As most handlers do; with those before it in the same delivery, or without."""
    async with running(Bed(max_records=3)) as bed:
        bed.answers = dict.fromkeys(range(10), HELD)
        bed.free.clear()
        bed.feed(0, 1, 2)
        await bed.clock.advance(0)
        assert not bed.pump.acknowledge(P0, 1, up_to=up_to)
        await bed.clock.advance(1)
        assert bed.commits.get(P0, Committed(0)) == Committed(0)
        bed.free.set()
        await bed.clock.advance(1)
        assert (bed.commits[P0].offset, bed.pump.numbers()["held"]) == ((2, 1) if up_to else (0, 2))


async def test_what_was_acknowledged_in_flight_is_committed_though_its_handler_is_too_late() -> None:
    """Its delivery is abandoned at the deadline, and the acknowledgement counts."""
    async with running(Bed()) as bed:
        bed.free.clear()
        bed.feed(0, 1)
        await bed.clock.advance(0)
        assert not bed.pump.acknowledge(P0, 0, up_to=True)
        assert await bed.pump.on_revoked([P0], Deadline(bed.clock, 0)) == {P0: Committed(1)}


async def test_a_failed_record_needs_an_acknowledgement_after_its_next_call() -> None:
    """That of a later record of its delivery does not count, because the handler has raised for it."""
    async with running(Bed(max_records=3)) as bed:
        bed.answers = {0: HELD, 1: RETRY, 2: HELD}
        bed.free.clear()
        bed.feed(0, 1, 2)
        await bed.clock.advance(0)
        assert not bed.pump.acknowledge(P0, 2, up_to=True)
        bed.free.set()
        await bed.clock.advance(0)
        bed.answers[1] = HELD
        await bed.clock.advance(9)
        assert (bed.commits[P0].offset, bed.pump.numbers()["held"]) == (1, 1)
        assert not bed.pump.acknowledge(P0, 2, up_to=True)
        await bed.clock.advance(1)
        assert bed.commits[P0] == Committed(3)


async def test_an_acknowledgement_counts_for_no_other_delivery_in_flight() -> None:
    """Which may not be with the handler yet."""
    async with running(Bed(max_records=1, ordering="none")) as bed:
        bed.answers = dict.fromkeys(range(3), HELD)
        bed.free.clear()
        bed.feed(0, 1)
        await bed.clock.advance(0)
        assert not bed.pump.acknowledge(P0, 1, up_to=True)
        bed.free.set()
        await bed.clock.advance(1)
        assert (bed.commits.get(P0, Committed(0)).offset, bed.pump.numbers()["held"]) == (0, 1)


async def test_a_held_record_is_skipped_by_hand() -> None:
    """It ends; what else waits for its acknowledgement is delivered again."""
    async with running(Bed(max_records=3)) as bed:
        bed.answers = dict.fromkeys(range(3), HELD)
        bed.feed(0, 1, 2)
        await bed.clock.advance(1)
        assert bed.why() == ""
        await bed.clock.advance(6)
        assert bed.why() == "offset 0 waits for its explicit acknowledgement"
        skipped = asyncio.ensure_future(bed.pump.moves.skip(P0, 1, "it is wrong"))
        await bed.clock.advance(1)
        assert skipped.result() == "skipped"
        bed.feed_again()
        await bed.clock.advance(1)
        assert bed.delivered == [[0, 1, 2], [0, 2]]
        assert not bed.pump.acknowledge(P0, 2, up_to=True)
        await bed.clock.advance(1)
        assert (bed.commits[P0], bed.pump.numbers()["skipped_by_hand"]) == (Committed(3), 1)


def test_the_window_is_not_for_what_was_acknowledged_in_its_own_call() -> None:
    """As it is not for what was acknowledged later."""
    tracker = AckTracker(1, Committed(0), 2)
    tracker.delivered([0, 1, 2, 3])
    tracker.acknowledge(1, up_to=True, in_flight=[0])
    assert tracker.to_commit == Committed(0)
    tracker.done(tracker.hold([0, 1]), 1)
    assert tracker.to_commit == Committed(2)
    tracker.done([2, 3], 1)
    assert tracker.to_commit == Committed(2)
