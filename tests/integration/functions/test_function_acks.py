"""Explicit acknowledgements of functions, against the offsets that the broker has."""

from __future__ import annotations

import re
from collections.abc import Callable

from headrace_devkit.testing import MakeTopic
from tests.function_calls import FunctionCalls
from yaml_table import table

ACTS = table(__file__, "acts")
"""A record `ack` acknowledges positions, and itself."""

COLLECTS = table(__file__, "collects")


def held(calls: FunctionCalls, url: str) -> float:
    """Return how many records the metrics say are held."""
    page = str(calls.site.ask(f"{url}/metrics").body)
    return sum(float(value) for value in re.findall(r"^headrace_awaiting_ack_records{.*} (\S+)$", page, re.MULTILINE))


def test_a_window_is_collected_again_when_its_worker_has_ended(calls: Callable[[int], FunctionCalls]) -> None:
    """The next worker has never had its records, so the acknowledgement of a later window must not end them."""
    one = calls(2)
    own = {"trigger": {"explicitAckMode": "explicitOnly"}}
    one.write(0, *(str(number) for number in range(6)))
    one.write(1, *(str(number) for number in range(5)))
    process = one.start(COLLECTS, **own)
    one.site.wait_until(lambda: held(one, process.url) == 11, "two windows that are not full")
    one.write(0, "die", *(str(number) for number in range(30)))
    one.wait_committed({0: 30, 1: 0})
    assert {line.offset for line in one.of("stored")} >= {*range(30)}
    one.write(1, *(str(number) for number in range(5)))
    one.wait_committed({1: 10})
    assert {line.offset for line in one.of("stored") if line.partition == 1} == {*range(10)}
    assert process.terminate() == 0
    assert one.reasons() == []


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


def test_what_cannot_be_acknowledged_is_said_in_the_handler(calls: Callable[[int], FunctionCalls]) -> None:
    """The call fails as with every exception, and a dead letter has ended."""
    one = calls(1)
    positions = [f"{one.source}:7:0", f"{one.source}:0:99", "other:0:0"]
    one.write(0, "hold", *(f"ack {position}" for position in positions), "hold")
    process = one.start(ACTS, trigger={"explicitAckMode": "explicitOnly"})
    one.site.wait_until(lambda: len(one.reasons()) == 3, "three dead letters")
    assert [reason.removeprefix("NotAcknowledged: ").split(";")[0] for reason in one.reasons()] == [
        f"{one.source}-7 is not assigned to this process any more",
        f"offset 99 of {one.source}-0 was not delivered yet",
        "no trigger of work reads other with explicitAckMode enable or explicitOnly",
    ]
    one.wait_lines(5, "call")
    one.write(0, f"ack {one.source}:0:0")
    one.wait_committed({0: 6})
    assert process.terminate() == 0


def test_another_trigger_acknowledges_and_the_window_is_not_for_acknowledged_records(
    calls: Callable[[int], FunctionCalls], topic: MakeTopic
) -> None:
    """A trigger without acknowledgements of its own has a handler that sends them."""
    one, other = calls(1), topic()
    plain = {"kind": "kafka-cluster", "attributes": {"topics": [other], "consumerGroup": f"{one.group}-other"}}
    one.write(0, *["hold"] * 4, "plain", "plain")
    process = one.start(ACTS, trigger={"explicitAckMode": "enable"}, others={"plain": plain}, ackWindowSize=5)
    one.wait_lines(6, "call")
    one.write(0, f"ack {one.source}:0:2", topic=other)
    one.wait_committed({0: 3})
    one.write(0, f"ack {one.source}:0:3", topic=other)
    one.wait_committed({0: 4})  # the two behind it have ended, and are in the window
    one.site.wait_committed(f"{one.group}-other", other, 2)
    assert process.terminate() == 0
    assert one.committed == {0: 4}
