"""Push under chance: options, load, faults and a hostile backend by a seed; then all heals, and must complete."""

import functools
import random
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from headrace_devkit.simulation.broker_transactions import IN_SYNC
from headrace_devkit.simulation.checkers import PushChecker, Rules
from headrace_devkit.simulation.loaded_run import TOPIC, LoadedRun, drawn
from headrace_devkit.simulation.simulated_backend import Arrived, BackendAction, SimulatedBackend
from headrace_devkit.simulation.simulated_process import SimulatedProcess, configuration
from headrace_devkit.simulation.weights import weighed
from headrace_devkit.simulation.world import Machine, World

GROUP = "push"

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
    "seconds": {15.0: 1, 30.0: 3, 60.0: 1},
    "work": {0.005: 3, 0.2: 2, 3.0: 1},
    "bad": {0.0: 2, 0.05: 4, 0.3: 2, 0.9: 1},
    "poison": {0.0: 2, 0.02: 2},
    "trouble": {0.0: 1, 0.03: 2, 0.15: 1},
    "faults": {0: 1, 3: 2, 8: 3, 20: 1},
    "buffer": {20_000: 4, 100: 1},
    "closes": {False: 3, True: 1},
    "write_seconds": {30: 1, 3: 1},
}
"""How often each value of an option is drawn, before the factors of `weights.yaml`."""


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
    buffer: int
    """Most records in memory."""
    closes: bool
    """Whether a record that always fails closes the connection."""
    write_seconds: int
    """After which a write of a retry or dead letter has failed."""

    @classmethod
    def drawn(cls, chance: random.Random, **fixed: Any) -> "PushOptions":
        """Draw each option by its weight, apart from those that are fixed."""
        options = cls(**(drawn(chance, weighed("push", WEIGHTS)) | fixed))
        one_record = options.mode == "single"
        keeps = options.keep_key_order and options.ordering == "key" and len(options.retry_topics) == 1
        return options._replace(batch=1 if one_record else options.batch, keep_key_order=keeps)


class PushRun(LoadedRun[PushOptions]):
    """One run of push: its cluster, backend, processes and checker."""

    faults = (*LoadedRun.faults, "broker", "away", "shrink")
    group = GROUP
    checker_type: ClassVar[type[PushChecker]] = PushChecker

    def __init__(self, world: World, options: PushOptions) -> None:
        super().__init__(world, options, options.brokers)
        retries = [f"{GROUP}.retry.{delay}s" for delay in options.retry_topics]
        self._written = [*retries, f"{TOPIC}.dlq"]
        for topic in (TOPIC, *self._written):
            self.kafka.brokers.create_topic(topic, options.partitions)
        rules = Rules(
            options.ordering,
            options.attempts,
            min(options.drain, 20.0) - 1,
            [TOPIC, *self._written],
            1,
            blocks_keys=options.keep_key_order,
            closing_fails=options.closes,
        )
        self.checker = self.checker_type(world, self.kafka.brokers, rules)
        self.backend = SimulatedBackend(world.network, "backend", self.decide)
        self.processes = [
            world.process(configuration(self.settings(number)), f"headrace-{number}")
            for number in range(1, options.processes + 1)
        ]

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
            "flow": {"max_records": options.buffer},
            "retry": {**retry, "keep_key_order": options.keep_key_order},
            "consumer": {"properties": consumer},
        }
        return {
            "kafka": {"bootstrap_servers": "broker-1:9092"},
            "http": {"port": 8080 + number},
            "reactive_consumers": {"push": push},
            "drain_seconds": options.drain,
            "producer": {
                "properties": {"delivery.timeout.ms": options.write_seconds * 1000, "request.timeout.ms": 2000}
            },
        }

    def decide(self, _process: Machine, records: Sequence[Arrived]) -> BackendAction:
        """Return what the backend does with a request."""
        chance, options = self.world.random, self.options
        work = options.work * chance.expovariate(1)
        poisoned = frozenset(index for index, one in enumerate(records) if one.value["poison"])
        if options.closes and poisoned:
            return BackendAction(0.01 if self.is_healed else work, poisoned, ends="closes")
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

    def _shrink(self, _process: SimulatedProcess, seconds: float) -> None:
        """Have too few replicas in sync to write retry and dead letters."""
        self.world.note("shrink", round(seconds, 3))
        for topic in self._written:
            configs = self.kafka.brokers.topics[topic].configs
            configs[IN_SYNC] = "0"
            self.world.call_later(seconds, functools.partial(configs.pop, IN_SYNC, None))

    def _away(self, _process: SimulatedProcess, seconds: float) -> None:
        self.world.note("away", round(seconds, 3))
        self.world.network.refused.add("backend")
        self.world.call_later(seconds, lambda: self.world.network.refused.discard("backend"))


def push(world: World) -> PushOptions:
    """Run push with the options of its seed."""
    options = PushOptions.drawn(world.random)
    world.note("options", str(options))
    run = PushRun(world, options)
    with run.kafka.installed():
        run.run()
    return options
