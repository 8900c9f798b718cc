"""Points in which a function is better here than in Nuclio; docs/functions.md lists all of them with their tests."""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from headrace.records import OutgoingRecord, TopicPartition
from headrace.testing import HeadraceProcess
from headrace.testing.proxy import JOIN_GROUP, FaultProxy
from headrace.testing.scene import Scene
from tests.function_calls import FunctionCalls, function_file

HANGS = """
def drained():
    note("drained")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)


def init_context(context):
    context.platform.set_drain_callback(drained)


def handler(context, event):
    note("begin", event.shard_id, event.offset)
    while event.body == b"wait" and not pathlib.Path("go").exists():
        time.sleep(0.01)
"""
SPELLINGS = ("x-nuclio-stream-no-ack", "X-Nuclio-Stream-No-Ack", "X-NUCLIO-STREAM-NO-ACK", "x-Nuclio-STREAM-no-aCK")
HEADERS = """
async def handler(context, event):
    note("call", event.shard_id, event.offset)
    what, *positions = event.body.decode().split()
    response = context.Response()
    if what == "ack":
        await acknowledge(context, *positions)
    elif what == "sdk":
        response.ensure_no_ack()
    elif what != "plain":
        response.headers[what] = True
    return response
"""
"""A value that is the name of a header is one that the response has."""
STUCK = """
import pathlib, signal, time


def stick(*_):
    while pathlib.Path({stuck!r}).exists():
        time.sleep(0.01)


signal.signal(signal.SIGUSR1, stick)
"""
"""With this as `sitecustomize`, the loop of a process is stuck from SIGUSR1 on, while the file exists."""


@pytest.fixture
def function(site: Any, headrace: Any, tmp_path: Path) -> Callable[..., HeadraceProcess]:
    """Run a handler on a topic: `function(source, code, spec={}, trigger={}, **attributes)`."""

    def start(
        source: str, code: str, *, spec: Any = None, trigger: Any = None, wait: bool = True, **attributes: Any
    ) -> HeadraceProcess:
        known = {"topics": [source], "consumerGroup": f"{source}-work", **attributes}
        made = {"kind": "kafka-cluster", **(trigger or {}), "attributes": known}
        file = function_file(tmp_path, code, {"in": made}, **(spec or {}))
        process: HeadraceProcess = headrace({**site.config, "functions": [file]}, wait=wait)
        return process

    return start


@pytest.fixture
def calls(site: Any, headrace: Any, topic: Any, tmp_path: Path) -> Callable[[int], FunctionCalls]:
    """Make a function that writes its calls, on a topic of so many partitions."""
    return lambda partitions: FunctionCalls(site, headrace, tmp_path, topic(partitions))


def test_point_2_a_success_commits_nothing_before_it(site: Any, topic: Any, function: Any, tmp_path: Path) -> None:
    """The commit waits for the failed event, also across kill -9; what had succeeded behind it is not called again."""
    source, target, mended = topic(), topic(), tmp_path / "mended"
    code = (
        "import os\n"
        "def handler(context, event):\n"
        f"    if event.offset == 3 and not os.path.exists({str(mended)!r}):\n"
        "        raise RuntimeError('not yet')\n"
        "    return event.id\n"
    )
    site.write(source, *(OutgoingRecord(source, b"k%d" % n, b"1") for n in range(50)))
    settings = {
        "ordering": "key",
        "retry": {"attempts": 1000, "first_delay_seconds": 0.2, "max_delay_seconds": 0.2},
        "outputTopic": target,
        "consumer": {"instance_id": "one"},
    }
    process = function(source, code, **settings)
    site.wait_committed(f"{source}-work", source, 3)
    site.wait_until(lambda: len(site.records(target)) == 49, "the outputs behind it")
    assert site.committed(f"{source}-work") == {TopicPartition(source, 0): 3}
    process.kill()
    mended.touch()
    process = function(source, code, **settings)
    site.wait_committed(f"{source}-work", source, 50)
    assert {record.value.decode() for record in site.records(target)} == {f"{source}-0-{n}" for n in range(50)}
    assert process.terminate() == 0


