"""Brokers are killed and restarted in turn while everything runs: nothing acknowledged is lost."""

from __future__ import annotations

import uuid
from typing import Any

import pytest


@pytest.mark.heavy
@pytest.mark.timeout(400)
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
    process = headrace(
        {
            "kafka": {"bootstrap_servers": kafka_three.bootstrap_servers},
            "functions": [bed.copy_function(topic, target)],
            "reactive_consumers": {
                "push": {"topics": [topic], "group": f"{topic}-push", "backend": {"url": backend.url}}
            },
        }
    )
    with (
        bed.Poster(process.url, topic) as poster,
        bed.CommitWatch(ledger, f"{topic}-push", backend) as watch,
    ):
        poster.wait_for(500)
        for broker in (1, 2, 3):
            kafka_three.kill(broker)
            poster.wait_for_more()
            kafka_three.restart(broker)
            kafka_three.wait_in_sync()
            poster.wait_for_more()
    total = len(ledger.records(topic))
    bed.wait_until(lambda: len(bed.delivered_by(backend)) >= total, 60, "deliveries")
    bed.wait_until(lambda: len({bed.id_of(r) for r in ledger.records(target)}) >= total, 60, "copies")
    for group in (f"{topic}-push", f"{topic}-copy"):
        bed.wait_until(lambda group=group: ledger.lag(group) == 0, 30, f"lag 0 of {group}")
    ledger.check_acknowledged(topic, poster)
    ledger.check_delivered(topic, bed.delivered_by(backend))
    assert {bed.id_of(r) for r in ledger.records(topic)} == {bed.id_of(r) for r in ledger.records(target)}
    assert watch.looks > 10
    assert watch.violations == []
    assert process.terminate() == 0
