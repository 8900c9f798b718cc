"""The worker's loop: load, set up, then read and serve frames until the parent disconnects or sends SIGTERM.

A plain handler runs without an event loop, which is the fastest to start and to run. With an async one, reading and
serving run on an event loop, so background tasks of the handler run while the worker waits for records.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.framing import FrameReader, encode_frame
from headrace.functions import protocol
from headrace.functions.sdk import Context, Platform
from headrace.functions.worker.handler import Unusable, is_async, load_handler, trace_of
from headrace.functions.worker.serving import Serving

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_READ_BYTES = 262_144
_STDERR = 2
_NUMBERS = 256
"""Frames are numbered from 1, and again from 0 after 255."""


_CLOSED = "the worker ends, and its connection to Headrace is closed"


class Acks:
    """The acknowledgements of one worker that await a response of the parent."""

    def __init__(self, send: Callable[[protocol.ToParent], None]) -> None:
        """Prepare; `send` sends a message to the parent."""
        self.read: Callable[[], object] | None = None
        """Waits for bytes of the parent and takes them; None if an event loop does that."""
        self.closed = False
        """Whether the parent has closed the connection."""
        self._send = send
        self._thread = threading.current_thread()
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._number = 0

    async def send(self, topic: str, partition: int, offset: int) -> str:
        """Acknowledge a record; return why that is not possible, or an empty text once the parent has taken it.

        Raises:
            RuntimeError: Another thread than that of the handler called it.
        """
        import asyncio

        if threading.current_thread() is not self._thread:
            raise RuntimeError("explicit_ack was called in another thread: call it in the thread of the handler")
        if self.closed:
            return _CLOSED
        self._number += 1
        response: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = response
        self._send(protocol.Ack(self._number, topic, partition, offset))
        while self.read and not response.done():  # a plain handler: nothing else of the worker runs meanwhile
            self.read()
        return await response

    def answered(self, message: protocol.Acked) -> None:
        if (response := self._waiting.pop(message.number, None)) and not response.done():
            response.set_result(message.problem)

    def close(self) -> None:
        """Complete every call: the parent has closed the connection."""
        self.closed = True
        for number in [*self._waiting]:
            self.answered(protocol.Acked(number, _CLOSED))


class _Plain:
    """Runs a plain handler; coroutines that it returns run on a separate event loop."""

    def __init__(self, read: Callable[[], object] = lambda: None) -> None:
        """Prepare; `read` waits for bytes of the parent and takes them."""
        self.read = read
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what `Serving` does for records, and return its result."""
        try:
            work.send(None)
        except StopIteration as ended:
            result: T = ended.value
            return result
        raise AssertionError("a plain handler's frame does not wait")

    def call(self, function: Any, *arguments: Any) -> None:
        response = function(*arguments)
        if type(response) is CoroutineType:
            self.resolve(response)

    def resolve(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Nothing runs between calls."""


class _OnEventLoop:
    """Runs an async handler, and everything else of the worker, on one event loop."""

    resolve = None

    def __init__(self, worker: Worker | None) -> None:
        """Prepare; with a worker, read from its parent."""
        import asyncio  # here, so that plain handlers start without it

        self._runner = asyncio.Runner()
        self._arrived = asyncio.Event()
        if worker:
            # It reads also while the handler waits, perhaps for the response to an acknowledgement.
            self._runner.get_loop().add_reader(worker.end, self._take, worker)

    def _take(self, worker: Worker) -> None:
        if not worker.read():
            self._runner.get_loop().remove_reader(worker.end)
        self._arrived.set()

    def read(self) -> None:
        self._arrived.clear()
        self._runner.run(self._arrived.wait())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def call(self, function: Any, *arguments: Any) -> None:
        self._runner.run(_called(function, arguments))

    def close(self) -> None:
        """Cancel the handler's background tasks."""
        self._runner.close()


async def _called(function: Any, arguments: Any) -> None:
    response = function(*arguments)
    if type(response) is CoroutineType:
        await response


def prepare(
    setup: protocol.Setup, context: Context, progress: mmap.mmap, worker: Worker | None = None
) -> tuple[_Plain | _OnEventLoop, Serving]:
    """Load the handler, call `init_context`, and return what serves frames.

    Raises:
        Unusable: One of them failed.
    """
    handler, init_context = load_handler(setup.handler, setup.folder)
    runs: _Plain | _OnEventLoop = _Plain(worker.read) if worker else _Plain()
    if is_async(handler) or is_async(init_context):
        runs = _OnEventLoop(worker)
    elif worker:
        worker.acks.read = worker.read
    serving = Serving(handler, context, setup, progress)
    serving.resolve = runs.resolve
    if init_context is not None:
        try:
            runs.call(init_context, context)
        except BaseException as cause:  # boundary to user code: readiness and log show the trace
            raise Unusable(f"init_context failed: {trace_of(cause)}") from cause
    return runs, serving


class _Claims:
    """Which of the received frames may begin: the parent recalls a frame by taking its number from the pipe."""

    def __init__(self, pipe: int) -> None:
        self.number = 0
        """Of the last frame that was received."""
        self._pipe = pipe
        self._claimed: int | None = None
        """The number that was read last, until its frame is received."""

    def claim(self) -> bool:
        """Count a frame that was received, and return whether it may begin; else the parent has recalled it."""
        self.number = (self.number + 1) % _NUMBERS
        if self._claimed is None:
            with contextlib.suppress(BlockingIOError):
                self._claimed = int.from_bytes(os.read(self._pipe, 1))
        if self._claimed != self.number:
            return False
        self._claimed = None
        return True


class Worker:
    """One worker process's life."""

    def __init__(self, end: socket.socket, progress: mmap.mmap, claims: int) -> None:
        self.end = end
        self._progress = progress
        self._claims = _Claims(claims)
        self._reader = FrameReader(protocol.decode_to_worker)
        self._received: deque[protocol.ToWorker] = deque()
        self._runs: _Plain | _OnEventLoop = _Plain(self.read)
        self.acks = Acks(self._send)
        self._idle = False
        self._stop_requested = False
        self._has_reported_callback = False
        self._drained = False  # the drain callback has run since the last record
        self._pid = os.getpid()

    def request_stop(self, *_: object) -> None:
        """End now when idle, else after the present frame; a signal handler."""
        self._stop_requested = True
        if self._idle:
            self._idle = False  # another signal must not end the callbacks
            # Raised out of the read. A frame that arrives now is lost with the process. The parent sees that none of
            # its records was begun, and sends it to another worker.
            sys.exit(0)

    def receive_setup(self) -> protocol.Setup:
        """Wait for the first message."""
        while not self._received:
            if not self.read():
                sys.exit(0)
        setup = self._received.popleft()
        assert isinstance(setup, protocol.Setup)
        return setup

    def work(self, setup: protocol.Setup, context: Context) -> int:
        """Load the handler, serve until the end, and return the exit code."""
        context.platform._acknowledge = self.acks.send
        try:
            self._runs, serving = prepare(setup, context, self._progress, self)
            self._serve(serving, context.platform)
        except Unusable as cause:
            self._send(protocol.Unfit(str(cause)))
            return 1
        finally:
            self._runs.close()
        return 0

    def _serve(self, serving: Serving, platform: Platform) -> None:
        self._report_callback(platform)
        self._send(protocol.Ready())
        try:
            while (message := self._receive()) is not None:
                if isinstance(message, protocol.Drain):
                    self._send(self._drain(platform))
                elif isinstance(message, protocol.Schema):
                    serving.bodies.learn(message)
                elif isinstance(message, protocol.Work) and self._claims.claim():
                    if self._stop_requested:
                        break  # the parent sees that it was not begun
                    response = self._runs.run(serving.serve(message, self._claims.number + 1))
                    self._drained = False
                    self._report_callback(platform)
                    self._write(response)
        finally:
            if os.getpid() != self._pid:
                os.write(_STDERR, b"a process that the handler forked ends, because it returned from the handler\n")
                os._exit(1)
            if not self._drained and (problem := self._drain(platform).problem):
                os.write(_STDERR, f"the drain callback failed at the end of the worker: {problem}\n".encode())
            if platform.on_termination:
                self._runs.call(platform.on_termination)

    def _report_callback(self, platform: Platform) -> None:
        """Report a drain callback to the parent before the frame is completed."""
        if platform.on_drain and not self._has_reported_callback:
            self._has_reported_callback = True
            self._send(protocol.HasDrainCallback())

    def _drain(self, platform: Platform) -> protocol.Drained:
        try:
            if platform.on_drain:
                self._runs.call(platform.on_drain)
        except BaseException as cause:  # noqa: BLE001 boundary to user code: the parent logs it, the worker continues
            return protocol.Drained(trace_of(cause))
        self._drained = True
        return protocol.Drained()

    def _receive(self) -> protocol.ToWorker | None:
        while not self._received:
            # Before the test: a signal after the test must find the worker idle, or it would wait for ever.
            self._idle = True
            if self._stop_requested or self.acks.closed:
                self._idle = False
                return None
            self._runs.read()
            self._idle = False
        return self._received.popleft()

    def read(self) -> bool:
        """Take bytes of the parent, and wait for them; return whether there were any."""
        data = b""
        with contextlib.suppress(ConnectionError):  # the parent has ended
            data = self.end.recv(_READ_BYTES)
        for message in self._reader.feed(data):
            if isinstance(message, protocol.Acked):
                self.acks.answered(message)
            else:
                self._received.append(message)
        if not data:
            self.acks.close()
        return bool(data)

    def _send(self, message: protocol.ToParent) -> None:
        self._write(encode_frame(message))

    def _write(self, frame: bytearray) -> None:
        if os.getpid() != self._pid:
            sys.exit(
                1
            )  # a fork that returned from the handler: the parent would take its response for that of the next frame
        self.end.sendall(frame)