def test_point_5_the_limits_of_partitions_and_workers_do_not_add_up(calls: Any, tmp_path: Path) -> None:
    """Four events and the callbacks hang; with their limits one after the other, Kafka would remove the member.

    Events that wait for these workers are not begun any more.
    """
    one = calls(15)
    own = {
        "trigger": {"numWorkers": 5},
        "maxWaitHandlerDuringRebalance": "4s",
        "rebalanceTimeout": "20s",
        "balanceStrategy": "range",
    }
    for partition in range(15):
        one.write(partition, "quick" if partition % 5 == 0 else "wait")
    first = one.start(HANGS, **own)
    one.wait_lines(3 + 4, "begin")
    hung = {line.partition for line in one.of("begin") if line.partition % 5}
    second = one.start(HANGS, name="two", **own)
    one.wait_lines(1, "begin", "two")
    (tmp_path / "go").touch()
    one.wait_committed(dict.fromkeys(range(15), 1))
    assert first.output.count("was still running when the partition had to be given up") == 4
    assert ": lost " not in first.output
    begun = {partition: one.counts("begin", partition)[0] for partition in range(15)}
    assert begun == {partition: 1 + (partition in hung) for partition in range(15)}
    assert [process.terminate() for process in (first, second)] == [0, 0]
    assert one.reasons() == []


def test_point_7_a_header_holds_its_event_in_any_letter_case(calls: Any) -> None:
    """By the offsets that the broker has: across kill -9 these events are called again, and the others are not."""
    one = calls(2)
    own = {"trigger": {"explicitAckMode": "enable"}, "consumer": {"instance_id": "one"}}
    one.write(0, "sdk", *SPELLINGS, "plain")
    process = one.start(HEADERS, **own)
    one.wait_lines(6, "call")
    one.write(1, "plain")  # served by the same worker after the others, and committed not before them
    one.wait_committed({0: 0, 1: 1})
    process.kill()
    process = one.start(HEADERS, **own)
    one.wait_lines(6 + 1 + 5, "call")
    one.write(1, "plain")
    one.wait_committed({0: 0, 1: 2})
    assert one.counts("call") == {**dict.fromkeys(range(5), 2), 5: 1}
    one.write(1, f"ack {one.source}:0:4")
    one.wait_committed({0: 6, 1: 3})
    assert process.terminate() == 0


def test_points_11_and_17_an_event_has_the_true_place_key_and_time_of_its_record(
    site: Any, topic: Any, function: Any
) -> None:
    """`id` is the same at the second call; `num_shards` is the topic's number of partitions; `worker_id` is a text."""
    source, target = topic(3), topic()
    code = (
        "calls = {}\n"
        "def handler(context, event):\n"
        "    calls.setdefault(event.offset, []).append(event.id)\n"
        "    if len(calls[event.offset]) == 1:\n"
        "        raise RuntimeError('the first call')\n"
        "    ids, key, worker = calls[event.offset], event.key.decode(), context.worker_id\n"
        "    return [(200, {'ids': ids, 'key': key, 'at': event.timestamp_ms, 'of': event.num_shards, 'w': worker})]\n"
    )
    site.write(source, *(OutgoingRecord(source, b"k%d" % n, b"v", None, 2) for n in range(2)))
    process = function(source, code, outputTopic=target, retry={"first_delay_seconds": 0.05})
    site.wait_committed(f"{source}-work", source, 2, 2)
    times = [record.timestamp_ms for record in site.records(source)]
    assert [json.loads(record.value) for record in site.records(target)] == [
        {"ids": [f"{source}-2-{n}"] * 2, "key": f"k{n}", "at": times[n], "of": 3, "w": "0"} for n in range(2)
    ]
    assert process.terminate() == 0


