"""Where a calibration script runs: on the model in virtual time, or on a real broker with programs of their own.

Both have the same methods, and give the same kind of trace.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewPartitions

from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.calibration.group_configs import set_group_configs
from headrace_devkit.simulation.calibration.member_program import MemberProgram
from headrace_devkit.simulation.consumer_client import SimulatedConsumer
from headrace_devkit.simulation.greenlet_threads import sleep
from headrace_devkit.simulation.group_coordinator import GroupCoordinators
from headrace_devkit.simulation.offsets import CommittedOffset
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.world import World

LIMIT_SECONDS = 60.0
SESSION_SECONDS = 3.0
BASE = {
    "auto.offset.reset": "earliest",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "fetch.wait.max.ms": 100,
    "topic.metadata.refresh.interval.ms": 1000,
    "max.poll.interval.ms": 20_000,
}
CLASSIC = {
    "partition.assignment.strategy": "cooperative-sticky",
    "session.timeout.ms": int(SESSION_SECONDS * 1000),
    "heartbeat.interval.ms": 300,
}
CONSUMER = {"group.protocol": "consumer"}


class StageMember(ABC):
    """A member on a stage: its reports, and how to tell it something."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[list[Any]] = []
        self.ends_at: int | None = None
        """How many events are compared; None for all."""

    @abstractmethod
    def tell(self, *command: Any) -> None:
        """Have it do something, between two polls."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it as SIGSTOP does."""

    @abstractmethod
    def go_on(self) -> None:
        """Let it continue."""

    @abstractmethod
    def kill(self) -> None: ...

    @property
    def owned(self) -> set[tuple[str, int]]:
        """What its callbacks say that it has."""
        found: set[tuple[str, int]] = set()
        for name, *values in self.events:
            if name == "assign":
                found |= {tuple(one) for one in values[0]}
            elif name in ("revoke", "lost"):
                found -= {tuple(one) for one in values[0]}
        return found

    def count(self, name: str) -> int:
        return sum(event[0] == name for event in self.events)

    def failed(self, code: str) -> bool:
        """Whether the client has reported this about a connection."""
        return ["failure", code] in self.events


class Stage(ABC):
    """Topics, members, and time."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.group = f"g-{uuid.uuid4().hex[:8]}"
        self.topics: list[str] = []
        self.members: list[Any] = []
        self.notes: list[list[Any]] = []

    @property
    def base(self) -> dict[str, Any]:
        return {**BASE, **(CONSUMER if self.protocol == "consumer" else CLASSIC), "group.id": self.group}

    def member(self, name: str, topics: list[str] | None = None, **config: Any) -> Any:
        """Start a member that reads all topics of the script, or those given; none if a command assigns."""
        dotted = {key.replace("_", "."): value for key, value in config.items()}
        member = self.start_member(name, {**self.base, "client.id": name, **dotted})
        self.members.append(member)
        if topics != []:
            member.tell("subscribe", topics or self.topics)
        return member

    def until(self, condition: Callable[[], object], what: str, limit_seconds: float = LIMIT_SECONDS) -> None:
        """Wait for a condition on what the members have reported."""
        if not self.wait(condition, limit_seconds):
            recent = {member.name: member.events[-15:] for member in self.members}
            raise AssertionError(f"{type(self).__name__}: not within {limit_seconds} s: {what}; {recent}")

    def settled(self, *members: Any) -> None:
        """Wait until these members have all partitions of the topics, each one, and nothing changes for a while."""
        all_of = {(topic, n) for topic in self.topics for n in range(self.partitions_of(topic))}

        def is_shared() -> bool:
            owned = [member.owned for member in members]
            sizes = sorted(len(one) for one in owned)
            return set().union(*owned) == all_of and sum(sizes) == len(all_of) and sizes[-1] - sizes[0] <= 1

        self.until(is_shared, f"{len(all_of)} partitions are shared by {[member.name for member in members]}")
        self.sleep(2.5)
        self.until(is_shared, "it stays so")

    @abstractmethod
    def start_member(self, name: str, config: dict[str, Any]) -> StageMember: ...

    @abstractmethod
    def wait(self, condition: Callable[[], object], limit_seconds: float) -> bool: ...

    @abstractmethod
    def sleep(self, seconds: float) -> None: ...

    @abstractmethod
    def topic(self, partitions: int = 1) -> str: ...

    @abstractmethod
    def partitions_of(self, topic: str) -> int: ...

    @abstractmethod
    def add_partitions(self, topic: str, total: int) -> None: ...

    @abstractmethod
    def produce(self, topic: str, partition: int, count: int) -> None: ...

    @abstractmethod
    def transaction(self, topic: str, partition: int, count: int, ends: str = "") -> Callable[[str], None]:
        """Write records of a transaction and return a call that ends it: "commit" or "abort"."""

    @abstractmethod
    def offsets_in_transaction(self, topic: str, partition: int, offset: int) -> Callable[[str], None]:
        """Commit an offset of the group in a transaction, and return a call that ends it."""

    @abstractmethod
    def delete_topic(self, topic: str) -> None: ...

    @abstractmethod
    def delete_before(self, topic: str, partition: int, offset: int) -> None: ...

    @abstractmethod
    def committed(self) -> dict[tuple[str, int], int]: ...

    @abstractmethod
    def stop_brokers(self) -> Callable[[], None]:
        """Kill all brokers; return a call that starts them again."""

    @abstractmethod
    def stop_broker(self, which: str, topic: str) -> Callable[[], None]:
        """Kill the group's coordinator or the leader of a topic; return a call that starts it again."""

    def checkpoint(self, name: str) -> None:
        """Write down what the group has committed."""
        found = sorted([self.topics.index(t), n, offset] for (t, n), offset in self.committed().items())
        self.notes.append([name, found])

    def closed(self, member: Any) -> None:
        """Wait until a member has closed."""
        self.until(lambda: member.count("closed"), f"{member.name} closes")

    def close_all(self) -> None:
        """Close the members that are left, which is not part of the trace."""
        for member in self.members:
            member.ends_at = len(member.events)
        for member in self.members:
            if not member.count("closed") and not member.gone:
                member.tell("close")
                self.closed(member)


