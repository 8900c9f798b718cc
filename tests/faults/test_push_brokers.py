"""Topics that change or hold odd records and transactions while they are pushed."""

from __future__ import annotations

import base64
import itertools
import re
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import NewPartitions

from headrace.records import OutgoingRecord
from headrace_devkit.testing import Cluster, RecordingBackend, StartHeadrace
from tests.faults.ledger import Ledger, delivered_by
from tests.faults.push_scenario import Feeder, PushScenario

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]


def test_partitions_are_added_under_load(kafka_three: Cluster, scenario: PushScenario) -> None:
    """What is written to the new ones from their first moment is delivered too."""
    scenario.settings = {"ordering": "partition", "batch": {"max_records": 20}, "flow": {"max_records": 100}}
    scenario.properties["topic.metadata.refresh.interval.ms"] = 1000
    with Feeder(scenario, per_second=500):
        process = scenario.run()
        scenario.wait_more()
        for created in scenario.client.create_partitions([NewPartitions(scenario.topic, 8)]).values():
            created.result(60)
        scenario.wait_until(lambda: len(ends := scenario.ends()) == 8 and min(ends) > 20, "8 partitions in use")
    scenario.wait_done()
    assert scenario.check(but="repeat") == []
    assert process.terminate() == 0


def pushing(ledger: Ledger, name: str, url: str, **settings: Any) -> dict[str, Any]:
    """Return the configuration of a process that pushes the values of a topic."""
    consumer = {"topics": [name], "group": name, "value_format": "string", "backend": {"url": url}, **settings}
    return {**ledger.config, "reactive_consumers": {"push": consumer}}


def test_lag_is_zero_behind_aborted_transactions(
    ledger: Ledger, headrace: StartHeadrace, backend: RecordingBackend, request: pytest.FixtureRequest
) -> None:
    """Most of the log are aborted records and marks, at its end too; the commit reaches the end."""
    name, count = ledger.new_topic(), 5000 if request.config.getoption("--all") else 100
    producer = confluent_kafka.Producer({"bootstrap.servers": ledger.kafka.bootstrap_servers, "transactional.id": name})
    producer.init_transactions(120)
    wanted = []
    for number in range(count):
        producer.begin_transaction()
        for index in range(3):
            producer.produce(name, f"{number}-{index}")
        if number % 10 == 0:
            producer.commit_transaction(120)
            wanted += [f"{number}-{index}" for index in range(3)]
        else:
            producer.flush(120)
            producer.abort_transaction(120)
    process = headrace(pushing(ledger, name, backend.url))
    ledger.wait_until(lambda: sum(ledger.committed(name).values()) == 4 * count, "the commit to reach the end")
    assert [record["value"] for record in backend.accepted] == wanted
    assert ledger.behind(name, name) == 0
    assert process.terminate() == 0


@pytest.mark.long
def test_a_batch_that_is_broken_on_disk_stops_its_partition_alone(
    tmp_path: Path, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """What is before it and in other partitions is delivered, nothing of it is, and readiness says where."""
    with Cluster(tmp_path / "kafka") as cluster:
        ledger = Ledger(cluster, tmp_path)
        name = ledger.new_topic(2)
        producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap_servers})
        for batch in range(3):
            for number in range(10):
                for partition in (0, 1):
                    producer.produce(name, f"{batch}{number}", partition=partition)
            assert producer.flush(120) == 0
        cluster.servers[0].stop()
        log = tmp_path / "kafka" / "n1" / "data" / f"{name}-0" / f"{0:020}.log"
        data = bytearray(log.read_bytes())
        second = 12 + int.from_bytes(data[8:12])
        data[second + 12 + int.from_bytes(data[second + 8 : second + 12]) - 2] ^= 0xFF  # in its last value
        log.write_bytes(data)
        cluster.restart(1)
        process = headrace(pushing(ledger, name, backend.url), wait=False)
        backend.wait_for(lambda b: len(b.accepted) >= 40)
        reasons = rf"{name}-0.* 10"
        ledger.wait_until(lambda: re.search(reasons, str(ledger.reasons(process.url))), "the place in readiness")
        assert delivered_by(backend) == {(0, n) for n in range(10)} | {(1, n) for n in range(30)}
        ledger.wait_committed(name, name, 10)
        assert process.terminate() == 0


def test_bytes_arrive_as_they_are(ledger: Ledger, headrace: StartHeadrace, backend: RecordingBackend) -> None:
    """Nulls, nothing, bytes that are no text; a tombstone is not an empty value."""
    name = ledger.new_topic()
    parts = [None, b"", b"\x00", b"\xff\xfe", bytes(range(256)), "é".encode(), b"{", b'"']
    sent = [*itertools.product(parts, parts)]
    headers = [("h", b"1"), ("h", b"2"), ("empty", b""), ("null", None), *((f"n{n}", b"x") for n in range(1000))]
    told: dict[str, str | None] = {"h": "2", "empty": "", "null": None, **{f"n{n}": "x" for n in range(1000)}}
    ledger.write(name, *(OutgoingRecord(name, key, value, headers, 0) for key, value in sent))
    headrace(pushing(ledger, name, backend.url, key_format="binary", value_format="binary"))
    backend.wait_for(lambda b: len(b.accepted) >= len(sent))
    assert [(part(entry, "key"), part(entry, "value")) for entry in backend.accepted] == sent
    assert all(told.items() <= entry["headers"].items() for entry in backend.accepted)


def part(entry: dict[str, Any], name: str) -> bytes | None:
    """Return the bytes of a key or value, None for a null one."""
    return None if entry.get(name) is None else base64.b64decode(entry[name], validate=True)
