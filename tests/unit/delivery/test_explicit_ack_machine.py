"""Explicit acknowledgements in the delivery core: a model with random events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delivery import lane as lanes
from headrace.delivery import tracker as trackers
from headrace.delivery.explicit_acks import AckRules
from headrace.delivery.offset_map import decode
from headrace.delivery.outcomes import ACK, AWAITING_ACK, DeadLetter, Delivery, Reply
from headrace.delivery.tracker import AckTracker
from headrace.records import Committed, Record, TopicPartition
from headrace.runtime import Deadline
from headrace_devkit.testing.pump_harness import BURY, P0, P1, RETRY, Harness

SPAN = 12
"""Offsets of an offset map here, so that few records reach beyond it."""
ACK_WAIT_SECONDS = 0.1


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

    @property
    def open(self) -> set[int]:
        """The records of this assignment that have not ended."""
        return {record.offset for record in self.log if record.offset >= self.floor} - self.over

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
            ends = not reply.awaiting_ack or offset in self.named | self.covered
            (self.over if ends else self.held).add(offset)
        self.covered.discard(offset)

    def farthest(self, window: int) -> int:
        """Return the largest offset that may be committed: the window is for what nobody acknowledged."""
        offsets = [record.offset for record in self.log if record.offset >= self.floor]
        ended = next((n for n, offset in enumerate(offsets) if offset not in self.over), len(offsets))
        end = [*offsets, offsets[-1] + 1][ended] if offsets else self.floor
        behind = offsets[ended - window] if window and ended >= window else self.floor or offsets[0]
        return max(behind, min(end, self.acked_to)) if window else end


class AckModel(Harness):
    """Says what may be committed, what must not be delivered again, and which acknowledgements are refused."""

    def __init__(self, *, ordering: str, up_to: bool, window: int, stubborn: bool) -> None:
        super().__init__(ordering=ordering, max_records=3, hooks={"acks": AckRules(window, ACK_WAIT_SECONDS)})
        self.up_to, self.window, self.stubborn = up_to, window, stubborn
        self.parts = {P0: Partition(), P1: Partition()}
        self.wrong: list[str] = []
        self.source.on_commit = self._committed
        self.dead_letters.on_written = self._buried

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        part, offsets = self.parts[delivery.partition], [record.offset for record in delivery.records]
        assignment = part.assignment
        if again := (part.settled | part.over).intersection(offsets):
            self.wrong.append(f"{again} of {delivery.partition} have ended and come again")
        part.begun.update(offsets)
        part.in_flight.append(offsets)
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            if not self.stubborn:
                raise
            return [AWAITING_ACK] * len(offsets)  # too late: nobody may take it
        finally:
            if part.assignment == assignment:
                part.in_flight.remove(offsets)
        replies = [part.plans[offset].pop(0) if part.plans.get(offset) else AWAITING_ACK for offset in offsets]
        if part.assignment == assignment:
            for offset, reply in zip(offsets, replies, strict=True):
                part.answered(offset, reply)
        return replies

    def _buried(self, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            self.parts[letter.record.topic_partition].over.add(letter.record.offset)

    def _committed(self, offsets: Any) -> None:
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

    def plan(self, at: TopicPartition, number: int, reply: Reply) -> None:
        """Let a record that is in flight, or the next one, be answered so."""
        part = self.parts[at]
        if offsets := sorted(part.open - part.held):
            part.plans.setdefault(offsets[number % len(offsets)], []).append(reply)

    def offset_of(self, at: TopicPartition, number: int) -> int:
        """Return the offset of a record by its number, or one that is no record."""
        log = self.parts[at].log
        return log[number].offset if number < len(log) else number + 5

    def acknowledge_begun(self, at: TopicPartition, number: int) -> None:
        """Acknowledge a record that has begun and not ended."""
        part = self.parts[at]
        if at in self.pump.lanes and (begun := sorted(part.begun - part.over)):
            self.acknowledge(at, begun[number % len(begun)])

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
        self.source.epoch += 1
        committed, part = self.source.commits.get(at), self.parts[at]
        part.begin(committed)
        self.pump.on_assigned({at: self.source.epoch}, {at: committed} if committed else {})
        if records := [record for record in part.log if record.offset >= part.floor]:
            self.pump.on_records(at, self.source.epoch, records)

    async def give_up(self, partitions: Sequence[TopicPartition], seconds: float, late: int = 0) -> None:
        """Give partitions up; if there is time, deliveries end, and a record that waits is acknowledged late."""
        assigned, began = [each for each in partitions if each in self.pump.lanes], self.clock.monotonic()
        revoked = asyncio.ensure_future(self.pump.on_revoked(assigned, Deadline(self.clock, seconds)))
        await self.clock.settle()
        waiting = [(each, offset) for each in assigned for offset in sorted(self.parts[each].held)]
        if waiting and seconds:
            assert not revoked.done(), "late acknowledgements have no time"
            self.acknowledge(*waiting[late % len(waiting)])
        if seconds:
            self.free.set()
        while not revoked.done():
            await self.clock.advance(0.05)
        assert self.clock.monotonic() - began <= (ACK_WAIT_SECONDS if seconds else 0) + 0.051, "it waits too long"
        for each in assigned:
            part = self.parts[each]
            part.over |= part.named  # also those that were in flight
            if not self.window:  # else the next assignment knows no acknowledgement, and may commit before it
                part.settled |= part.named
        self.source.commit(revoked.result())
        for each in assigned:
            self.check_commit(each)

    def check(self) -> None:
        """Compare what is open, what waits, and what has begun, with what was promised."""
        for at, lane in self.pump.lanes.items():
            part = self.parts[at]
            assert lane.acks.awaiting_ack == part.held
            assert {r.offset for r in part.log if lane.tracker.is_in_flight(r.offset)} == part.open
            assert lane.tracker.in_flight_records == len(part.open)
            if self.free.is_set() and part.begun <= part.held | part.over and not self.pump.breaker.waits_for:
                near = {offset for offset in part.open if offset < min(part.open) + SPAN}
                assert part.begun >= near, f"{near - part.begun} of {at} do not begin"

    def check_commit(self, at: TopicPartition) -> None:
        """Compare what is committed with all that has ended, once there was time for it."""
        part, committed = self.parts[at], self.source.commits.get(at)
        if committed is None:
            assert not part.over
        elif part.log:
            assert committed.offset == part.farthest(self.window)
            if not self.window:
                assert part.ended_by(committed) == {each for each in part.over if each < committed.offset + SPAN}

    def end_elsewhere(self, at: TopicPartition, count: int) -> None:
        """Let another process, which has the partition now, end the next records and commit them."""
        offsets = [record.offset for record in self.parts[at].log]
        if at in self.pump.lanes or not offsets:
            return
        committed = self.source.commits.get(at)
        tracker = AckTracker(1, committed)
        offsets = [offset for offset in offsets if offset >= (committed.offset if committed else 0)]
        before = tracker.delivered(offsets)
        if ends := [offset for offset in offsets if offset not in before][:count]:
            tracker.done(ends, 1)
            assert tracker.commit
            self.source.commits[at] = tracker.commit

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
                for offset in sorted(lane.acks.awaiting_ack):
                    self.acknowledge(at, offset)
            if not any(lane.tracker.has_in_flight for lane in self.pump.lanes.values()):
                break
        await self.give_up([*self.parts], 1)
        for at, part in self.parts.items():
            if part.log:
                assert part.over == {record.offset for record in part.log}
                assert self.source.commits[at] == Committed(part.farthest(self.window))


AT = st.sampled_from([P0, P0, P0, P1])
BEGUN = st.tuples(st.just("ack begun"), AT, st.integers(0, 5))
SECONDS = st.sampled_from([0.0, 5.0])
HANG = st.tuples(st.just("hang"), st.booleans())
WRITE = st.tuples(st.just("write"), AT, st.integers(1, 6), st.integers(0, 3))
PLAN = st.tuples(st.just("plan"), AT, st.integers(0, 2), st.sampled_from([ACK, RETRY, RETRY, BURY]))
ACTIONS = st.one_of(
    WRITE,
    WRITE,
    BEGUN,
    BEGUN,
    st.tuples(st.just("ack"), AT, st.integers(0, 9)),
    PLAN,
    HANG,
    HANG,
    st.tuples(st.just("time"), st.sampled_from([0.0, 0.05, 1.0, 9.0])),
    st.tuples(
        st.just("give up"), st.sampled_from([[P0], [P1], [P0, P1]]), st.sampled_from([0.0, 5.0]), st.integers(0, 5)
    ),
    st.tuples(st.just("lose"), AT),
    st.tuples(st.just("elsewhere"), AT, st.integers(1, 4)),
    st.tuples(st.just("assign"), AT),
    st.tuples(st.just("assign"), AT),
)


@given(
    actions=st.lists(ACTIONS, min_size=12, max_size=50),
    ordering=st.sampled_from(["partition", "key", "none"]),
    up_to=st.booleans(),
    window=st.sampled_from([0, 0, 1, 3]),
    stubborn=st.booleans(),
)
@settings(max_examples=5 * settings().max_examples // 2)
def test_no_commit_passes_an_open_record_and_all_that_is_acknowledged_is_committed(
    actions: list[tuple[Any, ...]], ordering: str, up_to: bool, window: int, stubborn: bool
) -> None:
    """Whatever is delivered, fails, hangs, is acknowledged, given up, lost, ended elsewhere or assigned again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "SPAN_OFFSETS", SPAN)
        patch.setattr(trackers, "SPAN_OFFSETS", SPAN)
        patch.setattr(trackers, "_PRUNE_RECORDS", 3)
        asyncio.run(_check(AckModel(ordering=ordering, up_to=up_to, window=window, stubborn=stubborn), actions))


