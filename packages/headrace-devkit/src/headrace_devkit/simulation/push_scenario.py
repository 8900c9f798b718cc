"""Push under chance: options, load, faults and a hostile backend by a seed; then all heals, and must complete."""

import json
import random
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace_devkit.simulation.checkers import ProducedRecord, PushChecker, Rules
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.simulated_backend import Arrived, BackendAction, SimulatedBackend
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.simulated_process import SimulatedProcess, configuration
from headrace_devkit.simulation.world import EPOCH_SECONDS, Machine, World

TOPIC = "orders"
GROUP = "push"
_HEAL_SECONDS = 420.0
_START_SECONDS = 60.0

WEIGHTS: dict[str, dict[Any, float]] = {
    "ordering": {"partition": 3, "key": 3, "none": 1},
    "batch": {1: 2, 5: 2, 100: 1},
    "in_flight": {1: 1, 4: 2, 64: 2},
    "attempts": {1: 1, 2: 2, 5: 2},
    "max_delay": {0.2: 2, 2.0: 2, 30.0: 2},
    "drain": {2.0: 1, 10.0: 1, 30.0: 2},
    "mode": {"results": 3, "status": 1, "single": 1},
    "retry_topics": {(): 3, (2,): 1, (1, 10): 1},
    "keep_key_order": {False: 1, True: 1},
    "protocol": {"classic": 2, "consumer": 1},
    "partitions": {1: 1, 3: 3, 8: 1},
    "processes": {1: 1, 2: 4, 3: 2},
    "brokers": {1: 1, 3: 2},
    "keys": {1: 1, 5: 3, 100: 1},
    "rate": {1.0: 2, 5.0: 3, 40.0: 1},
    "seconds": {30.0: 2, 60.0: 2},
    "work": {0.005: 3, 0.2: 2, 3.0: 1},
    "bad": {0.0: 1, 0.05: 2, 0.3: 1},
    "poison": {0.0: 2, 0.02: 2},
    "trouble": {0.0: 1, 0.03: 2, 0.15: 1},
    "faults": {0: 1, 3: 3, 8: 2},
}
"""How often each value of an option is drawn: so that each failpoint is reached in a few seeds."""


class PushOptions(NamedTuple):
    """What a seed decides of a run."""

    ordering: str
    batch: int
    in_flight: int
    attempts: int
    max_delay: float
    drain: float
    mode: str
    retry_topics: tuple[int, ...]
    keep_key_order: bool
    protocol: str
    partitions: int
    processes: int
    brokers: int
    keys: int
    rate: float
    seconds: float
    work: float
    bad: float
    """Share of the deliveries of a record that fail."""
    poison: float
    """Share of the records that always fail."""
    trouble: float
    """Share of the requests with a 503, a close or a hang."""
    faults: int

    @classmethod
    def drawn(cls, chance: random.Random, **fixed: Any) -> "PushOptions":
        """Draw each option by its weight, apart from those that are fixed."""
        found = {name: chance.choices([*values], [*values.values()])[0] for name, values in WEIGHTS.items()}
        options = cls(**(found | fixed))
        one_record = options.mode == "single"
        keeps = options.keep_key_order and options.ordering == "key" and len(options.retry_topics) == 1
        return options._replace(batch=1 if one_record else options.batch, keep_key_order=keeps)


