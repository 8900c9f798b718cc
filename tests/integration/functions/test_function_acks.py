"""Explicit acknowledgements of functions, against the offsets that the broker has."""

from __future__ import annotations

from collections.abc import Callable

from tests.function_calls import FunctionCalls
from yaml_table import table

ACTS = table(__file__, "acts")
"""A record `ack` acknowledges positions, and itself."""


def test_records_are_acknowledged_one_by_one_over_a_kill(calls: Callable[[int], FunctionCalls]) -> None:
    """Gaps are committed; another worker of another process acknowledges what was kept by its offset."""
    one = calls(2)
    own = {
        "trigger": {"explicitAckMode": "explicitOnly", "numWorkers": 2},
        "workerAllocationMode": "key",
        "consumer": {"properties": {"group.instance.id": "one"}},
    }
    one.write(0, *["hold"] * 6, key=b"f")
    process = one.start(ACTS, **own)
    one.wait_lines(6, "call")
    one.write(1, f"ack {one.source}:0:1 {one.source}:0:4 {one.source}:0:3", key=b"e")
    one.wait_committed({0: 0, 1: 1})
    process.kill()
    process = one.start(ACTS, name="two", **own)
    one.wait_lines(3, "call", "two")
    one.write(1, f"ack {one.source}:0:0", key=b"e")
    one.wait_committed({0: 2, 1: 2})
    one.write(1, f"ack {one.source}:0:5 {one.source}:0:2", key=b"e")
    one.wait_committed({0: 6, 1: 3})
    assert one.counts("call") == {0: 2, 1: 1, 2: 2, 3: 1, 4: 1, 5: 2}
    assert one.counts("call", 1) == {0: 1, 1: 1, 2: 1}
    assert len({line.pid for line in one.of("call", "two")}) == 2, "the keys have a worker each"
    assert process.terminate() == 0
    assert one.reasons() == []
