"""Decides what happens next: one heap of events in virtual time, one source of chance, one trace.

A machine is one process. What it does later is an event of it: dropped when it was killed, kept while it is paused.
"""

import hashlib
import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import greenlet

if TYPE_CHECKING:
    from headrace.config.model import HeadraceConfig
    from headrace_devkit.simulation.event_loop import SimulatedLoop
    from headrace_devkit.simulation.network import Network
    from headrace_devkit.simulation.simulated_process import SimulatedProcess

EPOCH_SECONDS = 1_800_000_000.0
"""What the clock of the wall shows at the start of a run, where no clock has jumped."""
_STEPS_OF_A_MOMENT = 200_000
"""More steps than this while no time passes are a loop without an end."""
_KEPT = 100_000


class Problem(NamedTuple):
    """Something that must not happen, with the time at which it was found."""

    at: float
    kind: str
    text: str


class FirstProblem(Exception):
    """Ends a run that was to find one problem."""


class Scheduled:
    """A call at a time; `cancel` drops it."""

    __slots__ = ("at", "call", "machine")

    def __init__(self, at: float, call: Callable[[], object], machine: "Machine | None") -> None:
        self.at = at
        self.call: Callable[[], object] | None = call
        self.machine = machine

    def cancel(self) -> None:
        self.call = None