async def _check(harness: AckModel, actions: list[tuple[Any, ...]]) -> None:
    try:
        await _act(harness, actions)
    finally:  # a stubborn delivery would survive the end of the event loop
        harness.stubborn = False
        harness.free.set()


async def _act(harness: AckModel, actions: list[tuple[Any, ...]]) -> None:
    await harness.pump.start()
    for at in harness.parts:
        harness.assign(at)
        harness.write_records(at, 4, 0)
    for what, *given_ in actions:
        await harness.clock.settle()
        harness.check()
        if what == "write":
            harness.write_records(*given_)
        elif what == "ack":
            harness.acknowledge(given_[0], harness.offset_of(*given_))
        elif what == "ack begun":
            harness.acknowledge_begun(*given_)
        elif what == "plan":
            harness.plan(*given_)
        elif what == "hang":
            (harness.free.clear if given_[0] else harness.free.set)()
        elif what == "time":
            await harness.clock.advance(given_[0])
            for at in harness.pump.lanes if given_[0] >= 1 else ():
                harness.check_commit(at)
        elif what == "give up":
            await harness.give_up(*given_)
        elif what == "lose":
            harness.pump.on_lost(given_)
        elif what == "elsewhere":
            harness.end_elsewhere(*given_)
        elif given_[0] not in harness.pump.lanes:
            harness.assign(given_[0])
    await harness.end()
    assert (harness.wrong, harness.pump.death) == ([], None)
    await harness.pump.stop()
