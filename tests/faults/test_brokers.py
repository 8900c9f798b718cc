"""Brokers are killed and restarted in turn while everything runs: nothing acknowledged is lost."""

from __future__ import annotations

import time

import pytest

from headrace_devkit.testing import Cluster, StartHeadrace
from tests.faults.ledger import Ledger, Poster
from tests.faults.push_scenario import PushScenario
from tests.function_calls import function_file

pytestmark = pytest.mark.heavy


@pytest.mark.long
@pytest.mark.timeout(600)
def test_brokers_are_killed_in_turn_while_produce_push_and_function_run(
    kafka_three: Cluster, scenario: PushScenario, headrace: StartHeadrace
) -> None:
    """Acknowledged records are at their place, pushed and copied by the function; no commit passes one that is not."""
    target, group = scenario.new_topic(6), f"{scenario.topic}-copy"
    attributes = {"topics": [scenario.topic], "consumerGroup": group, "outputTopic": target}
    trigger = {"kind": "kafka-cluster", "attributes": attributes}
    copy = function_file(scenario.folder, "def handler(context, event):\n    return event.body\n", {"in": trigger})
    process = headrace({**scenario.config, "functions": [copy]})
    with Poster(process.url, scenario.topic) as poster:
        poster.wait_for_more(500)
        for broker in (1, 2, 3):
            with scenario.killed(broker):
                poster.wait_for_more()
            poster.wait_for_more()

    def values(topic: str) -> set[bytes | None]:
        return {record.value for record in scenario.records(topic)}

    # What became unknown may be written a little later, so the topic is read again each time.
    scenario.wait_until(lambda: values(scenario.topic) == values(target), "copies")
    scenario.wait_committed_all(scenario.topic, group)
    scenario.wait_done()
    scenario.check_acknowledged(scenario.topic, poster)
    scenario.written = len(scenario.records(scenario.topic))
    assert scenario.check(but="repeat") == []
    assert process.terminate() == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_broker_that_is_down_is_named_until_it_is_back(
    kafka_three: Cluster, headrace: StartHeadrace, ledger: Ledger
) -> None:
    """Doctor, log and a gauge name it, whichever it is; the others respond, so it is not an outage."""
    servers = kafka_three.bootstrap_servers
    process = headrace(ledger.config)

    def doctor() -> str:
        return ledger.cli("doctor", "-b", servers, code=None).stdout

    def missing() -> bool:
        counts = ledger.ask(f"{process.url}/metrics").body
        return f'headrace_kafka_missing_brokers{{bootstrap_servers="{servers}"}} 1.0' in counts

    assert "3 brokers" in doctor()
    for broker in (1, 2, 3):
        name = f"broker {broker} is"
        with ledger.killed(broker):
            later = time.monotonic() + 4  # what is ready then has had a response with that broker dead
            ledger.wait_until(lambda name=name: f"2 of 3: {name} missing" in doctor(), "the doctor's warning")
            ledger.wait_until(lambda name=name: f"{name} missing" in process.output, "the log of the loss")
            ledger.wait_until(missing, "the gauge")
            ledger.wait_until(
                lambda later=later: time.monotonic() > later and not ledger.reasons(process.url), "readiness"
            )
        ledger.wait_until(lambda name=name: f"{name} back" in process.output, "the log of the return")
        ledger.wait_until(lambda: not missing(), "the end of the gauge")
    assert "3 brokers" in doctor()
