"""The scenario of transactions: the real `GroupTransactions` of processes that fail, while requests arrive late.

Each transaction writes its number to two topics and commits it as the group's offset. In the end both topics show the
same numbers: all that were reported as written, and none that was reported as not written. The group's offset is the
last of them. Without `TransactionGuard` a late request breaks this, because transactions of librdkafka's producer
share one epoch. Source: KIP-890.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.errors import KafkaTimeout
from headrace.kafka.admin import Admin
from headrace.kafka.transactions.producers import GroupTransactions
from headrace.kafka.transactions.transaction_job import GroupOffsets
from headrace.records import Committed, OutgoingRecord, Produced, TopicPartition
from headrace_devkit.simulation.coordinator_requests import GroupMemberId
from headrace_devkit.simulation.partition_log import PartitionLog
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.world import Machine, World

GROUP = "g"
TOPICS = ("a", "b")
_WORK_SECONDS = 60.0
_HEALING_SECONDS = 120.0
_LATE = ("Produce", "TxnOffsetCommit", "EndTxn")
_MEMBER = GroupMemberId(GROUP, "", -1, None).metadata
Outcome = Literal["open", "written", "not written", "unknown"]


class TransactionOptions(NamedTuple):
    """What a seed decides."""

    brokers: int
    late_every_seconds: float
    """About how often a request is delayed; 0 for never."""
    kills: int
    broker_kills: int
    pause_seconds: float
    """Between two transactions, at most."""

    @classmethod
    def of(cls, chance: random.Random) -> "TransactionOptions":
        return cls(
            brokers=chance.choice((1, 3)),
            late_every_seconds=chance.choice((0.5, 2.0, 2.0, 8.0)),
            kills=chance.choice((0, 0, 1, 3)),
            broker_kills=chance.choice((0, 0, 1, 2)),
            pause_seconds=chance.choice((0.0, 0.02, 0.3)),
        )


class TransactionRun:
    """One process after the other that writes transactions, the faults, and the checks."""

    def __init__(self, world: World, options: TransactionOptions, work_seconds: float = _WORK_SECONDS) -> None:
        """Prepare; there are faults for `work_seconds`."""
        self._world = world
        self._options = options
        self._work_seconds = work_seconds
        self.kafka = SimulatedKafka(world, options.brokers)
        self.outcomes: dict[int, Outcome] = {}
        self._machine: Machine
        self._starts = 0
        self._ends = False

    # The process -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the next process, which takes over the name of the one before."""
        self._starts += 1
        self._machine = self.kafka.machine(f"writer-{self._starts}")
        self._machine.loop.start(self._write(), self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (cause := task.exception()):
            self._world.problem("process-died", f"{type(cause).__name__}: {cause}")

    async def _write(self) -> None:
        kafka = KafkaConfig(bootstrap_servers="kafka:9092")
        service = GroupTransactions(Admin(kafka), ProducerConfig(), "writer", "test")
        await service.start()
        while not self._ends:
            number = len(self.outcomes) + 1
            self.outcomes[number] = "open"
            self.outcomes[number] = outcome = await self._write_one(service, number)
            self._world.note("transaction", number, outcome)
            await asyncio.sleep(self._world.random.uniform(0.0, self._options.pause_seconds))
        await service.stop()

    async def _write_one(self, service: GroupTransactions, number: int) -> Outcome:
        value = b"%d" % number
        records = [OutgoingRecord(topic, None, value, None, 0) for topic in TOPICS]
        offsets = {TopicPartition(TOPICS[0], 0): Committed(number)}
        try:
            results = await service.submit(records, group=GroupOffsets(offsets, lambda: _MEMBER, group=GROUP))
        except KafkaTimeout:
            return "unknown"
        except Exception as cause:  # noqa: BLE001 boundary: nothing was sent
            self._world.note("refused", number, type(cause).__name__)
            return "not written"
        if all(type(result) is Produced for result in results):
            return "written"
        return "unknown" if any(isinstance(result, KafkaTimeout) for result in results) else "not written"

    # Faults ----------------------------------------------------------------------------------------------------------

    def break_things(self) -> None:
        """Plan the faults of the run."""
        chance, options = self._world.random, self._options
        for _ in range(options.kills):
            self._world.call_later(chance.uniform(0.0, self._work_seconds), self._restart)
        for _ in range(options.broker_kills):
            self._world.call_later(chance.uniform(0.0, self._work_seconds), self._kill_broker)
        if options.late_every_seconds:
            self._hold_one()

    def _restart(self) -> None:
        if self._machine.alive:
            self._machine.kill()
            self._world.call_later(self._world.random.uniform(0.1, 3.0), self.start)

    def _kill_broker(self) -> None:
        chance = self._world.random
        self.kafka.restart_broker(chance.choice(self.kafka.brokers.ids), chance.uniform(1.0, 15.0))

    def _hold_one(self) -> None:
        """Hold back the next request of a kind, and have it arrive during one of the next transactions."""
        if self._world.now > self._work_seconds:
            return
        chance, late = self._world.random, self.kafka.transactions.late
        kind = chance.choice(_LATE)
        self._world.note("late", kind)
        late.hold(kind, lambda: self._world.call_later(chance.uniform(0.05, 0.4), late.deliver))
        self._world.call_later(chance.expovariate(1 / self._options.late_every_seconds), self._hold_one)

    def go(self) -> None:
        """Run all of it, with its checks."""
        for topic in TOPICS:
            self.kafka.brokers.create_topic(topic)
        with self.kafka.installed():
            self.start()
            self.break_things()
            self._world.run(self._work_seconds + 20.0)
            self.end()
        self.check()

    # Checks ----------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Let the last transaction end, and whatever it has left."""
        self._ends = True
        logs = [self._log(topic) for topic in TOPICS]
        if not self._world.run_until(lambda: not any(log.open_transactions for log in logs), _HEALING_SECONDS):
            self._world.problem("OPEN", "a transaction is open still, long after all faults")
        self._world.run(5.0)

    def check(self) -> None:
        """Report what the logs show against what was reported."""
        seen = [self._numbers(topic) for topic in TOPICS]
        if seen[0] != seen[1]:
            odd = sorted(set(seen[0]) ^ set(seen[1]))
            self._world.problem("HALF", f"transactions {odd} are visible in one topic only, or twice")
        for number, outcome in self.outcomes.items():
            count = seen[0].count(number)
            if count > 1 or (outcome == "written" and not count) or (outcome == "not written" and count):
                self._world.problem("OUTCOME", f"transaction {number}: {outcome}, and visible {count} times")
        committed = self.kafka.groups.offsets.committed(GROUP).get((TOPICS[0], 0))
        found = committed.offset if committed else 0
        if found != max(seen[0], default=0):
            self._world.problem("OFFSET", f"the group has {found}, and the last visible is {max(seen[0], default=0)}")

    def _numbers(self, topic: str) -> list[int]:
        log = self._log(topic)
        fetched = log.fetch(0, 1_000_000, committed_only=True)
        return [int(record.value or b"0") for record in (fetched.records if fetched else ())]

    def _log(self, topic: str) -> PartitionLog:
        log = self.kafka.brokers.log(topic, 0)
        assert log
        return log


def transactions(world: World) -> Sequence[Any]:
    """Run the scenario; return the options of its seed."""
    options = TransactionOptions.of(world.random)
    TransactionRun(world, options).go()
    return options
