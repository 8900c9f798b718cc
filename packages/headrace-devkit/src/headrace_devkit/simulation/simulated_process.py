"""One whole process of Headrace on a machine: its App, started, stopped by a signal, killed, paused, cut."""

import os
import signal
from collections.abc import Mapping
from typing import Any

from headrace.app.app import App
from headrace.config.model import HeadraceConfig
from headrace.config.whole_file import WholeFile
from headrace.runtime import SystemClock
from headrace_devkit.simulation.network import Network
from headrace_devkit.simulation.world import Machine


class SimulatedProcess:
    """A process on a machine of its name; `start` again after its end makes a new one on the same host."""

    def __init__(self, network: Network, name: str, config: HeadraceConfig) -> None:
        self.name = name
        self.config = config
        self.stopping = False
        """Whether it has had SIGTERM since its last start."""
        self.ready = False
        """Whether it has announced that it is ready, since its last start."""
        self.app: App | None = None
        self.machine: Machine
        self._network = network
        self._starts = 0

    @property
    def running(self) -> bool:
        return self._starts > 0 and self.machine.alive

    def start(self) -> None:
        """Start it, as a supervisor of processes would."""
        assert not self.running, f"{self.name} runs already"
        world = self._network.world
        self._starts += 1
        self.ready = self.stopping = False
        self.machine = machine = world.machine(self.name if self._starts == 1 else f"{self.name}#{self._starts}")
        world.note("start", machine.name)
        self._network.join(machine)
        machine.loop.start(self._main(machine), lambda task: self._ended(machine, task))

    async def _main(self, machine: Machine) -> int:
        self.app = app = App(self.config, SystemClock())

        def announce(line: str) -> None:
            self.ready = True
            machine.world.note("ready")

        return await app.run(announce)

    def _ended(self, machine: Machine, task: Any) -> None:
        world = machine.world
        error = None if task.cancelled() else task.exception()
        code = "error" if error else task.result()
        world.note("exit", machine.name, code)
        if code != 0:
            world.problem("process-died", f"{machine.name} ended by itself: {error or code}")
        machine.end()

    def stop(self) -> None:
        """Send SIGTERM: it drains and ends."""
        if self.running and (handler := self.machine.loop.signal_handlers.get(signal.SIGTERM)):
            self.stopping = True
            self.machine.world.note("stop", self.machine.name)
            handler()

    def kill(self) -> None:
        self.machine.kill()

    def pause(self, seconds: float) -> None:
        self.machine.pause(seconds)

    def cut(self, seconds: float, *, incoming: bool = True, outgoing: bool = True) -> None:
        self.machine.cut(seconds, incoming, outgoing)

    def jump(self, seconds: float) -> None:
        self.machine.jump(seconds)


def configuration(values: Mapping[str, Any]) -> HeadraceConfig:
    """Return the configuration with these keys, as a file would have them; by default, audit events are not kept."""
    return WholeFile.model_validate({"audit": {"file": os.devnull}, **values})
