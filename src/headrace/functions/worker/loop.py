"""The worker's loop: load, set up, then read a frame, serve it, answer, until the parent closes or SIGTERM comes.

A plain handler runs without an event loop, which is quickest to start and to run. An async one runs inside asyncio,
so that its background tasks go on while the worker waits for records.
"""

import mmap
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Coroutine
from types import CoroutineType
from typing import Any

from headrace.functions import wire
from headrace.functions.sdk import Context, Platform
from headrace.functions.worker.handler import Unusable, is_async, load_handler, trace_of
from headrace.functions.worker.serving import Serving

_READ_BYTES = 262_144


class _Plain:
    """The worker's one coroutine without an event loop: reading blocks, so it never waits."""

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        try:
            main.send(None)
        except StopIteration:
            return

    async def read(self, end: socket.socket) -> bytes:
        return end.recv(_READ_BYTES)

    async def resolve(self, coroutine: Awaitable[Any]) -> Any:
        """Run what a plain function that wraps an async one has returned."""
        import asyncio

        if not hasattr(self, "_loop"):
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(coroutine)


class _InAsyncio(_Plain):
    """The same inside asyncio."""

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        import asyncio

        asyncio.run(main)

    async def read(self, end: socket.socket) -> bytes:
        import asyncio

        end.setblocking(False)
        try:
            return await asyncio.get_running_loop().sock_recv(end, _READ_BYTES)
        finally:
            end.setblocking(True)

    async def resolve(self, coroutine: Awaitable[Any]) -> Any:
        return await coroutine


class Worker:
    """One worker process's life."""

    def __init__(self, end: socket.socket, progress: mmap.mmap) -> None:
        self._end = end
        self._progress = progress
        self._reader = wire.FrameReader(wire.decode_to_worker)
        self._arrived: deque[wire.ToWorker] = deque()
        self._drive = _Plain()
        self._idle = False
        self._end_asked = False
        self._callback_told = False
        self._drained = False  # the drain callback has run since the last record

    def ask_to_end(self, *_: object) -> None:
        """End now when idle, else after the frame at hand; a signal handler."""
        self._end_asked = True
        if self._idle:
            # Raised out of the read. A frame that arrives in this instant is lost with the process, and the parent,
            # which sees that none of its records was begun, delivers it elsewhere.
            sys.exit(0)

    def receive_setup(self) -> wire.Setup:
        """Wait for the first message."""
        while not self._arrived:
            data = self._end.recv(_READ_BYTES)
            if not data:
                sys.exit(0)
            self._arrived.extend(self._reader.feed(data))
        setup = self._arrived.popleft()
        assert isinstance(setup, wire.Setup)
        return setup

    def work(self, setup: wire.Setup, context: Context) -> int:
        """Load the handler, serve until asked to end, and return the exit code."""
        try:
            handler, init_context = load_handler(setup.handler, setup.folder)
            if is_async(handler) or is_async(init_context):
                self._drive = _InAsyncio()
            serving = Serving(handler, context, setup, self._progress, self._drive.resolve)
            self._drive.run(self._live(serving, context, init_context))
        except Unusable as cause:
            self._send(wire.encode_frame(wire.Unfit(str(cause))))
            return 1
        return 0

    async def _live(self, serving: Serving, context: Context, init_context: Any) -> None:
        if init_context is not None:
            try:
                await self._call(init_context, context)
            except BaseException as cause:  # boundary to user code: readiness and log show the trace
                raise Unusable(f"init_context failed: {trace_of(cause)}") from cause
        platform = context.platform
        self._tell_callback(platform)
        self._send(wire.encode_frame(wire.Ready()))
        try:
            while (message := await self._receive()) is not None:
                if isinstance(message, wire.Drain):
                    self._send(wire.encode_frame(await self._drain(platform)))
                elif frame := await serving.answer(message):
                    self._drained = False
                    self._tell_callback(platform)
                    self._send(frame)
        finally:
            if platform.on_drain and not self._drained:
                await self._call(platform.on_drain)
            if platform.on_termination:
                await self._call(platform.on_termination)

    def _tell_callback(self, platform: Platform) -> None:
        """Tell the parent of a drain callback, before it takes the worker for idle."""
        if platform.on_drain and not self._callback_told:
            self._callback_told = True
            self._send(wire.encode_frame(wire.HasDrainCallback()))

    async def _drain(self, platform: Platform) -> wire.Drained:
        try:
            if platform.on_drain:
                await self._call(platform.on_drain)
        except BaseException as cause:  # noqa: BLE001 boundary to user code: the parent logs it, the worker goes on
            return wire.Drained(trace_of(cause))
        self._drained = True
        return wire.Drained()

    async def _receive(self) -> wire.ToWorker | None:
        while not self._arrived:
            # Before the test: a signal that comes after it must find the worker idle, or it would wait for ever.
            self._idle = True
            if self._end_asked:
                return None
            data = await self._drive.read(self._end)
            self._idle = False
            if not data:
                return None
            self._arrived.extend(self._reader.feed(data))
        return self._arrived.popleft()

    async def _call(self, function: Any, *arguments: Any) -> None:
        answer = function(*arguments)
        if type(answer) is CoroutineType:
            await self._drive.resolve(answer)

    def _send(self, frame: bytearray) -> None:
        self._end.sendall(frame)
