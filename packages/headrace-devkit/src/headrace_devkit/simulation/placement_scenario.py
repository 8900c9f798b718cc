"""The scenario of placement: whole processes with `placement`, which come, go, are killed, paused and cut off.

Each consumer has a topic of its own. Some processes read the control table late. A process that has chosen is paused
before it writes its choice, so that another one chooses, too. When all has healed, each consumer runs in as many
processes as the file says, and nothing is lost.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from headrace.commands import instance_owners
from headrace.commands.command_parts import CommandParts
from headrace.commands.placement import placements
from headrace.commands.placement.consumer_groups import ConsumerGroups
from headrace.commands.placement.placements import Placements
from headrace.records import OutgoingRecord
from headrace.runtime.feature_parts import NeededParts
from headrace_devkit.simulation.checkers import ProducedRecord, PushChecker, Rules
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.simulated_backend import Arrived, BackendAction, SimulatedBackend
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.simulated_process import SimulatedProcess, configuration
from headrace_devkit.simulation.world import EPOCH_SECONDS, Machine, World

CONTROL = "_headrace-control"
_AWAY_SECONDS = 30.0
"""How long a process that is away keeps its consumers, in place of five minutes."""
_ALL_AWAY_SECONDS = 24.0
"""In place of one minute: after this time a consumer whose processes are all away gets others."""
_LONG_SECONDS = 60.0
"""So long a process is away that others get its consumers."""
_LEASES_SECONDS = 5.0
"""In place of half a minute: how often the leases of the others are looked at."""
_MOVE_SECONDS = 60.0
"""After that: leases are looked at, the next holder of the lease chooses, and sessions in the groups end."""
_HEALING_SECONDS = 420.0
_LOOK_SECONDS = 1.0
_CALM_SECONDS = 35.0
"""Nothing moves for this long: a session ends, another process gets the lease, and chooses."""
_DRAIN_SECONDS = 10.0
_PARTITIONS = 2
_THREADS = 6


class PlacementOptions(NamedTuple):
    """What a seed decides."""

    processes: int
    late: int
    """Processes more than these that come later."""
    zones: int
    copies: int
    consumers: int
    brokers: int
    faults: int
    seconds: float
    rate: float

    @classmethod
    def of(cls, chance: random.Random) -> "PlacementOptions":
        return cls(
            processes=chance.choice((2, 3, 3, 4)),
            late=chance.choice((0, 1, 1)),
            zones=chance.choice((1, 2, 3)),
            copies=chance.choice((1, 2, 2)),
            consumers=chance.choice((1, 3, 5, 8)),
            brokers=chance.choice((1, 3)),
            faults=chance.choice((1, 3, 5, 8)),
            seconds=chance.choice((50.0, 90.0)),
            rate=chance.choice((0.5, 3.0)),
        )


class PlacedHost:
    """A process of the scenario, and what it runs."""

    def __init__(self, run: "PlacementRun", name: str, zone: str) -> None:
        self.name = name
        self.zone = zone
        self.leaves = False
        """Whether it has gone for good."""
        self.process: SimulatedProcess = run.world.process(configuration(run.settings(name, zone)), name)
        self._run = run
        self._patched: Any = None
        self._disturbed_until = 0.0

    @property
    def parts(self) -> CommandParts | None:
        """The parts of its present start; None before they are made, and while it does not run."""
        app = self.process.app if self.process.running else None
        return NeededParts(app.process.parts).of(CommandParts) if app else None

    @property
    def placements(self) -> Placements | None:
        parts = self.parts
        return parts.placements if parts else None

    @property
    def is_calm(self) -> bool:
        """Whether it runs, and nothing has kept it from working for some time."""
        return self.process.ready and self.process.running and self._run.world.now >= self._disturbed_until

    def disturb(self, seconds: float) -> None:
        self._disturbed_until = max(self._disturbed_until, self._run.world.now + seconds)

    def running(self, *, ready: bool = False) -> set[str]:
        """Return the consumers that it runs; if `ready`, those that have all that they need."""
        app = self.process.app if self.process.running else None
        services = app.process.supervisor.services if app else ()
        groups = [one for one in services if isinstance(one, ConsumerGroups)]
        return {name for one in groups for name in one.running if not ready or one.readiness_of(name).ready}

    def start(self) -> None:
        if self.process.running and self.process.stopping:  # it still drains
            self._run.world.call_later(1.0, self.start)
        elif not self.process.running and not self.leaves:
            self._patched = None
            self.process.start()

    def look(self) -> None:
        """Let this start pause at its next choice, when the scenario requires it."""
        parts = self.parts
        if not parts or self._patched is parts:
            return
        self._patched, machine, produce = parts, self.process.machine, parts.table._produce

        async def paused_before(records: Sequence[OutgoingRecord]) -> Any:
            if any((one.key or b"").startswith(b"placement/") for one in records):
                self._run.chooses(self, machine)
            return await produce(records)

        parts.table._produce = paused_before

    def read_late(self, seconds: float) -> None:
        """Keep what is read of the control table from this process for a while."""
        parts = self.parts
        if not parts or "read" in vars(parts.table):
            return
        table, held = parts.table, []
        table.read = lambda records, position: held.append((records, position))  # type: ignore[method-assign]

        def catch_up() -> None:
            del table.read
            for records, position in held:
                table.read(records, position)

        machine = self.process.machine
        self._run.world.call_later(seconds, lambda: machine.loop.call_soon_threadsafe(catch_up), machine)


class PlacementRun:
    """The processes, their backend, the faults, and the checks."""

    def __init__(self, world: World, options: PlacementOptions, folder: Path) -> None:
        self.world = world
        self.options = options
        self.kafka = SimulatedKafka(world, options.brokers)
        self.names = [f"c{number}" for number in range(options.consumers)]
        for name in self.names:
            self.kafka.brokers.create_topic(name, _PARTITIONS)
        rules = Rules("partition", 1, _DRAIN_SECONDS - 1, [*self.names, "placement.dlq"], len(self.names))
        self.checker = PushChecker(world, self.kafka.brokers, rules)
        self._folder = folder
        self._backend = SimulatedBackend(world.network, "backend", self._decide)
        count = options.processes + options.late
        self.hosts = [PlacedHost(self, f"p{number}", f"z{number % options.zones}") for number in range(count)]
        # Faults
        self._pauses_next = 0.0
        """How long the next process that writes a choice is paused before it does; 0 for not."""
        self._broken_until = 0.0
        # What was seen
        self._nowhere: dict[str, float] = {}
        """Consumers that no process runs although enough could, and since when."""
        self._ends = False

    def settings(self, name: str, zone: str) -> dict[str, Any]:
        """Return the file of a process."""
        consumers = {
            each: {
                "topics": [each],
                "group": each,
                "backend": {"url": self._backend.url, "mode": "results", "timeout_seconds": 15},
                "ordering": "partition",
                "retry": {"attempts": 5, "max_delay_seconds": 1.0},
                "dead_letter": {"topic": "placement.dlq"},
            }
            for each in self.names
        }
        return {
            "kafka": {"bootstrap_servers": "broker-1:9092"},
            "http": {"port": 8080},
            "placement": {"copies": self.options.copies, "process": name, "zone": zone},
            "reactive_consumers": consumers,
            "state_dir": str(self._folder / name),
            "drain_seconds": _DRAIN_SECONDS,
        }

    def _decide(self, _process: Machine, records: Sequence[Arrived]) -> BackendAction:
        return BackendAction(self.world.random.choice((0.005, 0.005, 0.5)))

    def _produce(self) -> None:
        """Write a record now, and the next one by chance later."""
        if self._ends:
            return
        chance = self.world.random
        topic, partition = chance.choice(self.names), chance.randrange(_PARTITIONS)
        value = b"%d" % len(self.checker.records)
        log = self.kafka.brokers.log(topic, partition)
        assert log
        offset = log.append([UnwrittenRecord(b"k", value, (), int((EPOCH_SECONDS + self.world.now) * 1000))])
        self.checker.produced(ProducedRecord(value, topic, partition, offset, b"k"))
        self.world.call_later(chance.expovariate(self.options.rate), self._produce)

    # Faults ----------------------------------------------------------------------------------------------------------

    def chooses(self, host: PlacedHost, machine: Machine) -> None:
        """A process is about to write its choice: pause it there, if that is required."""
        self.world.note("chooses", host.name)
        if self._pauses_next:
            seconds, self._pauses_next = self._pauses_next, 0.0
            self._pause(host, seconds, machine)

    def fault(self) -> None:
        """Break something, by chance; what was broken is whole again after a while."""
        chance = self.world.random
        kinds = ["kill", "kill", "stop", "pause", "cut", "zone", "jump"]
        kinds += ["behind", "writer", "writer", "broker", "leave"]
        host, seconds = chance.choice(self.hosts), chance.choice((1.0, 8.0, _LONG_SECONDS, _LONG_SECONDS))
        kind = chance.choice(kinds)
        self.world.note("fault", kind, host.name, seconds)
        getattr(self, f"_{kind}")(host, seconds)

    def _kill(self, host: PlacedHost, seconds: float) -> None:
        if host.process.running:
            host.process.kill()
            self.world.call_later(seconds, host.start)

    def _stop(self, host: PlacedHost, seconds: float) -> None:
        host.process.stop()
        self.world.call_later(seconds, host.start)

    def _leave(self, host: PlacedHost, _seconds: float) -> None:
        """Kill a process that does not come back, if enough others stay."""
        if sum(not one.leaves for one in self.hosts) > self.options.copies:
            host.leaves = True
            if host.process.running:
                host.process.kill()

    def _pause(self, host: PlacedHost, seconds: float, machine: Machine | None = None) -> None:
        if host.process.running:
            host.disturb(seconds)
            (machine or host.process.machine).pause(seconds)

    def _cut(self, host: PlacedHost, seconds: float) -> None:
        if host.process.running:
            host.disturb(seconds)
            incoming = self.world.random.random() < 0.7
            host.process.cut(seconds, incoming=incoming, outgoing=not incoming or self.world.random.random() < 0.7)

    def _zone(self, host: PlacedHost, seconds: float) -> None:
        """Split off the zone of a process."""
        for one in self.hosts:
            if one.zone == host.zone and one.process.running:
                one.disturb(seconds)
                one.process.cut(seconds)

    def _jump(self, host: PlacedHost, _seconds: float) -> None:
        if host.process.running:
            host.process.jump(self.world.random.choice([-3600, -10, 10, 3600]))

    def _behind(self, host: PlacedHost, seconds: float) -> None:
        host.disturb(seconds)
        host.read_late(seconds)

    def _writer(self, host: PlacedHost, seconds: float) -> None:
        """Pause the next process that writes a choice, and have one: a process is killed for long."""
        self._pauses_next = max(seconds, 12.0)
        self._kill(host, _LONG_SECONDS)

    def _broker(self, _host: PlacedHost, seconds: float) -> None:
        seconds = min(seconds, 25.0)
        self._broken_until = max(self._broken_until, self.world.now + seconds)
        self.checker.disturb(seconds, *(one.process.machine.name for one in self.hosts if one.process.running))
        self.kafka.restart_broker(self.world.random.choice(self.kafka.brokers.ids), seconds)

    # The run ---------------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Run all of it, with its checks."""
        world, options = self.world, self.options
        for number, host in enumerate(self.hosts):
            at = world.random.uniform(0, 5) if number < options.processes else world.random.uniform(20, options.seconds)
            world.call_later(at, host.start)
        world.call_later(5.0, self._produce)
        for _ in range(options.faults):
            world.call_later(world.random.uniform(25, options.seconds), self.fault)
        self._look()
        world.run(options.seconds)
        self._pauses_next = 0.0
        for host in self.hosts:
            world.call_later(_LONG_SECONDS, host.start)  # those that an earlier fault has not started yet
        self._settle("after the faults")
        self._check_bounds()
        if not world.problems:
            world.random.choice((self._restart_one, self._cut_the_table))()
        self._ends = True
        if not world.run_until(self._is_done, _HEALING_SECONDS):
            left = self.checker.open_records()
            world.problem("LAG", f"{len(left)} of {len(self.checker.records)} records are not completed: {left[:3]}")
        for host in self.hosts:
            host.process.stop()
        world.run(_DRAIN_SECONDS + 5.0)

    def _settle(self, when: str) -> None:
        """Wait until each consumer runs in as many processes as it has copies, and where the table says; then longer.

        A process that has just come gets its share later. After that nothing moves.
        """
        world, last, since = self.world, self._chosen(), self.world.now
        end = since + _HEALING_SECONDS
        while world.now < end:
            world.run(_LOOK_SECONDS)
            chosen = self._chosen()
            if chosen != last or not self._is_settled():
                last, since = chosen, world.now
            elif world.now - since >= _CALM_SECONDS:
                return
        text = {host.name: sorted(host.running()) for host in self.hosts}
        world.problem("COPIES", f"{when}: not {self.options.copies} of each, or not calm: {text}, {last}")

    def _look(self) -> None:
        """Look at all processes, once a second: no consumer is nowhere for long while processes could run it."""
        world = self.world
        for host in self.hosts:
            host.look()
        calm = [host for host in self.hosts if host.is_calm]
        runs = {name for host in calm for name in host.running()}
        enough = len(calm) >= self.options.copies and world.now >= self._broken_until
        self._nowhere = {name: self._nowhere.get(name, world.now) for name in self.names if enough and name not in runs}
        for name, since in self._nowhere.items():
            if world.now - since > _AWAY_SECONDS + _MOVE_SECONDS:
                text = f"{name} runs nowhere since {since:.0f}, and {[host.name for host in calm]} are up"
                world.problem("NOWHERE", text)
                return
        world.call_later(_LOOK_SECONDS, self._look)

    # Checks ----------------------------------------------------------------------------------------------------------

    def _present(self) -> list[PlacedHost]:
        return [host for host in self.hosts if not host.leaves]

    def _chosen(self) -> dict[str, set[str]]:
        """Return the processes of each consumer, as the table has them in the first process that has read it."""
        hosts = [host for host in self._present() if (one := host.placements) and one.table.is_loaded.is_set()]
        chosen = hosts[0].placements._in_table() if hosts and hosts[0].placements else {}
        return {name: {*chosen.get(name, ())} for name in self.names}

    def _is_settled(self) -> bool:
        present = self._present()
        if not all(host.process.running and host.process.ready and not host.process.machine.paused for host in present):
            return False
        count, chosen = min(self.options.copies, len(present)), self._chosen()
        return all(
            {host.name for host in present if name in host.running()} == chosen[name]
            and {host.name for host in present if name in host.running(ready=True)} == chosen[name]
            and len(chosen[name]) == count
            for name in self.names
        )

    def _check_bounds(self) -> None:
        """No process has many more than the mean; two of a consumer share a zone only if no other has capacity."""
        chosen, present = self._chosen(), self._present()
        threads = Counter({host.name: 0 for host in present})
        for names in chosen.values():
            threads.update(dict.fromkeys(names, _THREADS))
        mean = sum(threads.values()) / len(present)
        most = max(1.35 * mean, mean + 2 * _THREADS)
        if max(threads.values()) > most + _THREADS:  # where all are full, one more is better than a copy less
            self.world.problem("BOUND", f"{threads}: more than {most:g} threads")
        for name, own in chosen.items():
            zones = Counter(host.zone for host in present if host.name in own)
            others = [host.name for host in present if host.zone not in zones and threads[host.name] + _THREADS <= most]
            if others and max(zones.values(), default=0) > 1:
                self.world.problem("ZONES", f"{name} is in {own}, and {others} of other zones have capacity")

    def _restart_one(self) -> None:
        """A process that is away for less than its time keeps its consumers, and no other one gets any."""
        world, host = self.world, self.world.random.choice(self._present())
        before, choices = self._chosen(), world.counts["chooses"]
        world.note("restart", host.name)
        (host.process.kill if world.random.random() < 0.5 else host.process.stop)()
        world.call_later(0.45 * _AWAY_SECONDS, host.start)
        world.run(_AWAY_SECONDS / 2)
        self._settle("after a restart")
        if world.counts["chooses"] != choices:
            world.problem("RESTART", f"{host.name} was away for a moment: {before} became {self._chosen()}")

    def _cut_the_table(self) -> None:
        """Without the control table, all run what they ran last, also one that starts anew; so afterwards."""
        world, log, present = self.world, self.kafka.brokers.log(CONTROL, 0), self._present()
        assert log
        before, choices = {host.name: host.running() for host in present}, world.counts["chooses"]
        leader, log.leader = log.leader, None
        world.note("table", "cut")
        host = world.random.choice(present)
        host.process.kill()
        world.call_later(5.0, host.start)
        for _ in range(4):  # longer than a process may be away
            world.run(_AWAY_SECONDS / 2)
            now = {one.name: one.running() for one in present}
            if now != before:
                world.problem("FAIL-OPEN", f"without the table {before} became {now}; {host.name} had been killed")
                break
        log.leader = leader
        world.note("table", "back")
        self._settle("when the table is back")
        if world.counts["chooses"] != choices:
            world.problem("FAIL-OPEN", f"{host.name} started without the table, and others chose: {self._chosen()}")

    def _is_done(self) -> bool:
        committed = {key: at.offset for name in self.names for key, at in self._committed(name).items()}
        return self.checker.lag(committed) == 0 and not self.checker.open_records()

    def _committed(self, name: str) -> Any:
        return self.kafka.groups.offsets.committed(name)


def placement(world: World) -> PlacementOptions:
    """Run the scenario; return the options of its seed."""
    options = PlacementOptions.of(world.random)
    world.note("options", str(options))
    shorter = mock.patch.multiple(placements, _AWAY_SECONDS=_AWAY_SECONDS, _ALL_AWAY_SECONDS=_ALL_AWAY_SECONDS)
    sooner = mock.patch.object(instance_owners, "_LOOK_SECONDS", _LEASES_SECONDS)
    with tempfile.TemporaryDirectory() as folder, shorter, sooner:
        run = PlacementRun(world, options, Path(folder))
        with run.kafka.installed():
            run.go()
    return options
