"""The worker of functions as a program of a simulated child: Headrace's own loop, with a handler of the scenario.

Its frames, claims, progress, acknowledgements and callbacks are real; what the handler does is decided by the scenario.
"""

import contextlib
import mmap
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

from headrace.functions.sdk import NotAcknowledged, QualifiedOffset
from headrace.functions.worker.handler import context_of
from headrace.functions.worker.loop import Worker
from headrace_devkit.simulation.greenlet_threads import current_machine
from headrace_devkit.simulation.simulated_children import Child, Children
from headrace_devkit.simulation.world import Machine, World

HANDLER = f"{__name__}:handler"
"""What the file of a function names."""
_COMMAND = "headrace.functions.worker"


class SimulatedHandler:
    """What a scenario decides of the handlers of its functions."""

    def __init__(self, children: Children, call: Callable[["WorkerAtWork", Any], Any]) -> None:
        """Let the workers of a world call this with each event, or with the events of a batch."""
        self.begin: Callable[[WorkerAtWork], None] = lambda worker: None
        """Called like `init_context`."""
        self.call = call
        self.at_work: dict[Machine, WorkerAtWork] = {}
        children.programs[_COMMAND] = self._run
        _handlers[children.network.world] = self

    def _run(self, child: Child) -> int:
        connection, shared, claims = map(int, child.command[-3:])
        (end,) = child.sockets
        assert end.fileno() == connection
        worker = Worker(end, mmap.mmap(child.files[shared], mmap.PAGESIZE), child.files[claims])  # type: ignore[arg-type]
        child.on_signal = worker.request_stop
        setup = worker.receive_setup()
        context = context_of(setup, lambda *_line: None)
        self.at_work[child.machine] = WorkerAtWork(child, context)
        return worker.work(setup, context)


class WorkerAtWork:
    """One worker, as its handler has it."""

    def __init__(self, child: Child, context: Any) -> None:
        self.child = child
        self.context = context
        self.is_busy = False
        """Whether its handler is at work."""
        self.held: list[Any] = []
        """Events that were not acknowledged yet."""

    @property
    def name(self) -> str:
        return self.child.machine.name

    def acknowledge(self, event: Any) -> str:
        """Acknowledge the record of an event explicitly; return why that was not possible."""
        try:
            _resolve(self.context.platform.explicit_ack(QualifiedOffset.from_event(event)))
        except NotAcknowledged as cause:
            return str(cause)
        return ""


_handlers: WeakKeyDictionary[World, SimulatedHandler] = WeakKeyDictionary()


def _resolve(work: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that waits for the parent by reading, as `asyncio.run` does in a plain handler."""
    with contextlib.suppress(StopIteration):
        work.send(None)
        raise AssertionError("it waits for something else")


def init_context(_context: Any) -> None:
    """Set up a worker."""
    found = _handlers[current_machine().world]
    found.begin(found.at_work[current_machine()])


def handler(_context: Any, event: Any) -> Any:
    """Handle an event, or the events of a batch."""
    found = _handlers[current_machine().world]
    return found.call(found.at_work[current_machine()], event)
