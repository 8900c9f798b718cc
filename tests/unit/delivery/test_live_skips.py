"""A pump whose records are skipped by hand, under a clock that tests own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from live_pump import BURY, P0, P1, RETRY, Bed, run

from headrace.delivery.protocols import ACK, Delivery, Outcome, Verdict
from headrace.errors import DeadLetterFailed, DestinationUnavailable
from headrace.lifecycle import Deadline
from headrace.records import Committed, Record, TopicPartition


@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
def test_a_record_is_skipped_while_it_is_in_flight(ordering: str) -> None:
    """Its attempt is given up, the others of that attempt are delivered again, and the commit passes it."""

    async def test(bed: Bed) -> None:
        bed.free.clear()
        for offset, key in ((0, b"a"), (1, b"b"), (2, b"c"), (3, b"b")):
            bed.feed(offset, key=key)
        await bed.clock.settle()
        assert bed.pump.skip(P0, 1, "the handler hangs on it") == "skipped"
        bed.free.set()
        await bed.clock.advance(1)
        later = [offsets for offsets in bed.delivered if 1 not in offsets]
        assert {0, 2, 3} == {offset for offsets in later for offset in offsets}
        assert bed.commits[P0] == Committed(4)
        assert (bed.pump.counts.delivered, bed.pump.counts.skipped_by_hand, bed.released) == (3, 1, 4)

    run(lambda: Bed(ordering=ordering, max_records=4), test)


def test_an_answer_that_comes_in_spite_of_all_means_nothing() -> None:
    """A destination that does not let itself be cancelled brings results of a delivery that was given back."""

    async def test(bed: Bed) -> None:
        async def stubborn(delivery: Delivery) -> Sequence[Outcome]:
            bed.deliveries.append(delivery)
            try:
                await bed.free.wait()
            except asyncio.CancelledError:
                if len(bed.deliveries) % 2:
                    raise DestinationUnavailable("cancelled") from None
            return [ACK] * len(delivery.records)

        bed.deliver = stubborn  # type: ignore[method-assign]
        for first in (0, 10):
            bed.free.clear()
            bed.feed(first, first + 1)
            await bed.clock.settle()
            assert bed.pump.skip(P0, first, "it hangs") == "skipped"
            await bed.clock.settle()
            assert bed.pump.lanes[P0].tracker.is_open(first + 1)
            bed.free.set()
            await bed.clock.advance(30)
        assert bed.commits[P0] == Committed(12)
        assert bed.pump.counts.delivered == 2

    run(Bed, test)


def test_a_record_is_skipped_before_it_begins() -> None:
    """While it is ready, waits behind its key, in its retry pause, and before it comes from Kafka."""

    async def test(bed: Bed) -> None:
        bed.answers[0] = RETRY
        for offset, key in ((0, b"a"), (1, b"a"), (2, b"a"), (3, b"b")):
            bed.feed(offset, key=key)
        bed.pump.hold([P0], "paused")
        bed.feed(4, key=b"c")
        await bed.clock.settle()
        assert bed.delivered == [[0], [3]]
        said = [bed.pump.skip(P0, offset, "it is wrong") for offset in (1, 4, 0, 9)]
        assert said == ["skipped", "skipped", "skipped", "will be skipped"]
        bed.pump.release_hold([P0])
        bed.feed(7, 9, key=b"d")
        await bed.clock.advance(30)
        assert bed.delivered == [[0], [3], [2], [7]]
        assert bed.commits[P0] == Committed(10)

    run(lambda: Bed(ordering="key"), test)


def test_a_skip_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    """What has ended, or lies in a hole, has ended already; what is not ours is not assigned; the log says why."""

    async def test(bed: Bed) -> None:
        bed.feed(5, 9)
        await bed.clock.advance(1)
        assert [bed.pump.skip(P0, offset, "why not") for offset in (4, 5, 7)] == ["ended already"] * 3
        assert bed.pump.skip(TopicPartition("t", 9), 1, "why not") == "not assigned"
        assert bed.pump.skip(P1, 1, "why not") == "will be skipped"
        bed.feed(1, partition=P1)
        assert "t-1: offset 1 is skipped, as somebody said: why not" in caplog.text

    run(Bed, test)


def test_with_the_record_its_trouble_is_gone() -> None:
    """It was in its retry pause and the only one; nothing is left to be said of it."""

    async def test(bed: Bed) -> None:
        bed.answers[0] = RETRY
        bed.feed(0)
        await bed.clock.settle()
        bed.pump.hold([P0], "paused")
        await bed.clock.advance(20)
        assert "offset 0 failed 1 of 3 times" in bed.pump.readiness().reason
        bed.pump.skip(P0, 0, "it is wrong")
        bed.pump.release_hold([P0])
        await bed.clock.advance(20)
        assert (bed.pump.readiness().ready, bed.why(), bed.delivered) == (True, "", [[0]])

    run(Bed, test)


def test_a_record_is_skipped_whose_dead_letter_cannot_be_written() -> None:
    """At once, whatever is left of the pause; the letters beside it are still written."""

    async def test(bed: Bed) -> None:
        bed.letters_down, bed.answers = True, {0: BURY, 1: BURY}
        bed.feed(0, 1, 2)
        await bed.clock.advance(10)
        assert bed.why() == "no room"
        assert bed.pump.skip(P0, 0, "never mind") == "skipped"
        bed.letters_down = False
        await bed.clock.settle()
        assert bed.letters == [1]
        await bed.clock.advance(1)
        assert (bed.delivered, bed.commits[P0]) == ([[0, 1], [2]], Committed(3))

    run(Bed, test)


def test_a_lane_that_stands_for_good_moves_when_the_blamed_record_is_skipped() -> None:
    """Dead letters are off: the first is skipped, the second is blamed then; with that the partition moves."""

    async def test(bed: Bed) -> None:
        bed.answers = {0: BURY, 1: BURY}
        bed.feed(0, 1, 2)
        await bed.clock.advance(10)
        assert "offset 0 failed" in bed.why()
        bed.pump.skip(P0, 0, "never mind")
        await bed.clock.advance(1)
        assert "offset 1 failed" in bed.why()
        bed.pump.skip(P0, 1, "never mind")
        await bed.clock.advance(1)
        assert (bed.delivered, bed.why(), bed.commits[P0]) == ([[0, 1], [2]], "", Committed(3))
        assert bed.pump.readiness().ready

    run(lambda: Bed(without_letters=True), test)


def test_a_record_is_skipped_in_a_half_that_waits() -> None:
    """One answer failed the whole; the other records of the half keep their turn."""

    async def test(bed: Bed) -> None:
        bed.answers = dict.fromkeys(range(4), Outcome(Verdict.RETRY, "HTTP 500", "no", 500))
        bed.feed(0, 1, 2, 3)
        await bed.clock.settle()
        assert bed.pump.skip(P0, 2, "it is wrong") == "skipped"
        assert bed.pump.skip(P0, 3, "it is wrong") == "skipped"
        bed.answers.clear()
        bed.feed(4)
        await bed.clock.advance(30)
        assert (bed.delivered, bed.commits[P0]) == ([[0, 1, 2, 3], [0, 1], [4]], Committed(5))

    run(lambda: Bed(max_records=4), test)


def test_a_key_that_waits_elsewhere_is_told_before_a_skipped_record_has_ended() -> None:
    """Repeated until it is written; what is committed never passes the record before that, nor does a crash."""

    async def test(bed: Bed) -> None:
        told: list[int] = []

        async def let_go(record: Record) -> None:
            await asyncio.sleep(0)
            if bed.letters_down:
                raise DeadLetterFailed("parked keys are not written")
            told.append(record.offset)

        bed.pump.let_go = let_go
        bed.free.clear()
        bed.letters_down = True
        bed.feed(0, 1)
        await bed.clock.settle()
        assert [bed.pump.skip(P0, 0, "it hangs") for _ in range(2)] == ["will be skipped"] * 2
        bed.free.set()
        await bed.clock.advance(3)
        assert (bed.delivered, bed.commits[P0].offset, bed.why()) == ([[0, 1], [1]], 0, "parked keys are not written")
        bed.letters_down = False
        await bed.clock.advance(2)
        assert (told, bed.commits[P0], bed.why()) == ([0], Committed(2), "")
        bed.letters_down = True
        bed.feed(2)
        bed.pump.skip(P0, 2, "it is wrong")
        assert await bed.pump.seek(P0, 2)
        bed.letters_down = False
        await bed.clock.advance(2)
        bed.feed(2, 3)
        await bed.clock.advance(2)
        assert (bed.delivered[-1], bed.commits[P0]) == ([3], Committed(4))

    run(Bed, test)


def test_a_skip_while_a_partition_is_sought_counts_where_it_begins() -> None:
    """What is drained then is gone; the skip waits for the record to come again."""

    async def test(bed: Bed) -> None:
        bed.free.clear()
        bed.feed(0, 1, 2)
        await bed.clock.settle()
        seek = asyncio.create_task(bed.pump.seek(P0, 1))
        await bed.clock.settle()
        assert bed.pump.skip(P0, 2, "it is wrong") == "will be skipped"
        bed.free.set()
        assert await seek
        bed.feed(1, 2, 3)
        await bed.clock.advance(1)
        assert bed.delivered[1:] == [[1, 3]]

    run(Bed, test)


def test_a_record_that_comes_while_a_partition_is_sought_is_skipped_where_it_begins() -> None:
    """It was still to come; what comes into the old epoch is forgotten, and the skip is not."""

    async def test(bed: Bed) -> None:
        bed.free.clear()
        bed.feed(0, 1)
        await bed.clock.settle()
        assert bed.pump.skip(P0, 3, "it is wrong") == "will be skipped"
        seek = asyncio.create_task(bed.pump.seek(P0, 1))
        await bed.clock.settle()
        bed.feed(2, 3)
        bed.free.set()
        assert await seek
        bed.feed(1, 2, 3, 4)
        await bed.clock.advance(1)
        assert bed.delivered[1:] == [[1, 2], [4]]
        assert bed.pump.counts.skipped_by_hand == 1

    run(Bed, test)


def test_a_skip_goes_with_its_assignment() -> None:
    """Others may have skipped it, gone back, or made the topic anew; whoever gave the command gives it again."""

    async def test(bed: Bed) -> None:
        assert bed.pump.skip(P0, 1, "it is wrong") == "will be skipped"
        bed.pump.on_lost([P0])
        bed.pump.on_assigned({P0: 3}, {})
        bed.feed(0, 1)
        await bed.clock.settle()
        assert bed.delivered == [[0, 1]]

    run(Bed, test)


@pytest.mark.parametrize("way", ["lost", "revoked"])
def test_a_key_is_let_go_when_its_partition_is_somebody_elses(way: str) -> None:
    """What was skipped then has not ended here: nothing is committed of it, and the pump goes on."""

    async def test(bed: Bed) -> None:
        written = asyncio.Event()

        async def let_go(_: Record) -> None:
            await written.wait()

        bed.pump.let_go = let_go
        bed.pump.hold([P0], "paused")
        bed.feed(0)
        assert bed.pump.skip(P0, 0, "it is wrong") == "will be skipped"
        await bed.clock.settle()
        if way == "lost":
            bed.pump.on_lost([P0])
        else:
            assert await bed.pump.on_revoked([P0], Deadline(bed.clock, 5)) == {P0: Committed(0)}
        written.set()
        await bed.clock.advance(1)
        assert (bed.pump.counts.skipped_by_hand, bed.commits, bed.released) == (0, {}, 0)

    run(Bed, test)


def test_a_skip_too_far_ahead_for_an_offset_map_waits_until_it_is_not() -> None:
    """Behind a hole of the log, while the first record hangs; what is committed stays writable all the while."""

    async def test(bed: Bed) -> None:
        bed.free.clear()
        bed.feed(0, 10, 30_000, 30_001, 60_000)
        await bed.clock.settle()
        said = [bed.pump.skip(P0, offset, "it is wrong") for offset in (30_000, 60_000)]
        assert said == ["will be skipped"] * 2
        await bed.clock.advance(1)
        assert (bed.pump.counts.skipped_by_hand, bed.pump.lanes[P0].tracker.commit) == (0, Committed(0))
        bed.free.set()
        await bed.clock.advance(1)
        assert {0, 10, 30_001} == {offset for offsets in bed.delivered for offset in offsets}
        assert (bed.pump.counts.skipped_by_hand, bed.commits[P0]) == (2, Committed(60_001))
        assert await bed.pump.on_revoked([P0], Deadline(bed.clock, 5)) == {P0: Committed(60_001)}

    run(lambda: Bed(ordering="none"), test)


def test_a_skip_too_far_ahead_goes_with_a_seek() -> None:
    """The record comes again behind it, and is skipped then."""

    async def test(bed: Bed) -> None:
        bed.free.clear()
        bed.feed(0, 30_000)
        await bed.clock.settle()
        assert bed.pump.skip(P0, 30_000, "it is wrong") == "will be skipped"
        seek = asyncio.create_task(bed.pump.seek(P0, 29_999))
        await bed.clock.settle()
        bed.free.set()
        assert await seek
        bed.feed(29_999, 30_000, 30_002)
        await bed.clock.advance(1)
        assert (bed.delivered[1:], bed.pump.counts.skipped_by_hand) == ([[29_999, 30_002]], 1)

    run(lambda: Bed(ordering="none"), test)
