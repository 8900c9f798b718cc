"""Breaks processes and brokers of a run by chance; what was broken is whole again after a while."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.simulated_process import SimulatedProcess
from headrace_devkit.simulation.world import World


class ProcessFaults(ABC):
    """A run of processes that fail."""

    faults: ClassVar[Sequence[str]] = ("kill", "kill", "pause", "cut", "cut", "jump", "stop", "stop", "broker")
    """The methods that break something, as often as each should be chosen."""
    world: World
    kafka: SimulatedKafka
    processes: Sequence[SimulatedProcess]

    @abstractmethod
    def disturb(self, seconds: float, *processes: str) -> None:
        """Expect that processes do not know for this time, and a drain longer, what their group has decided."""

    def fault(self) -> None:
        """Break something, by chance; what was broken is whole again after a while."""
        chance = self.world.random
        process = chance.choice(self.processes)
        seconds = chance.choice([0.5, 4.0, 12.0, 40.0])
        getattr(self, f"_{chance.choice(self.faults)}")(process, seconds)

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
            self.disturb(seconds, *(one.machine.name for one in self.processes if one.running))
            (brokers.stop if self.world.random.random() < 0.5 else brokers.kill)(broker)
            self.world.call_later(seconds, lambda: brokers.start(broker))
