"""What the pump says and counts, and what its machine cannot see; under a clock that tests own."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from headrace.delivery.outcomes import PartitionListener
from headrace.delivery.pump_context import CommitPace
from headrace.delivery.seeks_and_skips import DRAIN_SECONDS
from headrace.records import Committed, Record, TopicPartition
from headrace.runtime import Deadline
from headrace_devkit.testing.pump_harness import BURY, P0, P1, Harness, MovingClock, running


async def test_a_stalled_partition_is_reported_by_readiness_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Readiness counts from the first refusal; the log reports the stall once, and its end."""
    caplog.set_level("INFO")
    async with running(Harness()) as harness:
        harness.down = True
        harness.feed(0)
        await harness.clock.advance(3)
        assert (harness.pump.readiness().ready, caplog.messages) == (True, [])
        await harness.clock.advance(20)
        ready, why = harness.pump.readiness()
        assert (ready, harness.pump.numbers()["stalled_partitions"]) == (False, 1)
        failures = r"after \d failures: connection refused"
        assert re.fullmatch(rf"t-0 is stalled: the breaker of pump is .+ {failures}", why)
        harness.down = False
        await harness.clock.advance(10)
        assert (harness.pump.readiness().ready, harness.pump.numbers()["stalled_partitions"]) == (True, 0)
        opened, closed = caplog.messages
        assert re.fullmatch(rf"the breaker of pump is open until 13:4\d:\d\d UTC {failures}", opened)
        assert closed == "the breaker of pump is closed again"


async def test_dead_letters_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """How many, from where and why, without keys and values."""
    async with running(Harness()) as harness:
        harness.responses = {4: BURY, 5: BURY}
        harness.feed(4, 5)
        await harness.clock.advance(1)
    assert caplog.messages == ["group g, t-0: dead letters=2, first offset 4: E"]


async def test_the_listener_is_called_before_partitions_are_released() -> None:
    """A destination with state writes it when nothing is in flight and the partition is still assigned."""
    told: list[tuple[float, bool]] = []

    class Listener(PartitionListener):
        async def drained(self, partitions: Collection[TopicPartition], deadline: Deadline) -> None:
            told.append((deadline.remaining_seconds, P0 in harness.pump.lanes))

    async with running(Harness(hooks={"partitions": Listener()})) as harness:
        harness.feed(0, 1)
        await harness.clock.settle()
        assert await harness.pump.on_revoked([P0], Deadline(harness.clock, 10)) == {P0: Committed(2)}
        assert await harness.pump.on_revoked([P0], Deadline(harness.clock, 10)) == {}
        assert told == [(10, True), (10, False)]  # without a lane too: its events may be at work still
        harness.pump.on_assigned({P0: 2}, {})
        harness.pump.on_lost([P0])
        await harness.clock.settle()
        assert told[2:] == [(DRAIN_SECONDS, False)]


@pytest.mark.parametrize("steady", [False, True])
async def test_commits_of_many_partitions_do_not_block_the_loop(steady: bool) -> None:
    """Each may take milliseconds: a few are committed at a time, and each once per round."""
    places, told = [TopicPartition("t", number) for number in range(40)], list[Mapping[TopicPartition, Any]]()
    harness = Harness(clock=MovingClock())

    def commit(offsets: Mapping[TopicPartition, Committed]) -> None:
        told.append(dict(offsets))
        for partition in places if steady and len(told) < 1000 else ():
            harness.pump._mark(partition)

    harness.source.commit = commit  # type: ignore[method-assign]
    await harness.pump.start()
    harness.pump.on_assigned(dict.fromkeys(places, 1), {place: Committed(0) for place in places})
    for partition in places:
        harness.pump.on_records(partition, 1, [Record(*partition, 0, 0, None, b"v")])
    await harness.clock.advance(1)
    each = [partition for offsets in told for partition in offsets]
    assert {*each} == {*places}
    assert max(each.count(partition) for partition in places) <= 6
    assert max(len(offsets) for offsets in told) <= 10
    harness.pump._dirty.update(dict.fromkeys(places, 1))
    harness.pump.commit_now()
    assert len(told[-1]) == 40
    await harness.pump.stop()


