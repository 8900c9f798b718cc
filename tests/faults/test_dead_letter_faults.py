"""Dead letters while their own topic is in trouble."""

from __future__ import annotations

import json
import urllib.request
import uuid
from typing import Any

import pytest

from headrace.testing import Answer


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_dead_letter_topic_below_its_minimum_of_replicas_holds_its_partition(
    kafka_three: Any, headrace: Any, backend: Any, bed: Any
) -> None:
    """The log says so before the write has failed, nothing is passed over, and it goes on when the replica is back."""
    topic = f"fault-{uuid.uuid4().hex[:8]}"
    kafka_three.create_topic(topic, 1)
    kafka_three.create_topic(f"{topic}.dlq", 1, {"min.insync.replicas": "3"})
    ledger = bed.Ledger(kafka_three.bootstrap_servers)
    consumer = {"topics": [topic], "group": f"{topic}-push", "backend": {"url": backend.url}}
    config = {"kafka": {"bootstrap_servers": kafka_three.bootstrap_servers}, "reactive_consumers": {"push": consumer}}
    process = headrace(config)
    backend.answer = Answer(status=422)
    kafka_three.kill(3)
    body = json.dumps({"records": [{"key": "k", "value": {"id": 1}}]}).encode()
    request = urllib.request.Request(f"{process.url}/producers/{topic}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["offsets"][0]["offset"] == 0
    said = f"{topic}-0 waits, dead letters=1 from offset 0 on are not acknowledged yet"
    bed.wait_until(lambda: said in process.output, 120, "the log")
    assert ledger.lag(f"{topic}-push") != 0  # 1, or -1 before the first commit
    kafka_three.restart(3)
    kafka_three.wait_in_sync()
    bed.wait_until(lambda: ledger.lag(f"{topic}-push") == 0, 120, "lag 0")
    assert {bed.id_of(record) for record in ledger.records(f"{topic}.dlq")} == {1}
    assert process.terminate() == 0
