"""Threads of a machine as greenlets: each runs until it waits, and only then another one does.

`Thread`, `Event`, `Lock`, `Queue`, `sleep` and the rest have the names and the behaviour of the standard library's.
What happens between two waits is one step: races between bytecodes are not explored.
"""

import asyncio
import functools
import itertools
from collections import deque
from collections.abc import Callable
from concurrent import futures
from queue import Empty, Full
from typing import Any, Self
from weakref import WeakKeyDictionary

import greenlet

from headrace_devkit.simulation.world import Machine

_next_number = itertools.count(1)


class _Thread(greenlet.greenlet):  # type: ignore[misc] # it has no types
    """A thread of a machine."""

    machine: Machine
    number: int


def start(machine: Machine, target: Callable[[], object], name: str) -> greenlet.greenlet:
    """Start a thread of a machine; what it raises is a problem of the run, unless it means to end."""

    def run() -> None:
        try:
            target()
        except Exception as cause:  # noqa: BLE001 the boundary of the thread
            machine.world.problem("thread-died", f"{machine.name}, {name}: {type(cause).__name__}: {cause}")
        if machine.alive:
            del machine.threads[thread]

    thread = _Thread(run, machine.world.hub)
    thread.machine = machine
    thread.number = next(_next_number)
    machine.threads[thread] = None
    machine.world.call_later(0, thread.switch, machine)
    return thread


def current_machine() -> Machine:
    """Return the machine whose thread is running."""
    thread = greenlet.getcurrent()
    if not isinstance(thread, _Thread):
        raise RuntimeError("this waits, and only a thread of a machine may wait")
    return thread.machine


def get_ident() -> int:
    """Return the number of this thread."""
    return getattr(greenlet.getcurrent(), "number", 0)


