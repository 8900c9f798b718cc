"""What becomes of the events of a function when its process gains or loses partitions, or ends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.function_calls import FunctionCalls, Line

WAITS = """
def handler(context, event):
    note("begin", event.shard_id, event.offset)
    while event.body == b"wait" and not pathlib.Path("go").exists():
        time.sleep(0.01)
    note("end", event.shard_id, event.offset)
"""
"""An event `wait` ends when the file `go` is there."""
SLOW = """
def init_context(context):
    context.platform.set_drain_callback(lambda: note("drained"))


def handler(context, event):
    time.sleep(0 if pathlib.Path("fast").exists() else 0.02)
    note("call", event.shard_id, event.offset)
"""
KEEPS = """
positions = []


async def later(context):
    await asyncio.sleep(0.3)
    await acknowledge(context, *positions)
    positions.clear()


async def init_context(context):
    async def drained():
        context.user_data.late = asyncio.ensure_future(later(context))

    context.platform.set_drain_callback(drained)


async def handler(context, event):
    note("call", event.shard_id, event.offset)
    what, *others = event.body.decode().split()
    if what == "ack":
        return await acknowledge(context, *others)
    if what == "keep":
        positions.append(f"{event.topic}:{event.shard_id}:{event.offset}")
    response = context.Response()
    response.ensure_no_ack()
    return response