def test_point_16_readiness_names_worker_group_partition_and_brokers(
    kafka_three: Any, kafka_network: FaultProxy, headrace: Any, tmp_path: Path
) -> None:
    """One after the other, and is back after each; liveness tells of a loop that is stuck, and of nothing else."""
    site, source = Scene(kafka_three.bootstrap_servers, tmp_path), f"ready-{uuid.uuid4().hex[:8]}"
    set_up, stuck = tmp_path / "set-up", tmp_path / "stuck"
    kafka_three.create_topic(source, 1, {})
    code = (
        "import os\n"
        "def init_context(context):\n"
        f"    assert os.path.exists({str(set_up)!r}), 'not set up'\n"
        "def handler(context, event):\n"
        "    assert event.body != b'bad'\n"
    )
    (tmp_path / "sitecustomize.py").write_text(STUCK.format(stuck=str(stuck)))
    attributes = {"topics": [source], "consumerGroup": f"{source}-work", "attempts": 1, "onFailure": "stop"}
    file = function_file(tmp_path, code, {"in": {"kind": "kafka-cluster", "attributes": attributes}})
    config = {"kafka": {"bootstrap_servers": kafka_network.bootstrap_servers}, "functions": [file]}
    kafka_network.hold(JOIN_GROUP)
    process = headrace(config, wait=False, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})

    def is_live() -> bool:
        try:
            return bool(site.ask(f"{process.url}/health/liveness", limit_seconds=5).status == 200)
        except (ConnectionError, TimeoutError):
            return False

    def wait_named(text: str) -> None:
        site.wait_until(lambda: text in str(site.reasons(process.url)), text)
        assert is_live()

    def wait_ready() -> None:
        site.wait_until(lambda: site.ask(f"{process.url}/health/readiness").status == 200, "readiness")

    wait_named("AssertionError: not set up")
    set_up.touch()
    wait_named(f"group {source}-work: not joined yet")
    kafka_network.heal()
    wait_ready()
    site.write(source, OutgoingRecord(source, None, b"bad"))
    wait_named(f"{source}-0 is stalled: ")
    site.cli("reactive", "skip", "work.in", "0", "--partition", "0", "--reason", "it is wrong", "--url", process.url)
    wait_ready()
    kafka_network.silence()
    wait_named("has not answered for")
    kafka_network.heal()
    wait_ready()
    stuck.touch()
    os.kill(process.server.id.pid, signal.SIGUSR1)
    site.wait_until(lambda: not is_live(), "no answer of the loop")
    stuck.unlink()
    site.wait_until(is_live, "an answer of the loop")
    wait_ready()
    assert process.terminate() == 0


def test_point_19_isolation_and_commit_interval_are_settings(calls: Any, site: Any) -> None:
    """Records of an aborted transaction are called only if the file says so; a long interval commits at the end."""
    one = calls(1)
    name, code = f"{one.group}-dirty", "def handler(context, event): note(event.trigger.name, 0, event.offset)\n"
    attributes = {
        "topics": [one.source],
        "consumerGroup": name,
        "commitInterval": "100ms",
        "consumer": {"isolation_level": "read_uncommitted"},
    }
    dirty = {"kind": "kafka-cluster", "attributes": attributes}
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": site.kafka.bootstrap_servers, "transactional.id": one.source}
    )
    producer.init_transactions(60)
    for count, end in ((3, producer.abort_transaction), (2, producer.commit_transaction)):
        producer.begin_transaction()
        for _ in range(count):
            producer.produce(one.source, b"1")
        producer.flush(60)
        end(60)
    process = one.start(code, others={"dirty": dirty}, commitInterval="1h")
    for count in range(20):  # in more than the interval that a trigger has by default
        one.write(0, "1")
        site.wait_committed(name, one.source, 7 + count + 1)
    one.wait_lines(2 + 20, "in")
    assert one.committed.get(0, 0) <= 7, "where it began"
    assert process.terminate() == 0
    assert one.committed == {0: 27}
    assert one.counts("in") == dict.fromkeys([4, 5, *range(7, 27)], 1)
    assert one.counts("dirty") == dict.fromkeys([0, 1, 2, 4, 5, *range(7, 27)], 1)


def test_point_19_a_member_with_a_name_has_its_partitions_again(calls: Any, site: Any) -> None:
    """After kill -9, without a rebalance of the others; the broker has the name."""
    one = calls(4)

    def start(name: str) -> HeadraceProcess:
        own = {"sessionTimeout": "5m", "consumer": {"instance_id": name}}
        code = "def handler(context, event): note('call', event.shard_id, event.offset)\n"
        process: HeadraceProcess = one.start(code, name=name, **own)
        return process

    def serve() -> dict[str, set[int]]:
        """Have a record of each partition called; return the partitions of each process."""
        done = len(one.lines)
        for partition in range(4):
            one.write(partition, "a")
        one.wait_lines(done + 4, "call")
        return {name: {line.partition for line in one.lines[done:] if line.process == name} for name in ("one", "two")}

    killed, other = start("one"), start("two")
    site.wait_until(lambda: all(serve().values()), "partitions in both")
    owned = serve()
    changes = other.output.count("assigned")
    killed.kill()
    again = start("one")
    assert serve() == owned
    assert other.output.count("assigned") == changes
    admin = AdminClient({"bootstrap.servers": site.kafka.bootstrap_servers})
    members = admin.describe_consumer_groups([one.group])[one.group].result(60).members
    assert {member.group_instance_id for member in members} == {"one", "two"}
    assert [process.terminate() for process in (again, other)] == [0, 0]
