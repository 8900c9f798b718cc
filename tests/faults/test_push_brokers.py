"""Brokers, the network and the group fail while records are pushed; the ledger judges by what is not Headrace's.

A repeat is no fault here: any machine can be so busy that a member is thought dead.
"""

from __future__ import annotations

import base64
import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import NewPartitions

from headrace.records import OutgoingRecord, TopicPartition
from headrace_devkit.testing import Cluster, HeadraceProcess, RecordingBackend, StartHeadrace
from headrace_devkit.testing.proxy import OFFSET_COMMIT, FaultProxy
from tests.faults.ledger import Ledger, delivered_by
from tests.faults.push_scenario import SHORT_SESSION, Feeder, PushScenario

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]


class Fed(PushScenario):
    """A topic of three brokers that is written all the time; partitions are paused and resumed all the time."""

    def __init__(self, cluster: Any, start: Callable[..., HeadraceProcess], folder: Path) -> None:
        super().__init__(cluster, start, folder, partitions=3)
        self.settings = {"ordering": "partition", "batch": {"max_records": 20}, "flow": {"max_records": 100}}
        self.feeder = Feeder(self, per_second=500)

    def finish(self, *processes: HeadraceProcess) -> None:
        """Write no more, let the group come to its end, hear the ledger, and end the processes."""
        self.feeder.stop()
        self.wait_done()
        assert self.check(but="repeat") == []
        assert [process.terminate() for process in processes] == [0] * len(processes)


@pytest.fixture
def scenario(kafka_three: Cluster, headrace: StartHeadrace, tmp_path: Path) -> Iterator[Fed]:
    """A topic that is being written, and a backend."""
    made = Fed(kafka_three, headrace, tmp_path)
    made.backend.start()
    with made.feeder:
        yield made
    made.backend.stop()


@pytest.mark.long
def test_two_brokers_of_three_stand_still(scenario: Fed) -> None:
    """The third one can take neither records nor commits; then all goes on."""
    process = scenario.run()
    scenario.wait_more()
    with scenario.paused(1, 2):
        time.sleep(6)  # how long the fault lasts, longer than the session of a broker
    scenario.wait_more()
    scenario.finish(process)


@pytest.mark.long
def test_the_coordinator_is_killed_while_a_commit_is_on_its_way(scenario: Fed, kafka_network: FaultProxy) -> None:
    """The next one takes the commits, and none passes what has not ended."""
    process = scenario.run(servers=kafka_network.bootstrap_servers)
    scenario.wait_more()
    kafka_network.hold(OFFSET_COMMIT)
    scenario.wait_until(lambda: kafka_network.held, "a commit")
    with scenario.killed(scenario.coordinator_of(scenario.group)):
        kafka_network.heal()
        scenario.wait_more()
    scenario.finish(process)


@pytest.mark.long
def test_a_commit_arrives_when_the_partitions_have_another_owner(scenario: Fed, kafka_network: FaultProxy) -> None:
    """It is refused, no commit goes back, and its sender joins again."""
    scenario.settings["consumer"] = SHORT_SESSION
    first = scenario.run(servers=kafka_network.bootstrap_servers)
    scenario.wait_more()
    kafka_network.hold(OFFSET_COMMIT)
    scenario.wait_until(lambda: kafka_network.held, "a commit")
    second = scenario.run()
    for number in range(3):
        place = re.escape(str(TopicPartition(scenario.topic, number)))
        scenario.wait_until(lambda place=place: re.search(f"assigned .*{place}", second.output), "a new owner")
    scenario.wait_more()
    kafka_network.heal()
    scenario.wait_members(2)
    scenario.wait_more()
    scenario.finish(first, second)


def test_partitions_are_added_under_load(kafka_three: Cluster, scenario: Fed) -> None:
    """What is written to the new ones from their first moment is delivered too."""
    scenario.properties["topic.metadata.refresh.interval.ms"] = 1000
    process = scenario.run()
    scenario.wait_more()
    for created in scenario.client.create_partitions([NewPartitions(scenario.topic, 6)]).values():
        created.result(60)
    scenario.wait_until(lambda: len(ends := scenario.ends()) == 6 and min(ends) > 20, "6 partitions in use")
    scenario.finish(process)


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
def test_lag_is_zero_where_compaction_has_left_gaps(
    ledger: Ledger, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """Offsets that are not there any more are waited for by nobody."""
    often = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.001", "max.compaction.lag.ms": "100"}
    name = ledger.new_topic(1, **{"cleanup.policy": "compact", **often})
    producer = confluent_kafka.Producer({"bootstrap.servers": ledger.kafka.bootstrap_servers})
    for number in range(1000):
        producer.produce(name, f"{number}", f"k{number % 7}", partition=0)
        if number % 100 == 99:
            assert producer.flush(120) == 0
            time.sleep(0.15)  # so that the next one begins another segment
    ledger.wait_until(lambda: len(ledger.records(name)) < 500, "the broker to compact")
    process = headrace(pushing(ledger, name, backend.url))
    ledger.wait_committed(name, name, 1000)
    assert ledger.behind(name, name) == 0
    assert not ledger.missing(name, delivered_by(backend))
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
