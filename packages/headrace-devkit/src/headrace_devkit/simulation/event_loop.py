"""The event loop of one machine: tasks, timers and connections in virtual time.

It is the loop of asyncio to whatever runs on it: C tasks, `asyncio.timeout` and executors work as they are.
Its turns run on a thread of the machine, so that code which blocks the loop blocks this loop only.
"""

import asyncio
import contextvars
import functools
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from headrace_devkit.simulation import greenlet_threads
from headrace_devkit.simulation.world import Machine, Scheduled

if TYPE_CHECKING:
    from headrace_devkit.simulation.network import Network
    from headrace_devkit.simulation.simulated_children import PipeReader

_TURN_SECONDS = 0.00002
"""What a turn takes: a task that never waits lets time go by, too."""


class Handle:
    """`asyncio.Handle`, which has less to do here: no slow calls are logged, and nothing is traced."""

    __slots__ = ("_args", "_callback", "_context", "_is_cancelled")

    def __init__(self, callback: Callable[..., object], args: Any, context: contextvars.Context | None) -> None:
        self._callback = callback
        self._args = args
        self._context = contextvars.copy_context() if context is None else context
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True
        self._callback, self._args = _nothing, ()

    def cancelled(self) -> bool:
        return self._is_cancelled

    def run(self, loop: "SimulatedLoop") -> None:
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as cause:  # noqa: BLE001 the boundary of the loop
            message = f"Exception in callback {getattr(self._callback, '__qualname__', self._callback)}"
            loop.call_exception_handler({"message": message, "exception": cause, "handle": self})


class TimerHandle(Handle):
    """`asyncio.TimerHandle`: a call at a time, as an event of the machine."""

    __slots__ = ("_when", "scheduled")

    def __init__(
        self, when: float, callback: Callable[..., object], args: Any, context: contextvars.Context | None
    ) -> None:
        super().__init__(callback, args, context)
        self._when = when
        self.scheduled: Scheduled | None = None

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        if self.scheduled is not None:
            self.scheduled.cancel()
        super().cancel()


def _nothing() -> None:
    """What a cancelled call does."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The loop of a machine, made by `machine.loop`; it runs while the world runs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.network: Network | None = None
        """Where its connections go; set by the network that the machine is part of."""
        self._ready: deque[Handle] = deque()
        self._waiter = greenlet_threads.Waiter()
        self._executor: greenlet_threads.Executor | None = None
        self._task_factory: Any = None
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        """All tasks, also those of a killed machine: were they collected, their `finally` would run."""
        self.signal_handlers: dict[int, Callable[[], object]] = {}
        """What a signal does, by its number."""
        self._idle = False
        """Whether it is parked until something is ready."""
        self._pipes: list[PipeReader] = []
        machine.start_thread(self._run, "loop")

    def _run(self) -> None:
        waiter = self._waiter
        asyncio._set_running_loop(self)
        ready = self._ready
        while True:
            self._idle = not ready
            waiter.wait(_TURN_SECONDS if ready else None)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._is_cancelled:
                    handle.run(self)
            handle = None  # type: ignore[assignment] # a frame that is kept would keep what it did last

    # Calls

    def time(self) -> float:
        return self.machine.world.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, context)
        self._ready.append(handle)
        if self._idle:
            self._idle = False
            self._waiter.wake(_TURN_SECONDS)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> TimerHandle:
        return self.call_at(self.machine.world.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> TimerHandle:
        handle = TimerHandle(when, callback, args, context)
        handle.scheduled = self.machine.world.call_at(when, functools.partial(self._due, handle), self.machine)
        return handle

    def _due(self, handle: TimerHandle) -> None:
        handle.scheduled = None
        self._ready.append(handle)
        if self._idle:
            self._idle = False
            self._waiter.wake(_TURN_SECONDS)

    # Tasks

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        return self._task(coro, name, context)

    def _task(self, coro: Any, name: str | None, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
        if self._task_factory is not None:
            task: asyncio.Task[Any] = self._task_factory(self, coro)
        else:
            task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def set_task_factory(self, factory: Any) -> None:
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        return self._task_factory

    def start(self, work: Coroutine[Any, Any, Any], ended: Callable[[asyncio.Task[Any]], object]) -> None:
        """Run a coroutine as the main one of the machine; may be called from outside."""

        def begin() -> None:
            self._task(work, "main").add_done_callback(ended)

        self.call_soon(begin)

    # Threads

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        if executor is None:
            self._executor = executor = self._executor or greenlet_threads.executor("executor", 16)
        result = self.create_future()

        def done(value: Any, cause: BaseException | None) -> None:
            if result.cancelled():
                return
            if cause is None:
                result.set_result(value)
            else:
                result.set_exception(cause)

        executor.run(
            functools.partial(func, *args), result.cancelled, lambda value, cause: self.call_soon(done, value, cause)
        )
        return result

    # Network

    async def getaddrinfo(
        self,
        host: Any,
        port: Any,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 its name in asyncio
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        assert self.network
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.network.address_of(str(host)), port))]

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        assert self.network
        return await self.network.connect(self, protocol_factory, str(host), int(port))

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **_: Any) -> Any:
        return sock.attach(protocol_factory())

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        fd.on_readable = lambda: self.call_soon(callback, *args)
        fd.announce()

    def remove_reader(self, fd: Any) -> bool:
        fd.on_readable = None
        return True

    # Children

    async def subprocess_exec(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        assert self.network
        assert self.network.children, "the scenario has no programs for child processes"
        return self.network.children.start(self.machine, args, options), protocol_factory()

    async def create_unix_connection(
        self, protocol_factory: Any, path: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        return sock.attach(protocol_factory())

    async def connect_read_pipe(self, protocol_factory: Any, pipe: Any) -> Any:
        from headrace_devkit.simulation.simulated_children import PipeReader  # it needs machines

        reader = PipeReader(pipe, protocol_factory())
        self._pipes.append(reader)
        return reader, None

    def look_at_pipes(self) -> None:
        """Read what children have written, and whether it has ended."""
        for reader in self._pipes:
            reader.look()
        self._pipes = [reader for reader in self._pipes if not reader.is_closed]

    # State

    def is_running(self) -> bool:
        return self.machine.alive

    def is_closed(self) -> bool:
        return False

    def close(self) -> None:
        """A machine ends with its process, and its loop with it."""

    def stop(self) -> None:
        """The same."""

    async def shutdown_asyncgens(self) -> None:
        return

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        return

    def set_exception_handler(self, handler: Any) -> None:
        self._handler = handler

    def get_exception_handler(self) -> Any:
        return self._handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        cause = context.get("exception")
        if cause is not None:
            why = f"{type(cause).__name__}: {cause}"
            self.machine.world.problem("loop-error", f"{self.machine.name}: {context.get('message')}: {why}")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._handler is not None:
            self._handler(self, context)
        else:
            self.default_exception_handler(context)

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., object], *args: Any
    ) -> None:
        self.signal_handlers[sig] = lambda: self.call_soon(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.signal_handlers.pop(sig, None) is not None
