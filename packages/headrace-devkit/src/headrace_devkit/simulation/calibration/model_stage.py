"""The model as a stage: a world with brokers, and members as machines of it."""

import json
import sys
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError

from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.calibration.member_program import MemberProgram, name_of
from headrace_devkit.simulation.calibration.stages import SESSION_SECONDS, Stage, StageMember
from headrace_devkit.simulation.consumer_client import SimulatedConsumer
from headrace_devkit.simulation.greenlet_threads import sleep
from headrace_devkit.simulation.group_coordinator import GroupCoordinators
from headrace_devkit.simulation.offsets import CommittedOffset
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.world import World


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

    def commit_as(self, metadata: bytes, partitions: set[tuple[str, int]]) -> str:
        generation = int.from_bytes(metadata[7:11], sys.byteorder, signed=True)
        group, member_id, _instance = metadata[11:].split(b"\0", 2)
        error = self.groups.check_transaction(group.decode(), member_id.decode(), generation, None, partitions)
        return name_of(KafkaError(error) if error else None)

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
