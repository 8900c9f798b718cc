"""The scenario of active consumers: clients over HTTP, of two groups, read a topic through processes that fail.

In the end all records were received and are committed, and those of transactions have their results once.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace_devkit.simulation.active_checker import GroupChecker
from headrace_devkit.simulation.active_clients import KINDS, OUTPUT, TOPIC, ActiveClient
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.process_faults import ProcessFaults
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.simulated_process import SimulatedProcess, configuration
from headrace_devkit.simulation.world import EPOCH_SECONDS, World

_HEAL_SECONDS = 300.0


class ActiveOptions(NamedTuple):
    """What a seed decides."""

    kinds: tuple[str, str]
    """How the clients of each group commit."""
    clients: int
    """Of each group."""
    processes: int
    is_forwarding: bool
    """Whether a client reaches its instance through each process."""
    brokers: int
    partitions: int
    protocol: str
    rate: float
    seconds: float
    idle_seconds: float
    hostile: float
    """Share of the requests that a client cuts, repeats, or leaves."""
    seeks: str
    faults: int

    @classmethod
    def of(cls, chance: random.Random) -> "ActiveOptions":
        processes = chance.choice((1, 2, 2, 3))
        return cls(
            kinds=(chance.choice(KINDS), chance.choice(KINDS)),
            clients=chance.choice((1, 2, 2, 3)),
            processes=processes,
            is_forwarding=processes > 1 and chance.random() < 0.7,
            brokers=chance.choice((1, 3)),
            partitions=chance.choice((1, 2, 4)),
            protocol=chance.choice(("classic", "classic", "consumer")),
            rate=chance.choice((1.0, 5.0, 20.0)),
            seconds=chance.choice((30.0, 60.0)),
            idle_seconds=chance.choice((15.0, 30.0)),
            hostile=chance.choice((0.0, 0.1, 0.4)),
            seeks=chance.choice(("none", "none", "back", "any")),
            faults=chance.choice((0, 1, 3, 6)),
        )


class ActiveRun(ProcessFaults):
    """One run: processes, clients, faults and checks."""

    faults = tuple(kind for kind in ProcessFaults.faults if kind != "jump")  # clocks of processes that forward agree

    def __init__(self, world: World, options: ActiveOptions) -> None:
        self.world = world
        self.options = options
        self.kafka = SimulatedKafka(world, options.brokers)
        self.kafka.brokers.create_topic(TOPIC, options.partitions)
        self.kafka.brokers.create_topic(OUTPUT, 1)
        self.processes = [
            SimulatedProcess(self.kafka.network, f"headrace-{number}", configuration(self.settings(number)))
            for number in range(1, options.processes + 1)
        ]
        self.checkers = [GroupChecker(self.kafka, f"group-{kind}-{at}", TOPIC) for at, kind in enumerate(options.kinds)]
        self.clients = [
            ActiveClient(self, checker, kind, number)
            for checker, kind in zip(self.checkers, options.kinds, strict=True)
            for number in range(1, options.clients + 1)
        ]
        self.is_healed = False
        self.ends = False
        self._look_at = 0.0

    def settings(self, number: int) -> dict[str, Any]:
        """Return the file of a process."""
        urls = [f"http://localhost:{8080 + each}" for each in range(1, self.options.processes + 1)]
        cluster = {"url": urls[number - 1], "peers": urls, "secret": "s" * 32}
        return {
            "kafka": {"bootstrap_servers": "kafka:9092"},
            "http": {"port": 8080 + number},
            "active_consumers": {"idle_seconds": self.options.idle_seconds},
            "cluster": cluster if self.options.is_forwarding else {},
        }

    # What clients know -----------------------------------------------------------------------------------------------

    @property
    def idle_seconds(self) -> float:
        return self.options.idle_seconds

    @property
    def seeks(self) -> str:
        return self.options.seeks

    @property
    def hostile(self) -> float:
        return self.options.hostile

    @property
    def is_forwarding(self) -> bool:
        return self.options.is_forwarding

    def target(self, number: int) -> tuple[SimulatedProcess, int]:
        """Return the process of a client: always the same, or any if they forward."""
        count = self.options.processes
        index = self.world.random.randrange(count) if self.is_forwarding else number % count
        return self.processes[index], 8081 + index

    def creation(self) -> dict[str, Any]:
        return {"group.protocol": "consumer"} if self.options.protocol == "consumer" else {}

    # The run ---------------------------------------------------------------------------------------------------------

    def produce(self) -> None:
        """Write a record now."""
        partition = self.world.random.randrange(self.options.partitions)
        log = self.kafka.brokers.log(TOPIC, partition)
        assert log
        at = int((EPOCH_SECONDS + self.world.now) * 1000)
        log.append([UnwrittenRecord(None, b"%d" % log.end, (), at)])

    def disturb(self, seconds: float, *processes: str) -> None:
        for checker in self.checkers:
            checker.disturb(seconds, *processes)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (cause := task.exception()):
            self.world.problem("client-died", f"{type(cause).__name__}: {cause}")

    def go(self) -> None:
        """Run all of it, with its checks."""
        world, options = self.world, self.options
        with self.kafka.installed():
            for process in self.processes:
                world.call_later(world.random.uniform(0, 5), process.start)
            for at, client in enumerate(self.clients):
                self.kafka.machine(f"client-{at}").loop.start(client.live(), self._ended)
            at_seconds = 1.0
            while at_seconds < options.seconds:
                at_seconds += world.random.expovariate(options.rate)
                world.call_later(at_seconds, self.produce)
            for _ in range(options.faults):
                world.call_later(world.random.uniform(3, options.seconds), self.fault)
            world.run(options.seconds)
            self.is_healed = True
            if not world.run_until(self._is_done, _HEAL_SECONDS + options.idle_seconds):
                for checker in self.checkers:
                    missing = checker.missing()
                    if not missing and not checker.lag():
                        continue
                    text = f"{checker.group}: {len(missing)} records were not received, lag {checker.lag()}"
                    world.problem("LAG", f"{text}: {missing[:3]}")
            self.ends = True
            world.run(options.idle_seconds + 45.0)
            self._check_results()

    def _is_done(self) -> bool:
        """Whether everything is received and committed; looked at once a second."""
        if self.world.now < self._look_at:
            return False
        self._look_at = self.world.now + 1.0
        return not any(checker.lag() or checker.missing() for checker in self.checkers)

    def _check_results(self) -> None:
        """Check that each record of a group with transactions has its result once."""
        groups = self.options.kinds.count("transactions")
        log = self.kafka.brokers.log(OUTPUT, 0)
        fetched = log.fetch(0, 1_000_000, committed_only=True) if log else None
        counts = Counter(str(record.value) for record in (fetched.records if fetched else ()))
        if not groups or self.options.seeks != "none":
            return
        for partition in range(self.options.partitions):
            source = self.kafka.brokers.log(TOPIC, partition)
            for offset in range(source.end if source else 0):
                found = counts[str(b'"%d-%d"' % (partition, offset))]
                if found != groups:
                    self.world.problem("ONCE", f"{partition}-{offset} has {found} results, for {groups} groups")


def active(world: World) -> Sequence[Any]:
    """Run the scenario; return the options of its seed."""
    options = ActiveOptions.of(world.random)
    world.note("options", str(options))
    ActiveRun(world, options).go()
    return options
