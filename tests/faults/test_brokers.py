"""Brokers are killed and restarted in turn while everything runs: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import uuid
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.kafka import Reachability
from headrace.lifecycle import SystemClock


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_each_broker_is_killed_in_turn_while_produce_push_and_function_run(
    kafka_three: Any, headrace: Any, backend: Any, bed: Any
) -> None:
    """Acknowledged records are at their place, delivered to the backend and copied by the function, each at least once;
    no commit ever passed a record that was not delivered."""
    topic = f"fault-{uuid.uuid4().hex[:8]}"
    target = f"{topic}-copy"
    for name in (topic, target):
        kafka_three.create_topic(name, 6, {"min.insync.replicas": "2"})
    ledger = bed.Ledger(kafka_three.bootstrap_servers)

    def ids(name: str) -> set[int]:
        return {bed.id_of(record) for record in ledger.records(name)}

    process = headrace(
        {
            "kafka": {"bootstrap_servers": kafka_three.bootstrap_servers},
            "functions": [bed.copy_function(topic, target)],
            "reactive_consumers": {
                "push": {"topics": [topic], "group": f"{topic}-push", "backend": {"url": backend.url}}
            },
        }
    )
    with bed.Poster(process.url, topic) as poster, bed.CommitWatch(ledger, f"{topic}-push", backend) as watch:
        poster.wait_for(500)
        for broker in (1, 2, 3):
            kafka_three.kill(broker)
            poster.wait_for_more()
            kafka_three.restart(broker)
            kafka_three.wait_in_sync()
            poster.wait_for_more()
        watch.wait_for_more()
    # What became unknown may be written a little later, so the topic is read again each time.
    bed.wait_until(lambda: not ledger.missing(topic, bed.delivered_by(backend)), 60, "deliveries")
    bed.wait_until(lambda: ids(topic) == ids(target), 60, "copies")
    for group in (f"{topic}-push", f"{topic}-copy"):
        bed.wait_until(lambda group=group: ledger.lag(group) == 0, 30, f"lag 0 of {group}")
    ledger.check_acknowledged(topic, poster)
    ledger.check_delivered(topic, bed.delivered_by(backend))
    assert ids(topic) == ids(target)
    assert watch.violations == []
    assert process.terminate() == 0


GROUPS = """
import asyncio, sys
from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaUnavailable
from headrace.kafka import Admin
from headrace.records import TopicPartition

async def main():
    admin = Admin(KafkaConfig(bootstrap_servers=sys.argv[1], request_timeout_seconds=30))
    place = TopicPartition(sys.argv[2], 0)
    while True:
        for number in range(6):
            try:
                await admin.alter_group_offsets(f"{place.topic}-{number}", {place: number})
                found = await admin.committed(f"{place.topic}-{number}")
            except KafkaUnavailable:
                continue
            if found:  # a broker that has just started may not know of the topic yet
                assert found == {place: number}
                print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_offsets_of_groups_are_read_and_set_through_a_rolling_restart(kafka_three: Any) -> None:
    """Coordinators move three times: the client library survives, and asks the new ones at once."""
    topic = f"rolling-{uuid.uuid4().hex[:8]}"
    kafka_three.create_topic(topic, 1)
    # In a process of its own, because what is guarded against ends the process.
    command = [sys.executable, "-c", GROUPS, kafka_three.bootstrap_servers, topic]
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
@pytest.mark.heavy
async def test_one_dead_broker_of_three_is_no_outage(kafka_three: Any, bed: Any) -> None:
    """Whichever it is, also the one that was asked last: the others answer, and that is known."""
    seen = Reachability(KafkaConfig(bootstrap_servers=kafka_three.bootstrap_servers), SystemClock())
    await seen.start()
    for broker in (1, 2, 3):
        await asyncio.to_thread(kafka_three.kill, broker)
        later = time.monotonic() + 4  # what is answered then was asked with that broker dead
        await asyncio.to_thread(
            bed.wait_until, lambda later=later: seen._answered_at > later and not seen.outage, 60, "an answer"
        )
        await asyncio.to_thread(kafka_three.restart, broker)
        await asyncio.to_thread(kafka_three.wait_in_sync)
    await seen.stop()