# The model -----------------------------------------------------------------------------------------------------------


class ModelMember(StageMember):
    """A member on a machine of a world."""

    gone = False

    def __init__(self, name: str, stage: "ModelStage", config: dict[str, Any]) -> None:
        super().__init__(name)
        self._commands: list[list[Any]] = []
        self._stopped_at: float | None = None
        self.machine = stage.world.machine(f"member-{name}")

        def make(settings: dict[str, Any]) -> SimulatedConsumer:
            return SimulatedConsumer(stage.brokers, stage.groups, settings)

        program = MemberProgram(make, config, self._take, lambda event: self.events.append(event), sleep)

        def run() -> None:
            sleep(stage.world.random.uniform(0, 1))  # a process takes a while to start
            program.run()

        self.machine.start_thread(run, "main")

    def _take(self) -> list[list[Any]]:
        due, self._commands = self._commands, []
        return due

    def tell(self, *command: Any) -> None:
        self._commands.append(json.loads(json.dumps(command)))

    def stop(self) -> None:
        self.machine.pause(100_000)

    def go_on(self) -> None:
        self.machine._paused_until = self.machine.world.now
        self.machine._continue()

    def kill(self) -> None:
        self.gone = True
        self.machine.kill()


class ModelStage(Stage):
    """A world with brokers."""

    def __init__(self, protocol: str, seed: int = 1, brokers: int = 1) -> None:
        super().__init__(protocol)
        self.group = "g"
        self.world = World(seed)
        self.brokers = Brokers(
            self.world,
            brokers,
            configs={
                "group.initial.rebalance.delay.ms": 0,
                "group.consumer.heartbeat.interval.ms": 500,
                "group.consumer.session.timeout.ms": SESSION_SECONDS * 1000,
                "broker.session.timeout.ms": 3000,
                "offsets.topic.num.partitions": 4,
                "transaction.state.log.num.partitions": 4,
            },
        )
        self.groups = GroupCoordinators(self.brokers)
        self._producers = 0

    def start_member(self, name: str, config: dict[str, Any]) -> ModelMember:
        return ModelMember(name, self, config)

    def wait(self, condition: Callable[[], object], limit_seconds: float) -> bool:
        return self.world.run_until(condition, limit_seconds)

    def sleep(self, seconds: float) -> None:
        self.world.run(seconds)

    def topic(self, partitions: int = 1) -> str:
        name = f"t{len(self.topics)}"
        self.brokers.create_topic(name, partitions)
        self.topics.append(name)
        return name

    def partitions_of(self, topic: str) -> int:
        return len(self.brokers.topics[topic].partitions)

    def add_partitions(self, topic: str, total: int) -> None:
        self.brokers.add_partitions(topic, total)

    def produce(self, topic: str, partition: int, count: int) -> None:
        self._log(topic, partition).append([UnwrittenRecord(None, b"v") for _ in range(count)])

    def transaction(self, topic: str, partition: int, count: int, ends: str = "") -> Callable[[str], None]:
        self._producers += 1
        number, log = self._producers, self._log(topic, partition)
        log.append([UnwrittenRecord(None, b"v") for _ in range(count)], number)

        def end(how: str) -> None:
            log.end_transaction(number, committed=how == "commit")

        if ends:
            end(ends)
        return end

    def offsets_in_transaction(self, topic: str, partition: int, offset: int) -> Callable[[str], None]:
        self._producers += 1
        number, offsets = self._producers, self.groups.offsets
        offsets.commit_later(self.group, number, {(topic, partition): CommittedOffset(offset)})
        return lambda how: offsets.end_transaction(self.group, number, committed=how == "commit")

    def delete_topic(self, topic: str) -> None:
        self.brokers.delete_topic(topic)

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        self._log(topic, partition).delete_before(offset)

    def committed(self) -> dict[tuple[str, int], int]:
        return {key: at.offset for key, at in self.groups.offsets.committed(self.group).items()}

    def stop_brokers(self) -> Callable[[], None]:
        for broker in self.brokers.ids:
            self.brokers.kill(broker)

        def start() -> None:
            for broker in self.brokers.ids:
                self.brokers.start(broker)

        return start

    def stop_broker(self, which: str, topic: str) -> Callable[[], None]:
        broker = self.brokers.coordinator_of(self.group) if which == "coordinator" else self._log(topic, 0).leader
        assert broker
        self.brokers.kill(broker)
        return lambda: self.brokers.start(broker)

    def _log(self, topic: str, partition: int) -> Any:
        return self.brokers.log(topic, partition)


# The real broker -----------------------------------------------------------------------------------------------------


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
        numbers = [one["id"] for one in self._cluster.endpoints]
        for number in numbers:
            self._cluster.kill(number)

        def start() -> None:
            for number in numbers:
                self._cluster.restart(number)

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
