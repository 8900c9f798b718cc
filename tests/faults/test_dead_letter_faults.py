"""Dead letters while their own topic is in trouble."""

from __future__ import annotations

import pytest

from headrace.records import OutgoingRecord
from headrace_devkit.testing import Cluster, PlannedResponse
from tests.faults.push_scenario import PushScenario


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_dead_letter_topic_below_its_minimum_of_replicas_holds_its_partition(
    kafka_three: Cluster, scenario: PushScenario
) -> None:
    """The log says so before the write has failed, nothing is passed over, and it goes on when the replica is back."""
    scenario.settings["dead_letter"] = {"topic": (dead := scenario.new_topic(1, **{"min.insync.replicas": "3"}))}
    process = scenario.run()
    scenario.backend.response = PlannedResponse(status=422)
    with scenario.killed(3):
        scenario.write(scenario.topic, OutgoingRecord(scenario.topic, b"k", b"v", None, 0))
        waiting = f"{scenario.topic}-0 is waiting: dead letters=1 from offset 0 on are not acknowledged yet"
        scenario.wait_until(lambda: waiting in process.output, "the log")
        assert scenario.behind(scenario.topic, scenario.group) == 1
    scenario.wait_done()
    assert [record.value for record in scenario.records(dead)] == [b"v"]
    assert process.terminate() == 0