class Waiter:
    """One wait of one thread after another: `wait` parks the thread, `wake` resumes it."""

    __slots__ = ("_machine", "_thread", "_timer", "_woken")

    def __init__(self) -> None:
        self._thread: greenlet.greenlet | None = None
        self._machine: Machine | None = None
        self._timer: Any = None
        self._woken = False

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until `wake`, at most this long; return whether it was woken. An earlier `wake` counts."""
        thread = greenlet.getcurrent()
        if not isinstance(thread, _Thread):
            raise RuntimeError("this waits, and only a thread of a machine may wait")
        machine = thread.machine
        world = machine.world
        if not self._woken and (seconds is None or not world.passes(seconds)):
            self._thread = thread
            self._machine = machine
            if seconds is not None:
                self._timer = world.call_at(world.now + seconds, self._resume, machine)
            loop = asyncio._get_running_loop()
            if loop is None:
                world.hub.switch()
            else:
                asyncio._set_running_loop(None)
                try:
                    world.hub.switch()
                finally:
                    asyncio._set_running_loop(loop)
        woken, self._woken = self._woken, False
        return woken

    def wake(self, seconds: float = 0.0) -> None:
        """End the wait after some time, or else the next one; may be called by anything in the world."""
        if self._woken:
            return
        self._woken = True
        if self._thread is not None and self._machine is not None:
            if self._timer is not None:
                self._timer.cancel()
            world = self._machine.world
            self._timer = world.call_at(world.now + seconds, self._resume, self._machine)

    def _resume(self) -> None:
        thread, self._thread, self._timer = self._thread, None, None
        if thread is not None:
            thread.switch()


def wait(ready: Callable[[], bool] | None, seconds: float | None) -> bool:
    """Wait until a condition holds, at most this long; return whether it does. It is looked at after each step."""
    if ready is None:
        return Waiter().wait(seconds)
    if ready():
        return True
    machine = current_machine()
    waiter = Waiter()
    entry = (ready, waiter.wake)
    machine.waits.append(entry)
    waiter.wait(seconds)
    machine.waits.remove(entry)
    return ready()


def sleep(seconds: float) -> None:
    """Let time go by."""
    Waiter().wait(max(seconds, 0.0))


class ThreadEvent:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Waiter] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            waiter = Waiter()
            self._waiters.append(waiter)
            if not waiter.wait(timeout) and waiter in self._waiters:
                self._waiters.remove(waiter)
                return self._set
            return True
        return True


class ThreadLock:
    """`threading.Lock`."""

    def __init__(self) -> None:
        self._locked = False
        self._waiters: deque[Waiter] = deque()

    def locked(self) -> bool:
        return self._locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._locked:
            self._locked = True
            return True
        if not blocking:
            return False
        waiter = Waiter()
        self._waiters.append(waiter)
        if waiter.wait(None if timeout < 0 else timeout):
            return True  # handed over by `release`
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            return False
        return True

    def release(self) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        if self._waiters:
            self._waiters.popleft().wake()
        else:
            self._locked = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()


class RLock(ThreadLock):
    """`threading.RLock`."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: greenlet.greenlet | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is greenlet.getcurrent():
            self._depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._owner, self._depth = greenlet.getcurrent(), 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: ThreadLock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: deque[Waiter] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        waiter = Waiter()
        self._waiters.append(waiter)
        self._lock.release()
        woken = waiter.wait(timeout)
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        world = current_machine().world
        end = None if timeout is None else world.now + timeout
        while not predicate():
            if end is not None and world.now >= end:
                return predicate()
            self.wait(None if end is None else end - world.now)
        return True

    def notify(self, n: int = 1) -> None:
        while self._waiters and n:
            self._waiters.popleft().wake()
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Queue:
    """`queue.Queue`, and `queue.SimpleQueue`."""

    def __init__(self, maxsize: int = 0) -> None:
        self.maxsize = maxsize
        self._items: deque[Any] = deque()
        self._changed = Condition()

    def __class_getitem__(cls, _item: object) -> type[Self]:
        return cls

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items

    def full(self) -> bool:
        return 0 < self.maxsize <= len(self._items)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if self.full() and not (block and self._changed_until(lambda: not self.full(), timeout)):
            raise Full
        self._items.append(item)
        self._changed.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and not (block and self._changed_until(lambda: bool(self._items), timeout)):
            raise Empty
        item = self._items.popleft()
        self._changed.notify_all()
        return item

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def _changed_until(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(predicate, timeout)


class Thread:
    """`threading.Thread`, of the machine whose code makes it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self.daemon = daemon
        self._call: Callable[[], object] = lambda: target(*args, **(kwargs or {})) if target else None
        self._started = False
        self._ended = ThreadEvent()
        self._thread: greenlet.greenlet | None = None

    @property
    def ident(self) -> int | None:
        return getattr(self._thread, "number", None)

    def start(self) -> None:
        if self._started:
            raise RuntimeError("threads can only be started once")
        self._started = True
        self._thread = current_machine().start_thread(self._run, self.name)

    def is_alive(self) -> bool:
        return self._started and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def _run(self) -> None:
        try:
            self._call()
        finally:
            self._ended.set()


class Future(futures.Future[Any]):
    """`concurrent.futures.Future`, whose `result` lets other threads run. It needs no lock: one thread is running."""

    def __init__(self) -> None:
        self._how = "pending"
        self._value: Any = None
        self._cause: BaseException | None = None
        self._calls: list[Callable[[Any], object]] = []

    def cancel(self) -> bool:
        if self._how == "pending":
            self._end("cancelled")
        return self._how == "cancelled"

    def cancelled(self) -> bool:
        return self._how == "cancelled"

    def running(self) -> bool:
        return self._how == "running"

    def done(self) -> bool:
        return self._how in ("cancelled", "finished")

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        if self.done():
            fn(self)
        else:
            self._calls.append(fn)

    def set_running_or_notify_cancel(self) -> bool:
        if self._how == "pending":
            self._how = "running"
        return self._how == "running"

    def set_result(self, result: Any) -> None:
        self._value = result
        self._end("finished")

    def set_exception(self, exception: BaseException | None) -> None:
        self._cause = exception
        self._end("finished")

    def result(self, timeout: float | None = None) -> Any:
        if (cause := self.exception(timeout)) is not None:
            raise cause
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            ended = ThreadEvent()
            self._calls.append(lambda _: ended.set())
            if not ended.wait(timeout):
                raise TimeoutError
        if self._how == "cancelled":
            raise futures.CancelledError
        return self._cause

    def _end(self, how: str) -> None:
        if self.done():
            raise futures.InvalidStateError(self._how)
        self._how = how
        calls, self._calls = self._calls, []
        for call in calls:
            call(self)


class _Calls:
    """The calls of one machine that wait for a thread."""

    def __init__(self) -> None:
        self.busy = 0
        self.waiting: deque[tuple[Callable[[], Any], Callable[[], bool], Callable[[Any, Any], object]]] = deque()


class Executor(futures.Executor):
    """`ThreadPoolExecutor`: calls run on threads of the machine that submits them, this many at a time."""

    def __init__(self, max_workers: int = 16, thread_name_prefix: str = "pool") -> None:
        self._name = thread_name_prefix
        self._threads = max_workers
        self._calls: WeakKeyDictionary[Machine, _Calls] = WeakKeyDictionary()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = Future()

        def done(value: Any, cause: BaseException | None) -> None:
            if cause is None:
                future.set_result(value)
            else:
                future.set_exception(cause)

        def skips() -> bool:
            return not future.set_running_or_notify_cancel()

        self.run(functools.partial(fn, *args, **kwargs), skips, done)
        return future

    def run(
        self, call: Callable[[], Any], skips: Callable[[], bool], done: Callable[[Any, BaseException | None], object]
    ) -> None:
        """Run a call, unless it should be skipped when its turn comes; `done` gets its result, or what it raised."""
        machine = current_machine()
        calls = self._calls.setdefault(machine, _Calls())
        calls.waiting.append((call, skips, done))
        if calls.busy < self._threads:
            calls.busy += 1
            machine.start_thread(lambda: _work(calls), self._name)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Threads end when no call waits."""


def _work(calls: _Calls) -> None:
    try:
        while calls.waiting:
            call, skips, done = calls.waiting.popleft()
            if skips():
                continue
            try:
                value = call()
            except Exception as cause:  # noqa: BLE001 boundary: the caller gets it
                done(None, cause)
            else:
                done(value, None)
    finally:
        calls.busy -= 1


def executor(name: str, threads: int) -> Executor:
    """Return threads for calls that block."""
    return Executor(threads, name)


Event = ThreadEvent
Lock = ThreadLock
