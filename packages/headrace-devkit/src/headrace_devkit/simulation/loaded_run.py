"""What runs of processes that consume topics have in common: load, faults, healing, and the wait for the end of all.

A scenario is a subclass that makes the processes and the checker, and decides what happens to a delivered record.
"""

import functools
import json
import random
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from headrace_devkit.simulation.checkers import ProducedRecord, PushChecker
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.process_faults import ProcessFaults
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.world import EPOCH_SECONDS, World

TOPIC = "orders"
_HEAL_SECONDS = 420.0


def drawn(chance: random.Random, weights: Mapping[str, Mapping[Any, float]]) -> dict[str, Any]:
    """Draw each option by its weight."""
    return {name: chance.choices([*values], [*values.values()])[0] for name, values in weights.items()}


class LoadOptions(Protocol):
    """What a seed decides of every such run."""

    @property
    def ordering(self) -> str: ...
    @property
    def attempts(self) -> int: ...
    @property
    def max_delay(self) -> float: ...
    @property
    def drain(self) -> float: ...
    @property
    def retry_topics(self) -> tuple[int, ...]: ...
    @property
    def partitions(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def poison(self) -> float:
        """Share of the records that always fail."""

    @property
    def faults(self) -> int: ...


Options = TypeVar("Options", bound=LoadOptions)


class LoadedRun(ProcessFaults, Generic[Options]):
    """One run: its cluster, its processes of one group, and their checker."""

    group: ClassVar[str]
    checker: PushChecker

    def __init__(self, world: World, options: Options, brokers: int) -> None:
        self.world = world
        self.options = options
        self.kafka = SimulatedKafka(world, brokers)
        self.is_healed = False
        self.produced = 0
        self._poisoned = 0
        self._look_at = 0.0

    # Load

    def produce(self) -> None:
        """Write a record now."""
        chance, options = self.world.random, self.options
        self.produced += 1
        key = b"k%d" % chance.randrange(options.keys)
        partition = (
            zlib.crc32(key) % options.partitions if options.ordering == "key" else chance.randrange(options.partitions)
        )
        poison = chance.random() < options.poison
        self._poisoned += poison
        self.write(partition, key, json.dumps({"id": self.produced, "poison": poison}).encode())

    def write(self, partition: int, key: bytes, value: bytes) -> None:
        """Write a record, and have its delivery checked."""
        log = self.kafka.brokers.log(TOPIC, partition)
        assert log
        at = int((EPOCH_SECONDS + self.world.now) * 1000)
        offset = log.append([UnwrittenRecord(key, value, (), at)])
        self.checker.produced(ProducedRecord(value, TOPIC, partition, offset, key))

    def disturb(self, seconds: float, *processes: str) -> None:
        self.checker.disturb(seconds, *processes)

    # The run

    def run(self) -> None:
        """Start, load with faults, heal, and wait until everything is completed and committed."""
        world, options = self.world, self.options
        for process in self.processes:
            world.call_later(world.random.uniform(0, 5), functools.partial(self._start, process))
        at = 1.0 + world.random.expovariate(options.rate)
        while at < options.seconds:
            world.call_later(at, self.produce)
            at += world.random.expovariate(options.rate)
        for _ in range(options.faults):
            world.call_later(world.random.uniform(3, options.seconds), self.fault)
        world.run(options.seconds)
        self.heal()
        longest = max(options.max_delay, *options.retry_topics, 1.0)
        waits = self._poisoned * options.attempts * longest  # at worst they share a key, and wait one after the other
        if not world.run_until(self.is_done, _HEAL_SECONDS + waits):
            left = self.checker.open_records()
            text = f"{len(left)} of {self.produced} records are not completed, lag {self.lag()}: {left[:3]}"
            world.problem("LAG", text)
        for process in self.processes:
            process.stop()
        world.run(options.drain + 10)

    @abstractmethod
    def settings(self, number: int) -> dict[str, Any]:
        """Return the file of a process."""

    def heal(self) -> None:
        """Let everything succeed from now on, apart from poisoned records."""
        self.is_healed = True

    def lag(self) -> int:
        """Return how many records are not committed."""
        committed = self.kafka.groups.offsets.committed(self.group)
        return self.checker.lag({p: at.offset for p, at in committed.items()})

    def is_done(self) -> bool:
        """Whether everything is completed, and its offsets are committed; looked at once a second."""
        if self.world.now < self._look_at:
            return False
        self._look_at = self.world.now + 1.0
        return self.is_complete()

    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.lag() == 0 and not self.checker.open_records()
