"""Points in which a function is better here than in Nuclio; docs/coming-from.md has what a user sees of them."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import confluent_kafka

from headrace.records import OutgoingRecord
from headrace_devkit.testing import Cluster, StartHeadrace
from headrace_devkit.testing.proxy import JOIN_GROUP, FaultProxy
from headrace_devkit.testing.scenario import Scenario
from tests.function_calls import FunctionCalls, function_file
from yaml_table import table

HANGS = table(__file__, "hangs")
STUCK = table(__file__, "stuck")
"""With this as `sitecustomize`, the loop of a process is stuck from SIGUSR1 on, while the file exists."""


def test_point_5_the_limits_of_partitions_and_workers_do_not_add_up(
    calls: Callable[[int], FunctionCalls], tmp_path: Path
) -> None:
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
    assert first.output.count("was still running when the partition was revoked") == 4
    assert ": lost " not in first.output
    begun = {partition: one.counts("begin", partition)[0] for partition in range(15)}
    assert begun == {partition: 1 + (partition in hung) for partition in range(15)}
    assert [process.terminate() for process in (first, second)] == [0, 0]
    assert one.reasons() == []


SET_UP = """
import os

def init_context(context):
    assert os.path.exists({file!r}), "not set up"

def handler(context, event):
    assert event.body != b"bad"
"""


def test_point_16_readiness_names_worker_group_partition_and_brokers(
    kafka_three: Cluster, kafka_network: FaultProxy, headrace: StartHeadrace, tmp_path: Path
) -> None:
    """One after the other, and is back after each; liveness tells of a loop that is stuck, and of nothing else."""
    site, source = Scenario(kafka_three.bootstrap_servers, tmp_path), f"ready-{uuid.uuid4().hex[:8]}"
    set_up, stuck = tmp_path / "set-up", tmp_path / "stuck"
    kafka_three.create_topic(source, 1, {})
    (tmp_path / "sitecustomize.py").write_text(STUCK.format(stuck=str(stuck)))
    attributes = {"topics": [source], "consumerGroup": f"{source}-work", "retry": {"attempts": 1}, "onFailure": "stop"}
    file = function_file(
        tmp_path, SET_UP.format(file=str(set_up)), {"in": {"kind": "kafka-cluster", "attributes": attributes}}
    )
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
    site.wait_until(lambda: not is_live(), "no response of the loop")
    stuck.unlink()
    site.wait_until(is_live, "a response of the loop")
    wait_ready()
    assert process.terminate() == 0


def test_point_19_isolation_and_commit_interval_are_settings(
    calls: Callable[[int], FunctionCalls], site: Scenario
) -> None:
    """Records of an aborted transaction are called only if the file says so; a long interval commits at the end."""
    one = calls(1)
    name, code = f"{one.group}-dirty", "def handler(context, event): note(event.trigger.name, 0, event.offset)\n"
    attributes = {
        "topics": [one.source],
        "consumerGroup": name,
        "consumer": {"properties": {"isolation.level": "read_uncommitted", "auto.commit.interval.ms": 100}},
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
    hourly = {"properties": {"auto.commit.interval.ms": 3_600_000}}
    process = one.start(code, others={"dirty": dirty}, consumer=hourly)
    for count in range(20):  # in more than the interval that a trigger has by default
        one.write(0, "1")
        site.wait_committed(name, one.source, 7 + count + 1)
    one.wait_lines(2 + 20, "in")
    assert one.committed.get(0, 0) <= 7, "where it began"
    assert process.terminate() == 0
    assert one.committed == {0: 27}
    assert one.counts("in") == dict.fromkeys([4, 5, *range(7, 27)], 1)
    assert one.counts("dirty") == dict.fromkeys([0, 1, 2, 4, 5, *range(7, 27)], 1)
