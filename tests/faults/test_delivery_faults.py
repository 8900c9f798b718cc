"""Order by key, the offset map and gaps, while processes are killed and records removed under them."""

from __future__ import annotations

import re

import pytest

from headrace.delivery.offset_map import decode
from headrace_devkit.testing import Commit, PlannedResponse
from tests.faults.push_scenario import SAME_MEMBER, PushScenario

STUCK = "k1"


def unfinished(scenario: PushScenario) -> int:
    """Return how many records a new owner would get again, as the group's commits say."""
    count = 0
    for run in scenario.recording():
        last = run.commits[-1] if run.commits else Commit(0, 0)
        ended = decode(last.metadata, last.offset)
        count += sum(r.offset >= last.offset and not (ended and ended.has(r.offset)) for r in run.log)
    return count


@pytest.mark.timeout(600)
def test_order_by_key_holds_and_only_the_unfinished_comes_again(scenario: PushScenario) -> None:
    """One key fails all the time, kill -9 hits while others are under way, and at last while only that key is open."""
    scenario.backend.response = PlannedResponse(delay_seconds=0.01, fails=lambda record: record["key"] == STUCK)
    retry = {"attempts": 1000, "first_delay_seconds": 0.1, "max_delay_seconds": 0.5}
    scenario.settings.update(max_in_flight=8, batch={"max_records": 5}, retry=retry, consumer=SAME_MEMBER)
    scenario.fill(1000)
    stuck = sum(record.key == STUCK.encode() for record in scenario.records(scenario.topic))
    for wanted in (300, 1000 - stuck):
        process = scenario.run()
        scenario.wait_handled(wanted)
        if wanted > 300:
            scenario.wait_until(lambda: unfinished(scenario) == stuck, "the offset map")
        with scenario.fault():
            process.kill()
    scenario.backend.response = PlannedResponse()
    process = scenario.run()
    scenario.check_done()
    assert process.terminate() == 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize("scenario", [{"partitions": 1}], ids=["one-partition"], indirect=True)
def test_records_are_removed_before_they_are_read(scenario: PushScenario) -> None:
    """Headrace stands still and names what is missing; told to continue, it counts it and goes on."""
    scenario.fill(100)
    process = scenario.run()
    scenario.wait_done()
    assert process.terminate() == 0
    scenario.fill(100)
    scenario.remove_before(scenario.topic, 110)
    standing = scenario.run(wait=False)
    missing = r"offsets 100 to 109 \(10\) are no longer in the log"
    scenario.wait_until(lambda: re.search(missing, standing.output), "the gap")
    standing.terminate()
    assert scenario.backend.accepted_records == 100
    scenario.settings["on_gap"] = "continue"
    process = scenario.run()
    scenario.wait_done()
    assert (
        'headrace_dropped_records_total{consumer="push",kind="reactive",reason="gap"} 10.0'
        in scenario.ask(f"{process.url}/metrics").body
    )
    assert scenario.backend.accepted_records == 190
    assert process.terminate() == 0
