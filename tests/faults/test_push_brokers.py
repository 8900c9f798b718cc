"""Brokers, the network and the group fail while records are pushed; the ledger judges by what is not Headrace's.

A repeat is no fault here: any machine can be so busy that a member is thought dead.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from headrace.config.kafka import KafkaConfig
from headrace.kafka import Admin
from headrace.records import TopicPartition
from headrace.testing import Answer, Cluster, HeadraceProcess, RecordingBackend, check_pushed
from headrace.testing.evidence import gather
from headrace.testing.proxy import OFFSET_COMMIT, FaultProxy

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]

SHORT_SESSION = {"session.timeout.ms": 3000, "heartbeat.interval.ms": 500}


class Writer(threading.Thread):
    """Writes unique records with a client of its own, as fast as a small topic bears, until it is told to stop."""

    def __init__(self, servers: str, topic: str) -> None:
        super().__init__()
        self.acknowledged: dict[int, int] = {}
        """Records of each partition."""
        self.refused: list[str] = []
        self._topic, self._stop_asked = topic, threading.Event()
        settings = {
            "enable.idempotence": True,
            "delivery.timeout.ms": 200_000,
            "topic.metadata.refresh.interval.ms": 500,
        }
        self._producer = confluent_kafka.Producer({"bootstrap.servers": servers, "linger.ms": 1, **settings})

    @property
    def count(self) -> int:
        return sum(self.acknowledged.values())

    def run(self) -> None:
        for number in itertools.count():
            self._producer.produce(self._topic, f"{number}", f"k{number % 50}", on_delivery=self._reported)
            if number % 10 == 9:
                self._producer.poll(0)
                if self._stop_asked.wait(0.01):
                    break
        self._producer.flush(200)

    def stop(self) -> None:
        self._stop_asked.set()
        self.join(240)
        assert not self.is_alive()
        assert self.refused == []

    def _reported(self, error: Any, record: Any) -> None:
        if error:
            self.refused.append(str(error))
        else:
            self.acknowledged[record.partition()] = self.acknowledged.get(record.partition(), 0) + 1


class Scene:
    """A topic that is written all the time, a backend with a journal, and processes of one group that push to it."""

    def __init__(self, cluster: Any, start: Callable[..., HeadraceProcess], folder: Path, bed: Any) -> None:
        self.cluster, self._start, self.wait_until = cluster, start, bed.wait_until
        self.topic = f"push-{uuid.uuid4().hex[:8]}"
        self.group, self.journal = f"{self.topic}-group", folder / "journal"
        self.backend = RecordingBackend(journal=self.journal)
        self.kafka = KafkaConfig(bootstrap_servers=cluster.bootstrap_servers, request_timeout_seconds=60)
        self.admin = Admin(self.kafka)
        cluster.create_topic(self.topic, 3, {"min.insync.replicas": "2"})
        self.writer = Writer(cluster.bootstrap_servers, self.topic)

    def run(self, servers: str = "", failpoints: str = "", /, **properties: Any) -> HeadraceProcess:
        """Start a process of the group, which may reach the brokers another way than the tests."""
        kafka = {"bootstrap_servers": servers or self.cluster.bootstrap_servers, "properties": properties}
        consumer = {
            "topics": [self.topic],
            "group": self.group,
            "value_format": "string",
            "batch": {"max_records": 20},
            "flow": {"max_records": 100},  # so partitions are paused and resumed all the time
            "backend": {"url": self.backend.url},
        }
        config = {"kafka": kafka, "reactive_consumers": {"push": consumer}}
        return self._start(config, env={"HEADRACE_FAILPOINTS": failpoints})

    def wait_handled(self, more: int = 500) -> None:
        """Wait until the backend has handled so many more records than now."""
        wanted = self.backend.accepted_records + more
        self.wait_until(lambda: self.backend.accepted_records >= wanted, 120, f"{more} more records at the backend")

    def members(self) -> int:
        """Return how many members the group has."""
        groups = asyncio.run(self.admin.list_groups())
        return next((group.members for group in groups if group.name == self.group), 0)

    def behind(self) -> int:
        """Return how many records the group has not committed, of all partitions."""

        async def ask() -> int:
            offsets, committed = await self.admin.topic_offsets(self.topic), await self.admin.committed(self.group)
            return sum(end - committed.get(partition, 0) for partition, (_, end) in offsets.items())

        return asyncio.run(ask())

    def finish(self) -> None:
        """Let the writer stop and the group come to its end, and hear the ledger."""
        self.writer.stop()
        self.wait_until(lambda: self.behind() == 0, 120, "the commits to reach the end")
        found = asyncio.run(gather(self.kafka, self.admin, self.group, self.topic, self.journal))
        assert sum(len(run.log) for run in found) == self.writer.count
        said = [text for run in found for text in check_pushed(run, "partition")]
        assert [text for text in said if not text.startswith("repeat")] == []


@pytest.fixture
def scene(kafka_three: Any, headrace: Any, tmp_path: Path, bed: Any) -> Iterator[Scene]:
    """A topic that is being written, and a backend."""
    made = Scene(kafka_three, headrace, tmp_path, bed)
    made.backend.start()
    made.writer.start()
    yield made
    made.writer._stop_asked.set()
    made.backend.stop()


def leader_of(cluster: Any, topic: str) -> int:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    return int(admin.list_topics(topic, timeout=60).topics[topic].partitions[0].leader)


def coordinator_of(cluster: Any, group: str) -> int:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    return int(admin.describe_consumer_groups([group])[group].result(60).coordinator.id)


@pytest.mark.long  # test_brokers.py kills each of them, with other checks
def test_the_leader_is_killed_while_records_are_pushed(scene: Scene) -> None:
    """Row B1: another one takes over, and it goes on from there."""
    process = scene.run()
    scene.wait_handled()
    victim = leader_of(scene.cluster, scene.topic)
    scene.cluster.kill(victim)
    scene.wait_handled()
    scene.cluster.restart(victim)
    scene.cluster.wait_in_sync()
    scene.wait_handled()
    scene.finish()
    assert process.terminate() == 0


@pytest.mark.long
def test_two_brokers_of_three_stand_still(scene: Scene) -> None:
    """Row B2: the third one can take neither records nor commits; then all goes on."""
    process = scene.run()
    scene.wait_handled()
    for broker in (1, 2):
        scene.cluster.pause(broker)
    try:
        time.sleep(6)  # how long the fault lasts, longer than the session of a broker
    finally:
        for broker in (1, 2):
            scene.cluster.resume(broker)
    scene.cluster.wait_in_sync()
    scene.wait_handled()
    scene.finish()
    assert process.terminate() == 0


@pytest.mark.long
def test_the_coordinator_is_killed_while_a_commit_is_on_its_way(scene: Scene, kafka_network: FaultProxy) -> None:
    """Row B8: the next one takes the commits, and none passes what has not ended."""
    process = scene.run(kafka_network.bootstrap_servers)
    scene.wait_handled()
    kafka_network.hold(OFFSET_COMMIT)
    scene.wait_until(lambda: kafka_network.held, 60, "a commit")
    victim = coordinator_of(scene.cluster, scene.group)
    scene.cluster.kill(victim)
    kafka_network.heal()
    scene.wait_handled()
    scene.cluster.restart(victim)
    scene.cluster.wait_in_sync()
    scene.finish()
    assert process.terminate() == 0


@pytest.mark.long
@pytest.mark.parametrize("lost", ["everything", "answers"])
def test_the_network_is_silent_for_longer_than_the_session(scene: Scene, kafka_network: FaultProxy, lost: str) -> None:
    """Rows C3, C4: the group goes on without the member; when the network is back it joins again by itself."""
    process = scene.run(kafka_network.bootstrap_servers, **SHORT_SESSION)
    scene.wait_handled()
    kafka_network.silence(requests=lost == "everything")
    scene.wait_until(lambda: scene.members() == 0, 60, "the group to give the member up")
    kafka_network.heal()
    scene.wait_handled()
    scene.finish()
    assert process.terminate() == 0


@pytest.mark.long
def test_connections_are_reset_again_and_again(scene: Scene, kafka_network: FaultProxy) -> None:
    """Row C2: fetches and commits on their way are lost, and asked for again."""
    process = scene.run(kafka_network.bootstrap_servers)
    for _ in range(5):
        scene.wait_handled(200)
        assert kafka_network.cut() > 0
    scene.wait_handled()
    scene.finish()
    assert process.terminate() == 0


@pytest.mark.long
def test_a_commit_arrives_when_the_partitions_have_another_owner(scene: Scene, kafka_network: FaultProxy) -> None:
    """Row F5: it is refused, no commit goes back, and its sender joins again."""
    first = scene.run(kafka_network.bootstrap_servers, **SHORT_SESSION)
    scene.wait_handled()
    kafka_network.hold(OFFSET_COMMIT)
    scene.wait_until(lambda: kafka_network.held, 60, "a commit")
    second = scene.run(**SHORT_SESSION)
    for number in range(3):
        place = re.escape(str(TopicPartition(scene.topic, number)))
        scene.wait_until(lambda place=place: re.search(f"assigned .*{place}", second.output), 60, "a new owner")
    scene.wait_handled()
    kafka_network.heal()
    scene.wait_until(lambda: scene.members() == 2, 60, "the first one to join again")
    scene.wait_handled()
    scene.finish()
    assert [process.terminate() for process in (first, second)] == [0, 0]


@pytest.mark.long
def test_members_come_and_go(scene: Scene) -> None:
    """Rows F1, F7: politely and by kill -9, while partitions are paused and resumed all the time."""
    process = scene.run(**SHORT_SESSION)
    scene.backend.answer = Answer(delay_seconds=0.005)
    for polite in (True, False):
        scene.wait_handled(200)
        visitor = scene.run(**SHORT_SESSION)
        scene.wait_until(
            lambda visitor=visitor: re.search(rf"assigned .*{scene.topic}", visitor.output), 60, "a share for it"
        )
        scene.wait_handled(200)
        if polite:
            assert visitor.terminate() == 0
        else:
            visitor.kill()
    scene.wait_handled()
    scene.finish()
    assert process.terminate() == 0


@pytest.mark.long
def test_the_poll_interval_is_exceeded(scene: Scene) -> None:
    """Row F4: the member is out while its thread is blocked, and joins again; what it held comes again."""
    blocked = scene.run("", "poll.after=delay:7@20", **SHORT_SESSION, **{"max.poll.interval.ms": 3000})
    scene.wait_until(lambda: "failpoint poll.after: delay" in blocked.output, 60, "the thread to be blocked")
    scene.wait_until(lambda: scene.members() == 0, 60, "the group to give the member up")
    scene.wait_until(lambda: re.search(r"lost .*push-", blocked.output), 60, "the member to know")
    scene.wait_handled()
    scene.finish()
    assert blocked.terminate() == 0


@pytest.mark.long
def test_partitions_move_while_their_deliveries_hang(scene: Scene) -> None:
    """Row F3: a revoke waits for them up to its limit; what is answered later moves no commit of the new owner."""
    scene.backend.answer = Answer(delay_seconds=600)
    first = scene.run()
    scene.wait_until(lambda: scene.writer.count > 2000, 60, "a backlog")
    second = scene.run()
    scene.wait_until(lambda: re.search(rf"assigned .*{scene.topic}", second.output), 120, "a share for the second one")
    scene.backend.answer = Answer()
    scene.backend.release()
    scene.wait_handled()
    scene.finish()
    assert [process.terminate() for process in (first, second)] == [0, 0]


def test_partitions_are_added_under_load(scene: Scene) -> None:
    """Row B9: what is written to the new ones from their first moment is delivered too."""
    process = scene.run(**{"topic.metadata.refresh.interval.ms": 1000})
    scene.wait_handled()
    admin = AdminClient({"bootstrap.servers": scene.cluster.bootstrap_servers})
    for future in admin.create_partitions([NewPartitions(scene.topic, 6)]).values():
        future.result(60)
    scene.wait_until(lambda: all(scene.writer.acknowledged.get(n, 0) > 20 for n in range(6)), 60, "6 partitions in use")
    scene.finish()
    assert process.terminate() == 0


def test_lag_is_zero_behind_aborted_transactions(
    kafka: Any, topic: Callable[..., str], headrace: Any, backend: Any, bed: Any, request: pytest.FixtureRequest
) -> None:
    """Row G8: most of the log are aborted records and marks, at its end too; the commit reaches the end."""
    name, place = topic(), {"bootstrap_servers": kafka.bootstrap_servers}
    count = 5000 if request.config.getoption("--all") else 300
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": name})
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
    consumer = {"topics": [name], "group": name, "value_format": "string", "backend": {"url": backend.url}}
    process = headrace({"kafka": place, "reactive_consumers": {"push": consumer}})
    backend.wait_for(lambda b: len(b.accepted) >= len(wanted))
    admin = Admin(KafkaConfig(**place, request_timeout_seconds=60))
    ends = asyncio.run(admin.written_offsets([TopicPartition(name, 0)]))
    assert ends[TopicPartition(name, 0)] == 4 * count
    bed.wait_until(lambda: asyncio.run(admin.committed(name)) == ends, 60, "the commit to reach the end")
    assert [record["value"] for record in backend.accepted] == wanted
    assert bed.Ledger(kafka.bootstrap_servers).lag(name) == 0
    assert process.terminate() == 0


@pytest.mark.long
def test_lag_is_zero_where_compaction_has_left_gaps(
    kafka: Any, topic: Callable[..., str], headrace: Any, backend: Any, bed: Any
) -> None:
    """Row G8: offsets that are not there any more are waited for by nobody."""
    name = topic(cleanup_policy="compact", segment_ms=100, min_cleanable_dirty_ratio=0.001, max_compaction_lag_ms=100)
    ledger = bed.Ledger(kafka.bootstrap_servers)
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number in range(1000):
        producer.produce(name, f"{number}", f"k{number % 7}", partition=0)
        if number % 100 == 99:
            assert producer.flush(120) == 0
            time.sleep(0.15)  # so that the next one begins another segment
    bed.wait_until(lambda: len(ledger.records(name)) < 500, 150, "the broker to compact")
    consumer = {"topics": [name], "group": name, "value_format": "string", "backend": {"url": backend.url}}
    process = headrace(
        {"kafka": {"bootstrap_servers": kafka.bootstrap_servers}, "reactive_consumers": {"push": consumer}}
    )
    bed.wait_until(lambda: ledger.lag(name) == 0, 60, "lag 0")
    assert ledger.committed(name) == {TopicPartition(name, 0): 1000}
    ledger.check_delivered(name, bed.delivered_by(backend))
    assert process.terminate() == 0


@pytest.mark.long
def test_a_batch_that_is_broken_on_disk_stops_its_partition_alone(
    tmp_path: Path, headrace: Any, backend: Any, bed: Any
) -> None:
    """Row G5: what is before it and in other partitions is delivered, nothing of it is, and readiness says where."""
    with Cluster(tmp_path / "kafka") as cluster:
        cluster.create_topic("broken", 2)
        servers = {"bootstrap_servers": cluster.bootstrap_servers}
        producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap_servers})
        for batch in range(3):
            for number in range(10):
                for partition in (0, 1):
                    producer.produce("broken", f"{batch}{number}", partition=partition)
            assert producer.flush(120) == 0
        cluster.servers[0].stop()
        log = tmp_path / "kafka" / "n1" / "data" / "broken-0" / f"{0:020}.log"
        data = bytearray(log.read_bytes())
        second = 12 + int.from_bytes(data[8:12])
        data[second + 12 + int.from_bytes(data[second + 8 : second + 12]) - 2] ^= 0xFF  # in its last value
        log.write_bytes(data)
        cluster.restart(1)
        consumer = {"topics": ["broken"], "group": "g", "value_format": "string", "backend": {"url": backend.url}}
        process = headrace({"kafka": servers, "reactive_consumers": {"push": consumer}}, wait=False)
        backend.wait_for(lambda b: len(b.accepted) >= 40)
        bed.wait_until(lambda: re.search(r"broken-0.* 10", readiness(process.url)), 60, "the place in readiness")
        assert bed.delivered_by(backend) == {(0, n) for n in range(10)} | {(1, n) for n in range(30)}
        bed.wait_until(
            lambda: bed.Ledger(cluster.bootstrap_servers).committed("g").get(TopicPartition("broken", 0)) == 10,
            60,
            "commit",
        )
        assert process.terminate() == 0


def readiness(url: str) -> str:
    """Return what a process says of its readiness; nothing if it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/health/readiness", timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as refusal:
        with refusal:
            return str(refusal.read().decode())
    except OSError:
        return ""