class Trace:
    """What was reported: the last events, how often each happened, who watches them, and the hash of all."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.watchers: dict[str, list[Callable[..., object]]] = defaultdict(list)
        self.hash = hashlib.blake2b(digest_size=8)
        self.order = 0
        """The hash of all steps."""
        self.ends_at_problem = False

    def add(self, event: tuple[Any, ...]) -> None:
        self.hash.update(repr(event).encode())
        self.counts[event[2]] += 1
        self.events.append(event)
        if len(self.events) > 2 * _KEPT:
            del self.events[:_KEPT]


class _Until:
    """How far a world runs now."""

    __slots__ = ("condition", "end", "is_over")

    def __init__(self, end: float = 0.0, condition: Callable[[], object] | None = None) -> None:
        self.end = end
        self.condition = condition
        """What ends the run earlier."""
        self.is_over = False
        """Whether that has come true while a thread let time pass."""


class World:
    """All machines of a run. The same seed and the same calls give the same trace, event by event."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        """Virtual seconds since the start of the run."""
        self.current: Machine | None = None
        """Whose code is running; None for the world's own."""
        self.problems: list[Problem] = []
        self.machines: dict[str, Machine] = {}
        self.hub = greenlet.getcurrent()
        """The greenlet that runs the events; threads are switched to from here only."""
        self._heap: list[tuple[float, int, Scheduled]] = []
        self._number = 0
        self._trace = Trace()
        self._until = _Until()
        self._network: Network | None = None

    @property
    def trace(self) -> list[tuple[Any, ...]]:
        """The last events: time, name of the machine, name of the event, values."""
        return self._trace.events

    @property
    def counts(self) -> dict[str, int]:
        """How often each event happened."""
        return self._trace.counts

    @property
    def digest(self) -> str:
        """The hash of all events and steps so far: equal in two runs that did the same."""
        whole = self._trace.hash.copy()
        whole.update(str(self._trace.order).encode())
        return whole.hexdigest()

    @property
    def steps(self) -> int:
        """How many events were scheduled."""
        return self._number

    @property
    def network(self) -> "Network":
        """The network of all its machines."""
        if self._network is None:
            from headrace_devkit.simulation.network import Network  # it needs this module

            self._network = Network(self)
        return self._network

    def process(self, config: "HeadraceConfig", name: str = "headrace-1") -> "SimulatedProcess":
        """Return a process of Headrace, which has not started."""
        from headrace_devkit.simulation.simulated_process import SimulatedProcess  # it needs this module

        return SimulatedProcess(self.network, name, config)

    def machine(self, name: str) -> "Machine":
        """Return the machine of this name, and begin it if there is none."""
        if name not in self.machines:
            self.machines[name] = Machine(self, name)
        return self.machines[name]

    def call_later(self, seconds: float, call: Callable[[], object], machine: "Machine | None" = None) -> Scheduled:
        """Run a call after these seconds as an event of a machine, or of the world, which is never killed.

        The call must not block: what waits is a thread (`Machine.start_thread`).
        """
        return self.call_at(self.now + seconds, call, machine)

    def call_at(self, at: float, call: Callable[[], object], machine: "Machine | None" = None) -> Scheduled:
        """Run a call at a time of the run."""
        self._number = number = self._number + 1
        scheduled = Scheduled(at if at > self.now else self.now, call, machine)
        heapq.heappush(self._heap, (scheduled.at, number, scheduled))
        return scheduled

    def passes(self, seconds: float) -> bool:
        """Let time pass for the thread that runs, if nothing else happens meanwhile; return whether it did.

        It is the event that `call_later` would be, without the way to the hub and back.
        """
        at = self.now + seconds
        heap = self._heap
        machine = self.current
        until = self._until
        if machine is None or at <= self.now or at > until.end or (heap and heap[0][0] <= at) or machine.is_held:
            return False
        if machine.waits:
            machine.look_at_waits()
            if heap and heap[0][0] <= at:
                return False
        if until.condition is not None and until.condition():
            until.is_over = True
            return False
        self._number = number = self._number + 1
        self._trace.order = hash((self._trace.order, at, number))
        self.now = at
        return True

    def note(self, name: str, *values: Any) -> None:
        """Add an event to the trace; its values are plain, so that two runs write the same."""
        event = (round(self.now, 6), self.current.name if self.current else "", name, *values)
        self._trace.add(event)
        for watcher in self._trace.watchers.get(name, ()):
            watcher(*values)

    def watch(self, name: str, call: Callable[..., object]) -> None:
        """Call with the values of each event of this name, at once: this is how checkers see a run."""
        self._trace.watchers[name].append(call)

    def end_at_problem(self) -> None:
        """Have `run` raise `FirstProblem` after the first problem: the rest of the run would only take time."""
        self._trace.ends_at_problem = True

    def end(self) -> None:
        """Forget what was to come and what has happened: the run is over."""
        self._heap.clear()
        self._trace.events = []

    def problem(self, kind: str, text: str) -> None:
        """Report what must not happen."""
        self.note("problem", kind, text)
        self.problems.append(Problem(self.now, kind, text))

    def run(self, seconds: float) -> None:
        """Let this much time go by."""
        self._run_to(self.now + seconds, None)

    def run_until(self, condition: Callable[[], object], limit_seconds: float) -> bool:
        """Let time go by until a condition holds, at most this long; return whether it holds."""
        return bool(condition()) or self._run_to(self.now + limit_seconds, condition)

    def _run_to(self, end: float, condition: Callable[[], object] | None) -> bool:
        if greenlet.getcurrent() is not self.hub:
            raise RuntimeError("a thread of a machine cannot run the world: wait instead")
        self._until = until = _Until(end, condition)
        at_once = 0
        heap, pop, trace = self._heap, heapq.heappop, self._trace
        try:
            while heap and heap[0][0] <= end:
                at, number, scheduled = pop(heap)
                call, machine = scheduled.call, scheduled.machine
                if call is None or (machine is not None and not machine.accepts(scheduled)):
                    continue
                if at > self.now:
                    self.now = at
                    at_once = 0
                else:
                    at_once += 1
                    if at_once > _STEPS_OF_A_MOMENT:
                        raise RuntimeError(f"time does not pass at {at:.6f}: {call!r} of {machine and machine.name}")
                trace.order = hash((trace.order, at, number))
                self.current = machine
                call()
                self.current = None
                if machine is not None and machine.waits:
                    machine.look_at_waits()
                if self.problems and trace.ends_at_problem:
                    raise FirstProblem
                if condition is not None and (until.is_over or condition()):
                    return True
        finally:
            self.current = None
            self._until = _Until()
        self.now = end
        return False


