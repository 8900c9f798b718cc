"""Threads with an owner, and the bridge by which they hand work to the loop in batches.

A thread may wait for the loop with a deadline; the loop waits for a thread only with a time limit. So the two cannot
lock each other.
"""

import asyncio
import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, ParamSpec, TypeVar

from headrace.runtime import blocking

T = TypeVar("T")
P = ParamSpec("P")

_POOL_THREADS = 16
_pool: "ThreadPool | None" = None
_MOST_UNRETURNED = 4
_unreturned: list[blocking.Thread] = []
"""Threads of calls that have not returned in time. Each keeps what it uses in memory until it returns."""


class LoopBridge(Generic[T]):
    """Carries items from any thread to one callback on the loop, many items per wake-up.

    A wake-up of the loop costs more than a record. So only the first item of a burst wakes it, and the callback gets
    all items posted until it runs. Order is kept per posting thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[T]], None]) -> None:
        """Deliver items to `deliver`, which runs on `loop` with a list of one or more items."""
        self.loop = loop
        self._deliver = deliver
        self._items: deque[T] = deque()
        self._awake = False

    def post(self, item: T) -> None:
        """Hand over one item, without waiting. After the loop has closed, items are dropped."""
        self._items.append(item)
        # Race: the loop may clear the flag between the append and this test. Then it has not yet emptied the queue
        # (it clears first, empties second), so the item is either seen by that run or wakes the next one.
        if not self._awake:
            self._awake = True
            try:
                self.loop.call_soon_threadsafe(self._run)
            except RuntimeError:
                self._items.clear()

    def collect(self, call: Callable[[], object]) -> None:
        """Run a call on the loop that posts items, and deliver these at once; without a wake-up."""
        self._awake = True
        try:
            call()
        finally:
            self._run()

    def _run(self) -> None:
        self._awake = False
        items: list[T] = []
        while self._items:
            items.append(self._items.popleft())
        if items:
            self._deliver(items)


class OwnedThread:
    """A thread that belongs to a service, which can stop it and is notified of its death."""

    def __init__(
        self, name: str, run: Callable[[blocking.Event], None], on_death: Callable[[BaseException], None]
    ) -> None:
        """Prepare; `run` returns soon after its event is set, and `on_death` is called on the loop if it raises."""
        self.stop_requested = blocking.Event()
        self._run = run
        self._on_death = on_death
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = blocking.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def stop(self, limit_seconds: float) -> bool:
        """Ask the thread to end, and return whether it did within `limit_seconds`; past that it is abandoned."""
        self.stop_requested.set()
        if self.alive:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), limit_seconds)
        return self._ended.is_set() or not self.alive

    def _main(self) -> None:
        try:
            self._run(self.stop_requested)
        except:  # noqa: E722 boundary of the thread: the owner gets it, readiness names the service
            cause = sys.exc_info()[1]  # of any class: a C library may raise something else than an exception
            death = cause if isinstance(cause, BaseException) else RuntimeError(str(cause))
            self._call_on_loop(functools.partial(self._on_death, death))
        finally:
            self._call_on_loop(self._ended.set)

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return  # the loop has closed, so the owner has ended


class LoopThread:
    """A loop on its own thread, for callers without a loop (commands, test tools, scripts)."""

    def __init__(self, name: str) -> None:
        """Start the loop; `name` is shown in stack dumps."""
        self._loop = asyncio.new_event_loop()
        self._thread = blocking.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], limit_seconds: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result; at the limit, or at an interrupt, it is cancelled.

        Raises:
            TimeoutError: No result in time.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit_seconds)
        finally:
            future.cancel()

    def stop(self, limit_seconds: float = 5.0) -> None:
        """Stop the loop; coroutines that still run are abandoned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(limit_seconds)
        if not self._thread.is_alive():
            self._loop.close()


class ThreadPool:
    """Threads of one owner for calls that block, so that it never waits for the calls of others."""

    def __init__(self, name: str, threads: int) -> None:
        """Prepare; `name` begins the names of the threads, which start when they are needed."""
        self._pool = blocking.executor(name, threads)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on a thread and return its result; a cancelled one continues, and its result is dropped."""
        bound: Callable[[], Any] = functools.partial(call, *args, **kwargs)
        result: T = await asyncio.get_running_loop().run_in_executor(self._pool, bound)
        return result


async def run_blocking(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that blocks on a thread of the shared pool and return its result.

    If this is cancelled, the call continues and its result is dropped; so the call needs its own time limit.
    """
    global _pool
    if _pool is None:
        _pool = ThreadPool("headrace-blocking", _POOL_THREADS)
    return await _pool.run(call, *args, **kwargs)


def call_within(limit_seconds: float, call: Callable[[], T]) -> T:
    """Run a call that may never return on a thread of its own, wait for it, and return its result.

    Raises:
        TimeoutError: It has not returned, or four earlier ones have not, so it was not called.
    """
    _unreturned[:] = [thread for thread in _unreturned if thread.is_alive()]
    if len(_unreturned) >= _MOST_UNRETURNED:
        raise TimeoutError(f"{len(_unreturned)} earlier calls have not returned: restart the process if this lasts")
    outcome: blocking.SimpleQueue[T | Exception] = blocking.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(call())
        except Exception as cause:  # noqa: BLE001 boundary of the thread: the caller gets it
            outcome.put(cause)

    thread = blocking.Thread(target=run, name="call-within", daemon=True)
    thread.start()
    try:
        result = outcome.get(timeout=limit_seconds)
    except blocking.Empty:
        _unreturned.append(thread)
        raise TimeoutError(f"the call has not returned within {limit_seconds:g} s") from None
    if isinstance(result, Exception):
        raise result
    return result