def test_bytes_arrive_as_they_are(kafka: Any, topic: Callable[..., str], headrace: Any, backend: Any) -> None:
    """Row G1: nulls, nothing, bytes that are no text; a tombstone is not an empty value."""
    name = topic()
    parts = [None, b"", b"\x00", b"\xff\xfe", bytes(range(256)), "é".encode(), b"{", b'"']
    sent = [*itertools.product(parts, parts)]
    headers = [("h", b"1"), ("h", b"2"), ("empty", b""), ("null", None), *((f"n{n}", b"x") for n in range(1000))]
    told = {"h": "2", "empty": "", "null": "", **{f"n{n}": "x" for n in range(1000)}}
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for key, value in sent:
        producer.produce(name, value, key, headers=headers, partition=0)
    assert producer.flush(120) == 0
    consumer = {"topics": [name], "group": name, "key_format": "binary", "value_format": "binary"}
    place = {"kafka": {"bootstrap_servers": kafka.bootstrap_servers}}
    headrace({**place, "reactive_consumers": {"push": {**consumer, "backend": {"url": backend.url}}}})
    backend.wait_for(lambda b: len(b.accepted) >= len(sent))
    assert [(part(entry, "key"), part(entry, "value")) for entry in backend.accepted] == sent
    assert all(told.items() <= entry["headers"].items() for entry in backend.accepted)


def part(entry: dict[str, Any], name: str) -> bytes | None:
    """Return the bytes of a key or value, None for a null one."""
    return None if entry.get(name) is None else base64.b64decode(entry[name], validate=True)