@pytest.mark.parametrize(
    ("partitions", "records", "commits"), [(50, 1, 150), (999, 1, 2), (999, 20, 30), (999, 200, 150)]
)
async def test_how_often_a_partition_is_committed_follows_its_rate(partitions: int, records: int, commits: int) -> None:
    """Up to 50 partitions every 0.2 s; of 999 each after 100 records or 28.5 s, whichever comes first."""
    told: list[int] = []
    harness = Harness(max_records=1000, hooks={"commits": CommitPace(partitions=lambda: partitions)})
    harness.source.on_commit = lambda offsets: told.append(offsets[P0].offset)
    async with running(harness):
        harness.feed(0)  # the first record is committed at once
        await harness.clock.advance(0.2)
        assert told == [1]
        for fifth in range(150):
            harness.feed(*range(1 + fifth * records, 1 + (fifth + 1) * records))
            await harness.clock.advance(0.2)
        assert commits - 2 <= len(told) - 1 <= commits + 1
        await harness.clock.advance(30)
        assert told[-1] == 1 + 150 * records


async def test_a_process_that_is_left_with_few_partitions_commits_at_once_again() -> None:
    """Others that take the rest over must not leave it with the time of many."""
    partitions = 1000
    async with running(Harness(hooks={"commits": CommitPace(partitions=lambda: partitions)})) as harness:
        harness.feed(0)
        await harness.clock.advance(1)
        harness.feed(1)
        await harness.clock.advance(1)
        assert harness.source.commits == {P0: Committed(1)}
        partitions = 50
        await harness.clock.advance(0.2)
        assert harness.source.commits == {P0: Committed(2)}


async def test_revoke_and_stop_commit_what_waits_for_its_time() -> None:
    """Only a kill repeats it."""
    harness = Harness(hooks={"commits": CommitPace(partitions=lambda: 1000)})
    async with running(harness):
        harness.feed(0)
        await harness.clock.advance(1)
        harness.feed(1, 2)
        await harness.clock.advance(10)
        assert harness.source.commits == {P0: Committed(1)}
        assert await harness.pump.on_revoked([P0], Deadline(harness.clock, 10)) == {P0: Committed(3)}
        harness.pump.on_assigned({P0: 3}, {P0: Committed(3)})
        harness.feed(3)
        await harness.clock.advance(40)
        assert harness.source.commits == {P0: Committed(4)}


async def test_what_a_task_continues_with_does_not_keep_the_records_before() -> None:
    """Their bytes are released, so they must not stay in memory while the next delivery hangs."""
    values = [bytes(1000) for _ in range(4)]
    before = [sys.getrefcount(value) for value in values]
    async with running(Harness()) as harness:
        harness.hold(2)
        harness.pump.on_records(P0, 1, [Record(*P0, n, 0, None, value) for n, value in enumerate(values)])
        await harness.clock.advance(1)
        assert (harness.delivered, harness.source.released) == ([[0, 1], [2, 3]], 2)
        harness.deliveries.clear()
        assert [sys.getrefcount(value) for value in values][:2] == before[:2]
        harness.held[2].set()


async def test_an_error_while_others_begin_leaves_nothing_in_flight() -> None:
    """Or the drain of a pump that died would wait for a delivery that no task makes."""
    harness = Harness(max_in_flight=1, hooks={"most_records": [2, 2].pop})  # the third call raises
    await harness.pump.start()
    harness.pump.on_assigned({P0: 1, P1: 2}, {})
    harness.hold(0)
    harness.feed(0, 1, 2, 3)
    harness.feed(4, 5, partition=P1)
    await harness.clock.settle()
    harness.pump.breaker.limit.change(2)
    harness.held[0].set()
    await harness.clock.settle()
    assert isinstance(harness.pump.death, IndexError)
    assert harness.pump.breaker.limit.in_flight == 0
    assert (await harness.pump.on_revoked([P0, P1], Deadline(harness.clock, 60)))[P0] == Committed(2)
    await harness.pump.stop()
