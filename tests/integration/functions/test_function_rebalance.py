"""The events of a function whose process gains or loses partitions, or ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.function_calls import FunctionCalls

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


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_only_partitions_that_are_given_up_are_drained(
    calls: Callable[[int], FunctionCalls], protocol: str, tmp_path: Path
) -> None:
    """At the deadline a worker that is still at their event is killed; the event goes to the next owner, unblamed."""
    one = calls(4)
    own = {
        "trigger": {"numWorkers": 4},
        "maxWaitHandlerDuringRebalance": "1s",
        "consumer": {"properties": {"group.protocol": protocol}},
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
    assert first.output.count("was still running when the partition was revoked") == 2
    assert [process.terminate() for process in (first, second)] == [0, 0]
    assert one.reasons() == []


def test_a_trigger_reads_exactly_its_partitions_and_commits_to_the_group(calls: Callable[[int], FunctionCalls]) -> None:
    """Without membership: Kafka refuses its commits while the group has a member, and readiness says so."""
    one = calls(3)
    for partition in range(3):
        one.write(partition, "a", "b")
    first = one.start(SLOW, partitions=[0, 2])
    one.wait_committed({0: 2, 2: 2})
    assert one.members == 0
    lag = "headrace_consumer_lag_records{"
    one.site.wait_until(lambda: lag in one.site.ask(f"{first.url}/metrics").body, "the lag")
    lines = [line for line in one.site.ask(f"{first.url}/metrics").body.splitlines() if line.startswith(lag)]
    assert len(lines) == 2, "partition 1 is nobody's"
    assert first.terminate() == 0
    one.write(0, "c")
    second = one.start(SLOW, partitions=[0, 7], name="two", wait=False)
    one.wait_committed({0: 3})
    one.site.wait_until(lambda: "partition 7 of" in str(one.site.reasons(second.url)), "what does not exist")
    member = one.start(SLOW, name="member")
    one.wait_lines(2, "call", "member")
    one.write(0, "d")
    one.site.wait_until(lambda: "has members" in str(one.site.reasons(second.url)), "refused commits")
    assert member.terminate() == 0
    one.site.wait_until(lambda: "has members" not in str(one.site.reasons(second.url)), "commits")
    one.wait_committed({0: 4, 1: 2, 2: 2})
    assert {line.process for line in one.of("call") if line.partition == 1} == {"member"}
    assert second.terminate() == 0
