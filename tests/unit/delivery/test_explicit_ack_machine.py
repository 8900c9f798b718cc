"""Explicit acknowledgements in the delivery core: a model with random events, and single rules."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.offset_map import SPAN_OFFSETS, decode
from headrace.delivery.protocols import ACK, HELD, NOT_BEGUN, DeadLetter, Delivery, Reply
from headrace.delivery.tracker import AckTracker
from headrace.lifecycle import Deadline
from headrace.records import Committed, Record, TopicPartition
from headrace.testing.bed import BURY, P0, P1, RETRY, Bed, running


class Partition:
    """The records of a partition, and what is known of them in the present assignment."""

    def __init__(self) -> None:
        self.log: list[Record] = []
        self.plans: dict[int, list[Reply]] = {}
        self.settled: set[int] = set()
        """Acknowledged by their own offset in an assignment that was given up in order."""
        self.assignment = 0
        self.begin(None)

    def begin(self, at: Committed | None) -> None:
        """Begin an assignment at what the group has committed."""
        self.assignment += 1
        self.floor = at.offset if at else 0
        self.over = self.ended_by(at) if at else set[int]()
        """Those that the commit may pass."""
        self.begun: set[int] = set()
        self.in_flight: list[list[int]] = []
        self.held: set[int] = set()
        """Their handler has ended, and they wait."""
        self.named: set[int] = set()
        """Acknowledged by their own offset."""
        self.covered: set[int] = set()
        """In flight, and acknowledged by that of a later record of their delivery."""
        self.acked_to = 0

    def ended_by(self, at: Committed) -> set[int]:
        """Return which records have ended by what is committed."""
        ended = decode(at.metadata, at.offset)
        return {r.offset for r in self.log if r.offset < at.offset or (ended and ended.has(r.offset))}

    def acknowledge(self, offset: int, *, up_to: bool) -> None:
        """Take an acknowledgement that counts."""
        self.acked_to = max(self.acked_to, offset + 1)
        if offset in self.begun:
            self.named.add(offset)
        ends = {each for each in self.held if each == offset or (up_to and each < offset)}
        self.over, self.held = self.over | ends, self.held - ends
        if up_to:
            own = next((offsets for offsets in self.in_flight if offset in offsets), [])
            self.covered.update(each for each in own if each < offset)

    def answered(self, offset: int, reply: Reply) -> None:
        """Take the reply to one of its records."""
        if not reply.error:
            ends = not reply.held or offset in self.named | self.covered
            (self.over if ends else self.held).add(offset)
        self.covered.discard(offset)

    def farthest(self, window: int) -> int:
        """Return the largest offset that may be committed: the window is for what nobody acknowledged."""
        offsets = [record.offset for record in self.log if record.offset >= self.floor]
        ended = next((n for n, offset in enumerate(offsets) if offset not in self.over), len(offsets))
        end = [*offsets, offsets[-1] + 1][ended] if offsets else self.floor
        behind = offsets[ended - window] if window and ended >= window else self.floor or offsets[0]
        return max(behind, min(end, self.acked_to)) if window else end


class AckModel(Bed):
    """Says what may be committed, what must not be delivered again, and which acknowledgements are refused."""

    def __init__(self, *, ordering: str, up_to: bool, window: int) -> None:
        super().__init__(ordering=ordering, max_records=3, hooks={"ack_wait_seconds": 0.1, "ack_window": window})
        self.up_to, self.window = up_to, window
        self.parts = {P0: Partition(), P1: Partition()}
        self.wrong: list[str] = []

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        part, offsets = self.parts[delivery.partition], [record.offset for record in delivery.records]
        assignment = part.assignment
        if again := (part.settled | part.over).intersection(offsets):
            self.wrong.append(f"{again} of {delivery.partition} have ended and come again")
        part.begun.update(offsets)
        part.in_flight.append(offsets)
        try:
            await self.free.wait()
        finally:
            if part.assignment == assignment:
                part.in_flight.remove(offsets)
        replies = [part.plans[offset].pop(0) if part.plans.get(offset) else HELD for offset in offsets]
        if part.assignment == assignment:
            for offset, reply in zip(offsets, replies, strict=True):
                part.answered(offset, reply)
        return replies

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        await super().write(letters)
        for letter in letters:
            self.parts[letter.record.topic_partition].over.add(letter.record.offset)

    def commit(self, offsets: Any) -> None:
        super().commit(offsets)
        for partition, committed in offsets.items():
            part = self.parts[partition]
            if passed := part.ended_by(committed) - part.over:
                self.wrong.append(f"{committed} of {partition} is committed, and {passed} are open")
            if part.log and committed.offset > part.farthest(self.window):
                self.wrong.append(f"{committed} of {partition} is committed, and the window ends before it")

    def write_records(self, at: TopicPartition, count: int, key: int) -> None:
        log = self.parts[at].log
        first = log[-1].offset + 1 + key % 2 if log else 5
        records = [Record(*at, first + n, 1, b"%d" % (key + n % 3), b"v", size_bytes=1) for n in range(count)]
        log += records
        if at in self.pump.lanes:
            self.pump.on_records(at, self.pump.lanes[at].tracker.epoch, records)

    def offset_of(self, at: TopicPartition, number: int) -> int:
        """Return the offset of a record by its number, or one that is no record."""
        log = self.parts[at].log
        return log[number].offset if number < len(log) else number + 5

    def acknowledge(self, at: TopicPartition, offset: int) -> None:
        """Acknowledge any offset: of a partition that is elsewhere, of no record, or of one that is not delivered."""
        part, lane = self.parts[at], self.pump.lanes.get(at)
        ended = lane is not None and offset < lane.tracker.frontier
        waits = offset in {record.offset for record in part.log} - part.begun - part.over and not ended
        beyond = offset > (part.log[-1].offset if part.log else -1) and not ended
        if problem := self.pump.acknowledge(at, offset, up_to=self.up_to):
            assert lane is None or not (ended or offset in part.begun), problem
            assert ("is not assigned" if lane is None else "was not delivered yet") in problem
            return
        assert lane is not None
        assert not waits, f"{offset} of {at} has not begun"
        assert not beyond, f"{offset} of {at} is no record yet"
        part.acknowledge(offset, up_to=self.up_to)

    def assign(self, at: TopicPartition) -> None:
        self.epoch += 1
        committed, part = self.commits.get(at), self.parts[at]
        part.begin(committed)
        self.pump.on_assigned({at: self.epoch}, {at: committed} if committed else {})
        if records := [record for record in part.log if record.offset >= part.floor]:
            self.pump.on_records(at, self.epoch, records)

    async def give_up(self, partitions: Sequence[TopicPartition], seconds: float) -> None:
        assigned = [each for each in partitions if each in self.pump.lanes]
        revoked = asyncio.ensure_future(self.pump.on_revoked(assigned, Deadline(self.clock, seconds)))
        while not revoked.done():
            await self.clock.advance(0.05)
        for each in assigned:
            part = self.parts[each]
            part.over |= part.named  # also those that were in flight
            part.settled |= part.named
        self.commit(revoked.result())

    def end_elsewhere(self, at: TopicPartition, count: int) -> None:
        """Let another process, which has the partition now, end the next records and commit them."""
        offsets = [record.offset for record in self.parts[at].log]
        if at in self.pump.lanes or not offsets:
            return
        committed = self.commits.get(at)
        tracker = AckTracker(1, committed)
        offsets = [offset for offset in offsets if offset >= (committed.offset if committed else 0)]
        before = tracker.delivered(offsets)
        if ends := [offset for offset in offsets if offset not in before][:count]:
            tracker.done(ends, 1)
            assert tracker.commit
            self.commits[at] = tracker.commit

    async def end(self) -> None:
        """Everything is acknowledged in the end, and then committed."""
        self.free.set()
        for at in self.parts:
            if at not in self.pump.lanes:
                self.assign(at)
        for _ in range(200):
            await self.clock.advance(1)
            await self.clock.settle()
            for at, lane in self.pump.lanes.items():
                for offset in sorted(lane.tracker.held):
                    self.acknowledge(at, offset)
            if not any(lane.tracker.has_open for lane in self.pump.lanes.values()):
                break
        await self.give_up([*self.parts], 1)
        for at, part in self.parts.items():
            if part.log:
                assert part.over == {record.offset for record in part.log}
                assert self.commits[at] == Committed(part.farthest(self.window))


AT = st.sampled_from([P0, P0, P1])
ACTIONS = st.one_of(
    st.tuples(st.just("write"), AT, st.integers(1, 6), st.integers(0, 3)),
    st.tuples(st.just("ack"), AT, st.integers(0, 9)),
    st.tuples(st.just("ack"), AT, st.integers(0, 4)),
    st.tuples(st.just("plan"), AT, st.integers(5, 14), st.sampled_from([ACK, RETRY, BURY])),
    st.tuples(st.just("hang"), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from([0.0, 0.05, 1.0, 9.0])),
    st.tuples(st.just("give up"), st.sampled_from([[P0], [P1], [P0, P1]]), st.sampled_from([0.0, 0.2, 5.0])),
    st.tuples(st.just("lose"), AT),
    st.tuples(st.just("elsewhere"), AT, st.integers(1, 4)),
    st.tuples(st.just("assign"), AT),
)


@given(
    actions=st.lists(ACTIONS, min_size=1, max_size=40),
    ordering=st.sampled_from(["partition", "key", "none"]),
    up_to=st.booleans(),
    window=st.sampled_from([0, 0, 1, 3]),
)
def test_no_commit_passes_an_open_record_and_all_that_is_acknowledged_is_committed(
    actions: list[tuple[Any, ...]], ordering: str, up_to: bool, window: int
) -> None:
    """Whatever is delivered, fails, hangs, is acknowledged, given up, lost, ended elsewhere or assigned again."""

    async def run() -> None:
        bed = AckModel(ordering=ordering, up_to=up_to, window=window)
        await bed.pump.start()
        for at in bed.parts:
            bed.assign(at)
            bed.write_records(at, 4, 0)
        for what, *given_ in actions:
            await bed.clock.settle()
            if what == "write":
                bed.write_records(*given_)
            elif what == "ack":
                bed.acknowledge(given_[0], bed.offset_of(*given_))
            elif what == "plan":
                at, offset, reply = given_
                bed.parts[at].plans.setdefault(offset, []).append(reply)
            elif what == "hang":
                (bed.free.clear if given_[0] else bed.free.set)()
            elif what == "time":
                await bed.clock.advance(given_[0])
            elif what == "give up":
                await bed.give_up(*given_)
            elif what == "lose":
                bed.pump.on_lost(given_)
            elif what == "elsewhere":
                bed.end_elsewhere(*given_)
            elif given_[0] not in bed.pump.lanes:
                bed.assign(given_[0])
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