"""
"""Keeps positions, and acknowledges them a moment after its drain callback has returned."""
PROTOCOLS = pytest.mark.parametrize("protocol", ["classic", "consumer"])


@pytest.fixture
def calls(site: Any, headrace: Any, topic: Any, tmp_path: Path) -> Callable[[int], FunctionCalls]:
    """Make a function on a topic of so many partitions."""
    return lambda partitions: FunctionCalls(site, headrace, tmp_path, topic(partitions))


@PROTOCOLS
def test_only_partitions_that_are_given_up_are_drained(calls: Any, protocol: str, tmp_path: Path) -> None:
    """At the deadline a worker that is still at their event is killed; the event goes to the next owner, unblamed."""
    one = calls(4)
    own = {
        "trigger": {"numWorkers": 4},
        "maxWaitHandlerDuringRebalance": "1s",
        "consumer": {"group_protocol": protocol},
    }
    for partition in range(4):
        one.write(partition, "wait", "next")
    first = one.start(WAITS, **own)
    one.wait_lines(4, "begin")
    second = one.start(WAITS, name="two", **{**own, "trigger": {"numWorkers": 2}})
    one.wait_lines(2, "begin", "two")
    moved = {line.partition for line in one.of("begin", "two")}
    assert len(moved) == 2
    (tmp_path / "go").touch()
    one.wait_committed(dict.fromkeys(range(4), 2))
    for partition in range(4):
        process = "two" if partition in moved else "one"
        assert one.counts("begin", partition) == {0: 1 + (partition in moved), 1: 1}
        ended = [(line.process, line.offset) for line in one.of("end") if line.partition == partition]
        assert ended == [(process, 0), (process, 1)], "a worker that is killed ends nothing"
    kept = {line.partition: line.pid for line in one.of("begin", "one") if line.partition not in moved}
    assert {line.partition: line.pid for line in one.of("end", "one")} == kept, "the others keep their workers"
    assert first.output.count("was still running when the partition had to be given up") == 2
    assert [process.terminate() for process in (first, second)] == [0, 0]
    assert one.reasons() == []


def test_a_member_without_partitions_leaves_at_once(calls: Any) -> None:
    """Or each rebalance until the end of its session waits for it, with partitions that nobody reads."""
    one = calls(1)
    one.write(0, "a")
    first = one.start(SLOW)
    one.wait_committed({0: 1})
    second = one.start(SLOW, name="two")
    assert one.members == 2
    assert second.terminate() == 0
    assert one.members == 1
    assert first.terminate() == 0
    assert one.members == 0


def owners(lines: list[Line]) -> list[str]:
    """Return which processes have called a partition, one after the other."""
    names = [line.process for line in lines]
    return names[:1] + [name for before, name in pairwise(names) if name != before]


@PROTOCOLS
def test_every_event_is_called_once_over_rebalance_and_stop(calls: Any, protocol: str, tmp_path: Path) -> None:
    """A worker stops between two events, its drain callback follows, and the next owner begins behind them.

    SIGTERM does the same for all partitions; what has ended is committed, and the member has left.
    """
    one, count = calls(4), 500
    own = {
        "trigger": {"workerTerminationTimeout": "200s"},
        "maxWaitHandlerDuringRebalance": "200s",
        "rebalanceTimeout": "600s",
        "consumer": {"group_protocol": protocol},
    }
    for partition in range(4):
        one.write(partition, *["a"] * count)
    first = one.start(SLOW, **own)
    one.wait_lines(40, "call")
    second = one.start(SLOW, name="two", **own)
    one.wait_lines(40, "call", "two")
    assert first.terminate() == 0
    assert one.members == 1
    last = {line.partition: line.offset for line in one.of("call", "one")}
    assert all(one.committed[partition] > offset for partition, offset in last.items())
    (tmp_path / "fast").touch()
    one.wait_committed(dict.fromkeys(range(4), count))
    for partition in range(4):
        lines = [line for line in one.of("call") if line.partition == partition]
        assert [line.offset for line in lines] == [*range(count)]
        assert owners(lines) in (["one"], ["one", "two"], ["two"])
        if len(owners(lines)) == 2:
            every, begin = one.lines, next(line for line in lines if line.process == "two")
            between = every[max(at for at, line in enumerate(every) if line == lines[lines.index(begin) - 1]) :]
            between = between[: between.index(begin)]
            assert "drained" in [line.what for line in between if line.process == "one"]
    assert second.terminate() == 0
    assert one.reasons() == []


def test_all_partitions_of_a_busy_worker_have_one_deadline(calls: Any, tmp_path: Path) -> None:
    """With `range` all of them are given up; were the times added, they would take longer than the test waits."""
    one = calls(20)
    own = {"maxWaitHandlerDuringRebalance": "8s", "rebalanceTimeout": "600s", "balanceStrategy": "range"}
    for partition in range(20):
        one.write(partition, "wait")
    first = one.start(WAITS, **own)
    one.wait_lines(1, "begin")
    second = one.start(WAITS, name="two", **own)
    one.wait_lines(1, "begin", "two")
    (tmp_path / "go").touch()
    one.wait_committed(dict.fromkeys(range(20), 1))
    assert first.output.count("was still running when the partition had to be given up") == 1
    assert ": lost " not in first.output
    assert len({line.partition for line in one.of("end", "two")}) == 10
    assert [process.terminate() for process in (first, second)] == [0, 0]
    assert one.reasons() == []


def test_kept_events_are_acknowledged_late_or_called_by_the_next_owner(calls: Any) -> None:
    """The acknowledgements come after the drain callback has returned, and no call waits longer than for them.

    What is not acknowledged is called by the next owner, and by the first one again when that ends.
    """
    one = calls(2)
    own = {
        "trigger": {"explicitAckMode": "enable", "waitExplicitAckDuringRebalanceTimeout": "3s"},
        "maxWaitHandlerDuringRebalance": "200s",
        "rebalanceTimeout": "600s",
        "explicitAckEnds": "one",
    }
    for partition in range(2):
        one.write(partition, "keep", "keep")
    first = one.start(KEEPS, **own)
    one.wait_lines(4, "call")
    second = one.start(KEEPS, **own, name="two")
    one.wait_committed({0: 2, 1: 2})
    for partition in range(2):
        one.write(partition, "hold")
    one.wait_lines(6, "call")
    [(_, _, _, moved, offset)] = one.of("call", "two")
    stays = 1 - moved
    assert offset == 2, "what was acknowledged late is not called again"
    one.write(stays, f"ack {one.source}:{moved}:2")
    one.site.wait_until(one.reasons, "the dead letter")
    assert f"{one.source}-{moved} is not assigned to this process any more" in one.reasons()[0]
    one.write(moved, f"ack {one.source}:{moved}:0")  # it was acknowledged in the other process
    one.wait_lines(2, "call", "two")
    assert second.terminate() == 0
    one.wait_lines(9, "call")
    assert one.counts("call", moved) == {0: 1, 1: 1, 2: 2, 3: 1}
    one.write(stays, f"ack {one.source}:{moved}:2 {one.source}:{stays}:2")
    one.wait_committed({moved: 4, stays: 5})
    assert first.terminate() == 0
    assert len(one.reasons()) == 1


def test_a_stop_ends_an_event_that_hangs_and_blames_it_for_nothing(calls: Any, tmp_path: Path) -> None:
    """At the deadline; the events behind it and the event itself are called by the next process."""
    one = calls(1)
    one.write(0, "a")
    process = one.start(WAITS, more={"drain_seconds": 2})
    one.wait_committed({0: 1})
    one.write(0, "wait", "a")
    one.wait_lines(2, "begin")
    assert process.terminate() == 0
    assert one.committed[0] == 1
    (tmp_path / "go").touch()
    process = one.start(WAITS, name="two")
    one.wait_committed({0: 3})
    assert one.counts("begin") == {0: 1, 1: 2, 2: 1}
    assert process.terminate() == 0
    assert one.reasons() == []
