"""The scenario of control: the real `CompactedTable` and `Lease` of processes that fail, on a topic that is compacted.

Each process writes entries and reads those of all others; in turns they hold a lease. In the end all tables are alike
and are what the log says, and have each entry that was acknowledged. No process holds the lease while another one does.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.errors import HeadraceError, LeaseLost
from headrace.kafka.admin import Admin
from headrace.kafka.compacted_table import JSON_OBJECTS, CompactedTable
from headrace.kafka.lease import Lease
from headrace.kafka.producer import Producer
from headrace.kafka.topic_directory import InternalTopic
from headrace.runtime import SystemClock
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.world import Machine, World

SOURCE, TABLE, LEASE = "orders", "_headrace-control", "work"
_WORK_SECONDS = 120.0
_HEALING_SECONDS = 180.0
_KEYS = 8


class ControlOptions(NamedTuple):
    """What a seed decides."""

    processes: int
    brokers: int
    kills: int
    pauses: int
    broker_kills: int
    pause_seconds: float
    """Between two entries of a process, at most."""
    held_seconds: float
    """How long a process keeps the lease, at most."""

    @classmethod
    def of(cls, chance: random.Random) -> "ControlOptions":
        return cls(
            processes=chance.choice((2, 2, 3)),
            brokers=chance.choice((1, 3)),
            kills=chance.choice((0, 1, 3)),
            pauses=chance.choice((0, 1, 3)),
            broker_kills=chance.choice((0, 1, 2)),
            pause_seconds=chance.choice((0.1, 1.0)),
            held_seconds=chance.choice((2.0, 20.0)),
        )


class ControlProcess:
    """One process: its table, and what it does with the lease; started again after a kill."""

    def __init__(self, run: "ControlRun", number: int) -> None:
        self.number = number
        self.machine: Machine
        self.table: CompactedTable[dict[str, Any]] | None = None
        self._run = run
        self._starts = 0

    def start(self) -> None:
        self._starts += 1
        self.table = None
        self.machine = self._run.kafka.machine(f"control-{self.number}.{self._starts}")
        self.machine.loop.start(self._main(), self._run.ended)

    async def _main(self) -> None:
        kafka = KafkaConfig(bootstrap_servers="kafka:9092")
        admin = Admin(kafka)
        producer = Producer(kafka, ProducerConfig(), admin=admin)
        await producer.start()
        topic = InternalTopic(TABLE, SOURCE)
        self.table = table = CompactedTable(admin, topic, JSON_OBJECTS, producer.produce, SystemClock())
        await table.start()
        await asyncio.gather(self._put(table), self._hold(kafka, admin))

    async def _put(self, table: CompactedTable[dict[str, Any]]) -> None:
        run = self._run
        while not run.ends:
            await asyncio.sleep(run.chance.uniform(0.0, run.options.pause_seconds))
            key = f"{self.number}/{run.chance.randrange(_KEYS)}"
            entry = None if run.chance.random() < 0.2 else {"number": run.next_number()}
            try:
                offset = await table.put(key, entry)
            except HeadraceError as cause:
                run.world.note("put failed", key, type(cause).__name__)
            else:
                run.acknowledged(key, entry, offset)

    async def _hold(self, kafka: KafkaConfig, admin: Admin) -> None:
        run = self._run
        while not run.ends:
            lease = Lease(kafka, admin, LEASE, SystemClock(), source=SOURCE)
            try:
                if not await lease.acquire(5.0):
                    continue
                run.world.note("holds", self.machine.name, "begins")
                end = run.world.now + run.chance.uniform(0.0, run.options.held_seconds)
                while run.world.now < end:
                    await asyncio.sleep(run.chance.uniform(0.0, 2.0))
                    await lease.check()
                    run.world.note("holds", self.machine.name, "still")
            except LeaseLost:
                run.world.note("holds", self.machine.name, "lost")
            except HeadraceError as cause:
                run.world.note("holds", self.machine.name, "failed", type(cause).__name__)
            finally:
                await lease.release()
            run.world.note("holds", self.machine.name, "ends")


class ControlRun:
    """The processes of a run, their faults, and the checks."""

    def __init__(self, world: World, options: ControlOptions, work_seconds: float = _WORK_SECONDS) -> None:
        """Prepare; there are faults for `work_seconds`."""
        self.world = world
        self._work_seconds = work_seconds
        self.options = options
        self.chance = world.random
        self.kafka = SimulatedKafka(world, options.brokers)
        self.ends = False
        self._processes = [ControlProcess(self, number) for number in range(options.processes)]
        self._numbers = 0
        self._written: dict[str, tuple[int, Any]] = {}
        """The last acknowledged entry of each key, with its offset."""
        self._holder = ""
        world.watch("holds", self._on_holds)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def acknowledged(self, key: str, entry: Any, offset: int) -> None:
        self.world.note("put", key, offset)
        if offset >= self._written.get(key, (-1, None))[0]:
            self._written[key] = offset, entry

    def ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (cause := task.exception()):
            self.world.problem("process-died", f"{type(cause).__name__}: {cause}")

    def _on_holds(self, name: str, what: str, *_: Any) -> None:
        """Check that a process that has begun to hold the lease is the only one that finds that it does."""
        if what == "begins":
            self._holder = name
        elif what == "still" and self._holder != name:
            self.world.problem("TWO", f"{name} holds the lease still, and {self._holder} has begun to")

    def start(self) -> None:
        for process in self._processes:
            self.world.call_later(self.chance.uniform(0.0, 2.0), process.start)
        options = self.options
        for count, fault in (
            (options.kills, self._kill),
            (options.pauses, self._pause),
            (options.broker_kills, self._kill_broker),
        ):
            for _ in range(count):
                self.world.call_later(self.chance.uniform(5.0, self._work_seconds), fault)
        for at in range(10, int(self._work_seconds), 10):
            self.world.call_later(at, self._compact)

    def _kill(self) -> None:
        process = self.chance.choice(self._processes)
        if process.machine.alive:
            process.machine.kill()
            self.world.call_later(self.chance.uniform(0.1, 20.0), process.start)

    def _pause(self) -> None:
        self.chance.choice(self._processes).machine.pause(self.chance.choice((1.0, 12.0, 30.0)))

    def _kill_broker(self) -> None:
        self.kafka.restart_broker(self.chance.choice(self.kafka.brokers.ids), self.chance.uniform(1.0, 15.0))

    def _compact(self) -> None:
        if log := self.kafka.brokers.log(TABLE, 0):
            log.compact()

    def go(self) -> None:
        """Run all of it, with its checks."""
        self.kafka.brokers.create_topic(SOURCE, 3)
        with self.kafka.installed():
            self.start()
            self.world.run(self._work_seconds + 20.0)
            self.end()

    def end(self) -> None:
        """Let all come to rest, and check the tables."""
        self.ends = True
        if not self.world.run_until(self._are_alike, _HEALING_SECONDS):
            self.world.problem("TABLE", "the tables are not what the log says, long after all faults")
            return
        entries = self._entries()
        for key, (offset, entry) in sorted(self._written.items()):
            at, found = entries.get(key, (-1, None))
            if at < offset and found != entry:
                self.world.problem("ENTRY", f"{key}: {entry} was acknowledged at {offset}, and the log has {found}")

    def _entries(self) -> dict[str, tuple[int, Any]]:
        """Return the entries, as the log has them."""
        log = self.kafka.brokers.log(TABLE, 0)
        found: dict[str, tuple[int, Any]] = {}
        for record in log.records if log else ():
            entry = None if record.value is None else JSON_OBJECTS.decode(record.value)
            found[(record.key or b"").decode()] = record.offset, entry
        return found

    def _are_alike(self) -> bool:
        requested = {key: entry for key, (_, entry) in self._entries().items() if entry is not None}
        return all(process.table is not None and process.table.items("") == requested for process in self._processes)


def control(world: World) -> Sequence[Any]:
    """Run the scenario; return the options of its seed."""
    options = ControlOptions.of(world.random)
    ControlRun(world, options).go()
    return options