class PushRun:
    """One run of push: its cluster, backend, processes and checker."""

    def __init__(self, world: World, options: PushOptions) -> None:
        self.world = world
        self.options = options
        self.kafka = SimulatedKafka(world, options.brokers)
        retries = [f"{GROUP}.retry.{delay}s" for delay in options.retry_topics]
        for topic in (TOPIC, f"{TOPIC}.dlq", *retries):
            self.kafka.brokers.create_topic(topic, options.partitions)
        rules = Rules(
            options.ordering,
            options.attempts,
            min(options.drain, 20.0) - 1,
            [TOPIC, *retries, f"{TOPIC}.dlq"],
            1,
            blocks_keys=options.keep_key_order,
        )
        self.checker = PushChecker(world, self.kafka.brokers, rules)
        self.backend = SimulatedBackend(world.network, "backend", self.decide)
        self.processes = [
            world.process(configuration(self.settings(number)), f"headrace-{number}")
            for number in range(1, options.processes + 1)
        ]
        self.is_healed = False
        self._produced = 0
        self._poisoned = 0
        self._look_at = 0.0

    def settings(self, number: int) -> dict[str, Any]:
        """Return the file of a process."""
        options = self.options
        consumer = {"group.protocol": options.protocol} if options.protocol == "consumer" else {}
        retry = {"attempts": options.attempts, "max_delay_seconds": options.max_delay, "topics": options.retry_topics}
        push = {
            "topics": [TOPIC],
            "group": GROUP,
            "backend": {"url": self.backend.url, "mode": options.mode, "timeout_seconds": 15},
            "ordering": options.ordering,
            "max_in_flight": options.in_flight,
            "batch": {"max_records": options.batch},
            "retry": {**retry, "keep_key_order": options.keep_key_order},
            "consumer": {"properties": consumer},
        }
        return {
            "kafka": {"bootstrap_servers": "broker-1:9092"},
            "http": {"port": 8080 + number},
            "reactive_consumers": {"push": push},
            "drain_seconds": options.drain,
        }

    # Load

    def produce(self) -> None:
        """Write a record now, and the next one by chance later."""
        chance, options = self.world.random, self.options
        self._produced += 1
        key = b"k%d" % chance.randrange(options.keys)
        partition = (
            zlib.crc32(key) % options.partitions if options.ordering == "key" else chance.randrange(options.partitions)
        )
        poison = chance.random() < options.poison
        self._poisoned += poison
        value = json.dumps({"id": self._produced, "poison": poison}).encode()
        log = self.kafka.brokers.log(TOPIC, partition)
        assert log
        at = int((EPOCH_SECONDS + self.world.now) * 1000)
        offset = log.append([UnwrittenRecord(key, value, (), at)])
        self.checker.produced(ProducedRecord(value, TOPIC, partition, offset, key))

    def decide(self, _process: Machine, records: Sequence[Arrived]) -> BackendAction:
        """Return what the backend does with a request."""
        chance, options = self.world.random, self.options
        work = options.work * chance.expovariate(1)
        poisoned = frozenset(index for index, one in enumerate(records) if one.value["poison"])
        if self.is_healed:
            return self._response(0.01, poisoned)
        if chance.random() < options.trouble:
            status, ends = chance.choice([(503, "responds"), (200, "closes"), (200, "hangs"), (502, "responds")])
            return BackendAction(work, status=status, ends=ends)
        bad = {index for index in range(len(records)) if chance.random() < options.bad}
        return self._response(work, poisoned | bad)

    def _response(self, seconds: float, failed: frozenset[int]) -> BackendAction:
        if self.options.mode == "results":
            return BackendAction(seconds, failed)
        return BackendAction(seconds, status=500 if failed else 200)

    # Faults

    def fault(self) -> None:
        """Break something, by chance; what was broken is whole again after a while."""
        chance = self.world.random
        process = chance.choice(self.processes)
        seconds = chance.choice([0.5, 4.0, 12.0, 40.0])
        kinds = ["kill", "kill", "pause", "cut", "cut", "jump", "stop", "stop", "broker", "away"]
        getattr(self, f"_{chance.choice(kinds)}")(process, seconds)

    def _kill(self, process: SimulatedProcess, seconds: float) -> None:
        if process.running:
            process.kill()
            self.world.call_later(seconds, lambda: self._start(process))

    def _stop(self, process: SimulatedProcess, seconds: float) -> None:
        process.stop()
        self.world.call_later(seconds, lambda: self._start(process))

    def _start(self, process: SimulatedProcess) -> None:
        if not process.running:
            process.start()
        elif process.stopping:  # it still drains
            self.world.call_later(1.0, lambda: self._start(process))

    def _pause(self, process: SimulatedProcess, seconds: float) -> None:
        if process.running:
            process.pause(seconds)

    def _cut(self, process: SimulatedProcess, seconds: float) -> None:
        if process.running:
            incoming = self.world.random.random() < 0.7
            process.cut(seconds, incoming=incoming, outgoing=not incoming or self.world.random.random() < 0.7)

    def _jump(self, process: SimulatedProcess, seconds: float) -> None:
        if process.running:
            process.jump(self.world.random.choice([-3600, -10, 10, 3600]))

    def _broker(self, _process: SimulatedProcess, seconds: float) -> None:
        brokers = self.kafka.brokers
        broker = self.world.random.choice(brokers.ids)
        if brokers.is_up(broker):
            self.world.note("broker", broker, round(seconds, 3))
            self.checker.disturb(seconds, *(one.machine.name for one in self.processes if one.running))
            (brokers.stop if self.world.random.random() < 0.5 else brokers.kill)(broker)
            self.world.call_later(seconds, lambda: brokers.start(broker))

    def _away(self, _process: SimulatedProcess, seconds: float) -> None:
        self.world.note("away", round(seconds, 3))
        self.world.network.refused.add("backend")
        self.world.call_later(seconds, lambda: self.world.network.refused.discard("backend"))

    # The run

    def run(self) -> None:
        """Start, load with faults, heal, and wait until everything is completed and committed."""
        world, options = self.world, self.options
        for process in self.processes:
            world.call_later(world.random.uniform(0, 5), process.start)
        at = 1.0
        while at < options.seconds:
            at += world.random.expovariate(options.rate)
            world.call_later(at, self.produce)
        for _ in range(options.faults):
            world.call_later(world.random.uniform(3, options.seconds), self.fault)
        world.run(options.seconds)
        self.is_healed = True
        longest = max(options.max_delay, *options.retry_topics, 1.0)
        waits = self._poisoned * options.attempts * longest  # at worst they share a key, and wait one after the other
        if not world.run_until(self.is_done, _HEAL_SECONDS + waits):
            left = self.checker.open_records()
            text = f"{len(left)} of {self._produced} records are not completed, lag {self.lag()}: {left[:3]}"
            world.problem("LAG", text)
        for process in self.processes:
            process.stop()
        world.run(options.drain + 10)

    def lag(self) -> int:
        return self.checker.lag({p: at.offset for p, at in self.kafka.groups.offsets.committed(GROUP).items()})

    def is_done(self) -> bool:
        """Whether everything is completed, and its offsets are committed; looked at once a second."""
        if self.world.now < self._look_at:
            return False
        self._look_at = self.world.now + 1.0
        return self.lag() == 0 and not self.checker.open_records()


def push(world: World) -> PushOptions:
    """Run push with the options of its seed."""
    options = PushOptions.drawn(world.random)
    world.note("options", str(options))
    run = PushRun(world, options)
    with run.kafka.installed():
        run.run()
    return options
