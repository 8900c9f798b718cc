"""Exactly once under chance: functions from one topic to another, in transactions, while requests arrive late.

In the end a reader at `read_committed` sees one output of each record, or one dead letter. Processes are killed, or
paused until others have their partitions: then they come back with transactions of before.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from headrace_devkit.simulation.functions_checker import visible
from headrace_devkit.simulation.functions_scenario import OUTPUT, FunctionOptions, FunctionRun
from headrace_devkit.simulation.loaded_run import TOPIC
from headrace_devkit.simulation.simulated_process import SimulatedProcess
from headrace_devkit.simulation.world import World

_LATE = ("Produce", "TxnOffsetCommit", "EndTxn", "AddPartitionsToTxn")
_LATE_SECONDS = (0.05, 0.4, 3.0, 70.0)
_MOST_HUNG = 3


class TransactionFaults(NamedTuple):
    """What a seed decides of transactions, besides the options of the function."""

    late_every_seconds: float
    """About how often a request of a transaction is delayed; 0 for never."""
    hangs: float
    """The share of lost responses to offsets after which the client never returns: librdkafka, issues 5456 and 5511."""


class ExactlyOnceRun(FunctionRun):
    """One run: what a function run has, with late requests and a check of what is visible."""

    faults: ClassVar = (*FunctionRun.faults, "zombie", "coordinator")

    def __init__(self, world: World, options: FunctionOptions, transactions: TransactionFaults) -> None:
        super().__init__(world, options)
        self.transactions = transactions
        self.kafka.transactions.hangs = self._hangs
        self._hung = 0

    def run(self) -> None:
        if self.transactions.late_every_seconds:
            self._hold_one()
        super().run()
        self.check()

    def is_complete(self) -> bool:
        return self.lag() == 0  # an output that is missing now never comes

    def _hangs(self) -> bool:
        """Let a call hang for ever, at most as often as a process can bear without a restart."""
        hangs = self._hung < _MOST_HUNG and self.world.random.random() < self.transactions.hangs
        self._hung += hangs
        return hangs

    def _hold_one(self) -> None:
        """Hold back the next request of a kind, and have it arrive later."""
        if self.is_healed:
            return
        chance, late = self.world.random, self.kafka.transactions.late
        kind, seconds = chance.choice(_LATE), chance.choice(_LATE_SECONDS)
        self.world.note("late", kind)
        late.hold(kind, lambda: self.world.call_later(seconds, late.deliver))
        self.world.call_later(chance.expovariate(1 / self.transactions.late_every_seconds), self._hold_one)

    def _zombie(self, process: SimulatedProcess, _seconds: float) -> None:
        """Pause a process until others have its partitions, and perhaps its open transaction was aborted."""
        self._pause(process, self.world.random.uniform(15.0, 80.0))

    def _coordinator(self, process: SimulatedProcess, seconds: float) -> None:
        """Stop the broker that coordinates a transaction, or the group; another one takes over."""
        self._broker(process, min(seconds, 4.0))

    def check(self) -> None:
        """Report what a reader sees twice, or not at all."""
        outputs, dead = (visible(self.kafka.brokers, topic) for topic in (OUTPUT, f"{TOPIC}.dlq"))
        for value, record in self.checker.records.items():
            count = outputs[value] + dead[value]
            if count != 1:
                where = f"{record.topic}-{record.partition} {record.offset}"
                text = f"{where} {value!r} has {outputs[value]} outputs and {dead[value]} dead letters"
                self.world.problem("ONCE", text)


def exactly_once(world: World) -> Sequence[Any]:
    """Run the scenario; return the options of its seed."""
    options = FunctionOptions.drawn(world.random, delivery="exactly_once")
    chance = world.random
    transactions = TransactionFaults(chance.choice((0.0, 1.0, 4.0, 15.0)), chance.choice((0.0, 0.0, 0.3)))
    world.note("options", str(options), str(transactions))
    run = ExactlyOnceRun(world, options, transactions)
    with run.installed():
        run.run()
    return options, transactions
