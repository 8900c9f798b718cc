"""Brokers are killed and restarted in turn while everything runs: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import pytest
from yaml_table import table

from headrace.kafka import Reachability
from headrace.runtime import SystemClock
from tests.faults.ledger import Ledger, Poster
from tests.faults.push_scenario import PushScenario
from tests.function_calls import function_file

pytestmark = pytest.mark.heavy


@pytest.mark.timeout(600)
@pytest.mark.parametrize("brokers", [(1,), pytest.param((1, 2, 3), marks=pytest.mark.long)], ids=["one", "each"])
def test_brokers_are_killed_in_turn_while_produce_push_and_function_run(
    kafka_three: Any, scenario: PushScenario, headrace: Any, brokers: tuple[int, ...]
) -> None:
    """Acknowledged records are at their place, pushed and copied by the function; no commit passes one that is not."""
    target, group = scenario.new_topic(6), f"{scenario.topic}-copy"
    attributes = {"topics": [scenario.topic], "consumerGroup": group, "outputTopic": target}
    trigger = {"kind": "kafka-cluster", "attributes": attributes}
    copy = function_file(scenario.folder, "def handler(context, event):\n    return event.body\n", {"in": trigger})
    process = headrace({**scenario.config, "functions": [copy]})
    with Poster(process.url, scenario.topic) as poster:
        poster.wait_for_more(500)
        for broker in brokers:
            kafka_three.kill(broker)
            poster.wait_for_more()
            kafka_three.restart(broker)
            kafka_three.wait_in_sync()
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


GROUPS = table(__file__, "groups")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_offsets_of_groups_are_read_and_set_through_a_rolling_restart(kafka_three: Any, ledger: Ledger) -> None:
    """Coordinators move three times: the client library survives, and asks the new ones at once."""
    # In a process of its own, because what is guarded against ends the process.
    command = [sys.executable, "-c", GROUPS, kafka_three.bootstrap_servers, ledger.new_topic()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            for broker in (1, 2, 3):
                assert process.stdout.readline()
                kafka_three.restart(broker)
                kafka_three.wait_in_sync()
            seen = [process.stdout.readline().strip() for _ in range(200)]
            assert process.poll() is None
        finally:
            process.kill()
    assert set(seen) == {str(number) for number in range(6)}


@pytest.mark.long
async def test_one_dead_broker_of_three_is_no_outage(kafka_three: Any, ledger: Ledger) -> None:
    """Whichever it is, also the one that was asked last: the others answer, and that is known."""
    seen = Reachability(ledger.kafka, SystemClock())
    await seen.start()
    for broker in (1, 2, 3):
        await asyncio.to_thread(kafka_three.kill, broker)
        later = time.monotonic() + 4  # what is answered then was asked with that broker dead
        await asyncio.to_thread(
            ledger.wait_until, lambda later=later: seen.answered_at > later and not seen.outage, "a response"
        )
        await asyncio.to_thread(kafka_three.restart, broker)
        await asyncio.to_thread(kafka_three.wait_in_sync)
    await seen.stop()
