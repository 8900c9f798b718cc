"""A real cluster as a stage, with members as programs, which can be stopped and killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewPartitions

from headrace_devkit.simulation.calibration.group_configs import set_group_configs
from headrace_devkit.simulation.calibration.member_program import name_of
from headrace_devkit.simulation.calibration.stages import SESSION_SECONDS, Stage, StageMember


class BrokerMember(StageMember):
    """A member as a program."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        super().__init__(name)
        command = [sys.executable, "-m", "headrace_devkit.simulation.calibration.member_program", json.dumps(config)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self.events.append(json.loads(line))

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def tell(self, *command: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(OSError):
                pipe.close()


class BrokerStage(Stage):
    """A real cluster."""

    def __init__(self, protocol: str, cluster: Any) -> None:
        super().__init__(protocol)
        self._cluster = cluster
        self._servers = cluster.bootstrap_servers
        self._admin = AdminClient({"bootstrap.servers": self._servers, "log_level": 0})
        self._producer = confluent_kafka.Producer({"bootstrap.servers": self._servers, "log_level": 0})
        if protocol == "consumer":
            milliseconds = str(int(SESSION_SECONDS * 1000))
            set_group_configs(cluster.ports[0], self.group, {"consumer.session.timeout.ms": milliseconds})

    def start_member(self, name: str, config: dict[str, Any]) -> BrokerMember:
        return BrokerMember(name, {**config, "bootstrap.servers": self._servers})

    def wait(self, condition: Callable[[], object], limit_seconds: float) -> bool:
        end = time.monotonic() + limit_seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def topic(self, partitions: int = 1) -> str:
        name = f"calibration-{uuid.uuid4().hex[:8]}"
        self._cluster.create_topic(name, partitions)
        self.topics.append(name)
        return name

    def partitions_of(self, topic: str) -> int:
        return len(self._admin.list_topics(topic, timeout=10).topics[topic].partitions)

    def add_partitions(self, topic: str, total: int) -> None:
        for done in self._admin.create_partitions([NewPartitions(topic, total)]).values():
            done.result(10)

    def produce(self, topic: str, partition: int, count: int) -> None:
        for _ in range(count):
            self._producer.produce(topic, b"v", partition=partition)
        self._producer.flush(30)

    def transaction(self, topic: str, partition: int, count: int, ends: str = "") -> Callable[[str], None]:
        producer = self._transactional()
        for _ in range(count):
            producer.produce(topic, b"v", partition=partition)
        producer.flush(30)
        if ends:
            _end(producer, ends)
        return lambda how: _end(producer, how)

    def offsets_in_transaction(self, topic: str, partition: int, offset: int) -> Callable[[str], None]:
        producer = self._transactional()
        anyone = confluent_kafka.Consumer({"bootstrap.servers": self._servers, "group.id": self.group, "log_level": 0})
        items = [confluent_kafka.TopicPartition(topic, partition, offset)]
        producer.send_offsets_to_transaction(items, anyone.consumer_group_metadata(), 30)
        anyone.close()
        return lambda how: _end(producer, how)

    def commit_as(self, metadata: bytes, partitions: set[tuple[str, int]]) -> str:
        producer = self._transactional()
        error = None
        try:
            items = [confluent_kafka.TopicPartition(*one, 5) for one in sorted(partitions)]
            producer.send_offsets_to_transaction(items, metadata, 30)
        except KafkaException as cause:
            error = cause.args[0]
        producer.abort_transaction(30)
        return name_of(error)

    def _transactional(self) -> Any:
        settings = {"bootstrap.servers": self._servers, "transactional.id": uuid.uuid4().hex, "log_level": 0}
        producer = confluent_kafka.Producer(settings)
        producer.init_transactions(30)
        producer.begin_transaction()
        return producer

    def delete_topic(self, topic: str) -> None:
        for done in self._admin.delete_topics([topic]).values():
            done.result(10)

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        items = [confluent_kafka.TopicPartition(topic, partition, offset)]
        for done in self._admin.delete_records(items).values():
            done.result(10)

    def committed(self) -> dict[tuple[str, int], int]:
        client = confluent_kafka.Consumer({"bootstrap.servers": self._servers, "group.id": self.group, "log_level": 0})
        try:
            partitions = [
                confluent_kafka.TopicPartition(topic, n)
                for topic in self.topics
                for n in range(self.partitions_of(topic))
            ]
            found = client.committed(partitions, timeout=30)
            return {(one.topic, one.partition): one.offset for one in found if one.offset >= 0}
        finally:
            client.close()

    def stop_brokers(self) -> Callable[[], None]:
        for server in self._cluster.endpoints:
            self._cluster.kill(server["id"])

        def start() -> None:  # all at once: none of them is ready before the others
            self._cluster.launch()
            self._cluster.wait_ready()

        return start

    def stop_broker(self, which: str, topic: str) -> Callable[[], None]:
        if which == "coordinator":
            described = self._admin.describe_consumer_groups([self.group])[self.group].result(30)
            broker = described.coordinator.id
        else:
            broker = self._admin.list_topics(topic, timeout=10).topics[topic].partitions[0].leader
        self._cluster.kill(broker)
        return lambda: self._cluster.restart(broker)

    def end(self) -> None:
        """Kill what is left."""
        for member in self.members:
            member.kill()


def _end(producer: Any, how: str) -> None:
    (producer.commit_transaction if how == "commit" else producer.abort_transaction)(30)