class Machine:
    """One process: its loop, its threads, and what happens to it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        # Faults
        self.jumped_seconds = 0.0
        """How far its clock of the wall is from the world's; its monotonic clock never jumps."""
        self._paused_until = 0.0
        self._held: list[Scheduled] = []
        self._cut_in_until = 0.0
        self._cut_out_until = 0.0
        # What it runs
        self.threads: dict[greenlet.greenlet, None] = {}
        """The threads that have not ended, also those of a killed machine: collected, their `finally` would run."""
        self.waits: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        """Conditions that threads wait for, and the call that wakes each."""
        self._loop: SimulatedLoop | None = None
        self.on_kill: list[Callable[[], None]] = []
        """Run when it is killed: connections and sessions of others learn of it as a network would tell them."""

    @property
    def loop(self) -> "SimulatedLoop":
        """Its event loop, which runs on a thread of its own."""
        if self._loop is None:
            from headrace_devkit.simulation.event_loop import SimulatedLoop

            self._loop = SimulatedLoop(self)  # type: ignore[abstract] # no pipes, no processes
        return self._loop

    @property
    def now(self) -> float:
        """Its clock of the wall: seconds since the epoch."""
        return EPOCH_SECONDS + self.world.now + self.jumped_seconds

    @property
    def host(self) -> str:
        """The computer that it runs on: a process that is started again is another machine on the same one."""
        return self.name.partition("#")[0]

    @property
    def paused(self) -> bool:
        return self.world.now < self._paused_until

    @property
    def is_held(self) -> bool:
        """Whether its events do not run now: it is killed, paused, or has not caught up after a pause."""
        return not self.alive or bool(self._held) or self.world.now < self._paused_until

    def receives(self) -> bool:
        """Whether what others send arrives: not while its incoming network is cut. A paused machine receives."""
        return self.alive and self.world.now >= self._cut_in_until

    def sends(self) -> bool:
        """Whether what it sends leaves it."""
        return self.alive and self.world.now >= self._cut_out_until

    def kill(self) -> None:
        """End it as SIGKILL does: nothing of it runs any more, no `finally` either."""
        if not self.alive:
            return
        self.world.note("kill", self.name)
        self.end()

    def end(self) -> None:
        """Let nothing of it run any more: a process that has ended by itself."""
        self.alive = False
        for call in self.on_kill:
            call()
        if greenlet.getcurrent() in self.threads:
            self.world.hub.switch()  # for ever: its events are dropped

    def pause(self, seconds: float) -> None:
        """Stop it as SIGSTOP does: its events wait, time passes."""
        self.world.note("pause", self.name, round(seconds, 3))
        self._paused_until = max(self._paused_until, self.world.now + seconds)
        self.world.call_at(self._paused_until, self._continue)

    def cut(self, seconds: float, incoming: bool = True, outgoing: bool = True) -> None:
        """Lose what it sends, what is sent to it, or both; connections stay open as with a pulled cable."""
        self.world.note("cut", self.name, round(seconds, 3), incoming, outgoing)
        if incoming:
            self._cut_in_until = max(self._cut_in_until, self.world.now + seconds)
        if outgoing:
            self._cut_out_until = max(self._cut_out_until, self.world.now + seconds)

    def jump(self, seconds: float) -> None:
        """Set its clock of the wall forward or back."""
        self.world.note("jump", self.name, round(seconds, 3))
        self.jumped_seconds += seconds

    def start_thread(self, target: Callable[[], object], name: str) -> greenlet.greenlet:
        """Start a thread, which runs from the next event on."""
        from headrace_devkit.simulation.greenlet_threads import start

        return start(self, target, name)

    def accepts(self, scheduled: Scheduled) -> bool:
        """Whether its event runs now; that of a killed machine never does, that of a paused one later."""
        if not self.alive:
            return False
        if self._held or self.world.now < self._paused_until:
            self._held.append(scheduled)
            return False
        return True

    def look_at_waits(self) -> None:
        """Wake the threads whose condition has come true."""
        for ready, wake in self.waits[:]:
            if ready():
                wake()

    def _continue(self) -> None:
        if self.paused:
            return
        held, self._held = self._held, []
        for scheduled in held:
            if scheduled.call is not None:
                self.world.call_at(self.world.now, scheduled.call, self)
