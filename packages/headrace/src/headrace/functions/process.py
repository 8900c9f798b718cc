"""Starts one worker process, and is it in the parent: its connection, output, frames in flight, and how it ended."""

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.errors import WorkerLost
from headrace.framing import FrameReader, ProtocolBroken, encode_frame
from headrace.functions import protocol
from headrace.functions.frames import Frame, FramesInFlight, Response, open_shared_page
from headrace.functions.worker_log import WorkerOutput
from headrace.records import TopicPartition
from headrace.runtime import ChildProcess, Deadline, Service
from headrace.runtime.memory import memory_bytes

log = logging.getLogger(__name__)
_OUTPUT_SECONDS = 0.5
_SEND_BYTES = 1 << 20
"""The socket holds a whole frame, so that the worker can read it at once; the system may allow less."""
_CALLBACK_SECONDS = 20.0
"""Time limit of a drain callback, also after the deadline of its caller."""


class WorkerConnection(asyncio.Protocol):
    """Sends messages to a worker, and takes those that it sends."""

    def __init__(
        self, take: Callable[[protocol.ToParent], None], on_broken: Callable[[str], None], on_closed: Callable[[], None]
    ) -> None:
        """Prepare; `on_broken` gets the reason why the worker's bytes are not messages."""
        self.closed = asyncio.Event()
        """Set while it is not connected."""
        self.closed.set()
        self._take = take
        self._on_broken = on_broken
        self._on_closed = on_closed
        self._reader = FrameReader(protocol.decode_to_parent)
        self._known_schemas: set[int] = set()
        self._transport: Any = None

    async def open(self, end: socket.socket, setup: protocol.Setup) -> None:
        """Connect, and send the setup."""
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)
        transport.write(encode_frame(setup))
        self._transport = transport

    @property
    def has_begun(self) -> bool:
        """Whether the setup has been sent."""
        return self._transport is not None

    @property
    def is_closing(self) -> bool:
        """Whether the worker gets nothing more."""
        return self._transport is not None and bool(self._transport.is_closing())

    def send(self, message: protocol.ToWorker) -> None:
        self._transport.write(encode_frame(message))

    def send_schemas(self, schemas: Mapping[int, protocol.Schema]) -> None:
        """Send those of the schemas that the worker does not know."""
        for schema_id in schemas.keys() - self._known_schemas:
            self.send(schemas[schema_id])
            self._known_schemas.add(schema_id)

    def send_work(self, frame: bytearray) -> None:
        """Send a frame of work, after its schemas."""
        self._transport.write(frame)

    def end(self) -> None:
        """Let the worker read the end of the messages."""
        if self.has_begun and not self.is_closing:
            self._transport.write_eof()

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.closed.clear()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except ProtocolBroken as cause:
            self._on_broken(f"the worker does not follow the protocol: {cause}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._on_closed()


class _DrainCallback:
    """The handler's drain callback, which the worker runs after the frames that were sent before the request."""

    def __init__(self, on_timeout: Callable[[float], None]) -> None:
        self.exists = False
        self.undrained: set[TopicPartition] = set()
        """Partitions with events since the last request."""
        self.ended: asyncio.Future[protocol.Drained] | None = None
        """Done when the last request has completed; None before the first one."""
        self.limit: asyncio.TimerHandle | None = None
        """Kills a worker whose callback takes too long; None while no callback runs."""
        self._on_timeout = on_timeout
        self._after: Set[int] = frozenset()  # frames that were sent before the request

    @property
    def pending(self) -> bool:
        return self.ended is not None and not self.ended.done()

    def requested(self, in_flight: Set[int]) -> asyncio.Future[protocol.Drained]:
        """Begin a request behind these frames, and return its end."""
        self.ended = asyncio.get_running_loop().create_future()
        self.undrained.clear()
        self._after = in_flight
        self.follow(in_flight)
        return self.ended

    def follow(self, in_flight: Set[int]) -> None:
        """Start the time limit once every frame that was sent before the request has left."""
        self._after &= in_flight
        if self.pending and not self._after and not self.limit:
            self.limit = asyncio.get_running_loop().call_later(_CALLBACK_SECONDS, self._on_timeout, _CALLBACK_SECONDS)

    def ends(self, message: protocol.Drained) -> None:
        if self.limit:
            self.limit.cancel()
            self.limit = None
        if self.ended and not self.ended.done():
            self.ended.set_result(message)


class _Kill(NamedTuple):
    reason: str = ""
    error: str = ""
    """The error of the record at work; empty if the record is not to blame."""


class WorkerProcess:
    """A worker process. It serves one frame at a time, and the next one waits in it."""

    acknowledge: Callable[[protocol.Ack], str] = staticmethod(
        lambda _: "the function has no trigger with explicitAckMode"
    )
    """Takes an explicit acknowledgement; returns why that is not possible, else an empty text."""

    def __init__(
        self, label: str, on_ended: Callable[[int, float], None], about: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Prepare; `on_ended` gets the records and seconds of each completed frame, and 0 and 0 for a recalled one.

        `about` are fields of its lines in the log.
        """
        self.label = label
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the handler is loaded and set up; `WorkerLost` when that fails."""
        self.ended: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the process has ended."""
        self.at_rest = asyncio.Event()
        self.at_rest.set()
        self._on_ended = on_ended
        self._connection = WorkerConnection(self._take, self.kill, self._disconnected)
        self._drain_callback = _DrainCallback(self._kill_in_callback)
        self._killed = _Kill()
        self._output = WorkerOutput(label, about)
        self._frames: FramesInFlight | None = None
        self._child: ChildProcess | None = None
        self._starting = asyncio.Lock()

    @property
    def served(self) -> int:
        """Completed frames."""
        return self._frames.served if self._frames else 0

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the process; 0 if it is not known."""
        return memory_bytes(self._child.pid) if self._child and self._child.running else 0

    async def start(self, owner: Service, setup: protocol.Setup) -> None:
        """Start the process and send it its setup; `ready` is done when it can serve.

        Raises:
            OSError: The machine cannot run another process.
        """
        async with self._starting:
            await self._start(owner, setup)

    async def _start(self, owner: Service, setup: protocol.Setup) -> None:
        own_end, worker_end = socket.socketpair()
        own_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        loop = asyncio.get_running_loop()
        # Not asyncio's pipe: it reports the end of the process only when every holder of the pipe has closed it,
        # and a program that the handler has started may never do that.
        read_end, write_end = os.pipe()
        reading = os.fdopen(read_end, "rb", 0)
        await loop.connect_read_pipe(lambda: self._output, reading)
        try:
            await self._start_child(owner, setup.folder, worker_end, write_end)
            await self._connection.open(own_end, setup)
        except BaseException:
            self._output.close()
            own_end.close()
            if self._frames:
                self._frames.close()
            self.kill("its start was cancelled")
            raise
        finally:
            worker_end.close()
            os.close(write_end)

    async def _start_child(self, owner: Service, folder: str, worker_end: socket.socket, output: int) -> None:
        shared = open_shared_page()
        try:
            self._frames = FramesInFlight(mmap.mmap(shared, mmap.PAGESIZE))
            numbers = (worker_end.fileno(), shared, self._frames.claims)
            # -P keeps the user's folder off the path until Headrace's modules are loaded.
            self._child = await ChildProcess.start(
                owner,
                self.label,
                [sys.executable, "-P", "-u", "-m", "headrace.functions.worker", *map(str, numbers)],
                lambda code: owner.spawn(self._bury(code), f"end of {self.label}"),
                pass_fds=numbers,
                cwd=folder,
                stdout=output,
                stderr=output,
            )
        finally:
            os.close(shared)

    async def serve(
        self, partition: TopicPartition, frame: bytearray, records: int, schemas: Mapping[int, protocol.Schema]
    ) -> Response:
        """Send one frame of work and return its response: `NOTHING_BEGUN` if it was recalled.

        If cancelled, a frame that was begun still completes, and another one is recalled.

        Raises:
            WorkerLost: The process ended before it completed the frame. Parameter `begun` is the number of records that
                it had begun; the last of them was at work. 0 means that it had not begun the frame. `error` is
                `timeout` or `memory` if the process was killed for that, else empty.
        """
        if not self._connection.has_begun:  # its caller was assigned the process before this one
            raise self._lost(f"{self.label} is not started yet", 0)
        if self._ends:
            raise self._lost((await asyncio.shield(self.ended)).description, 0)
        assert self._frames
        self._connection.send_schemas(schemas)
        response = self._frames.add(records, partition)
        self._drain_callback.undrained.add(partition)
        self.at_rest.clear()
        self._connection.send_work(frame)
        try:
            return await asyncio.shield(response)
        except asyncio.CancelledError:
            self.recall()
            raise

    def recall(self) -> bool:
        """Recall the frames that the worker has not begun; return whether there were any."""
        recalled = self._frames.recall() if self._frames and not self.ended.done() else 0
        for _ in range(recalled):
            self._frame_left(0, 0.0)
        return recalled > 0

    def stop_frames(self, partitions: Collection[TopicPartition]) -> Frame | None:
        """Stop the worker from beginning further records of these partitions; return their frame that is at work."""
        if self.ended.done() or not self._frames or not self._frames.has(partitions):
            return None
        self.recall()
        return self._frames.stop(partitions)

    async def give_up(self, partitions: Collection[TopicPartition], deadline: Deadline) -> None:
        """Complete the work for these partitions, then run the drain callback if it is due; return by the deadline.

        A worker that is still at an event of them is killed then. That event is not to blame.
        """
        ends = [self._end_frame(frame, deadline)] if (frame := self.stop_frames(partitions)) else []
        ends += [self.call_drain_callback(deadline)] if self.must_drain(partitions) else []
        await asyncio.gather(*ends)

    async def _end_frame(self, frame: Frame, deadline: Deadline) -> None:
        """Wait for the end of a frame, and kill the process if it does not end in time."""
        await asyncio.wait([frame.response], timeout=deadline.remaining_seconds)
        if not frame.response.done():
            self.kill(f"an event of {frame.partition} was still running when the partition was revoked")

    def must_drain(self, partitions: Collection[TopicPartition]) -> bool:
        """Whether the drain callback is due before these partitions are released.

        It is not due while the worker serves other partitions, if it has run since the last event of these.
        """
        callback = self._drain_callback
        return self.at_rest.is_set() or callback.pending or not callback.undrained.isdisjoint(partitions)

    async def call_drain_callback(self, deadline: Deadline) -> None:
        """Let the handler's drain callback run after the frames in flight, and wait for its end until the deadline.

        A worker whose callback has begun and does not complete in time is killed, with all frames that wait behind it.
        A second call waits for the first.
        """
        callback = self._drain_callback
        if not callback.exists or self._ends:
            return
        ended = callback.ended
        if ended is None or ended.done():
            ended = callback.requested(self._frames.numbers if self._frames else frozenset())
            self._connection.send(protocol.Drain())
        seconds = deadline.remaining_seconds
        await asyncio.wait([ended], timeout=seconds)
        if ended.done():
            if problem := ended.result().problem:
                log.warning("%s: its drain callback failed: %s", self.label, problem)
        elif seconds and callback.limit:
            self._kill_in_callback(seconds)
        else:
            log.warning(
                "%s: its drain callback has not begun in time; the partitions are released without it", self.label
            )

    def check_time(self, now: float, limit_seconds: float) -> None:
        """Kill the process if it has been at the same record for longer than the limit."""
        if self.at_rest.is_set() or not self._frames:
            return
        if self._drain_callback.limit:
            self._frames.restart_watch()
        elif self._frames.is_stuck(now, limit_seconds):
            self.kill(f"timeout: an event took longer than {limit_seconds:g} s (spec.eventTimeout)", error="timeout")

    def kill(self, reason: str, *, error: str = "") -> None:
        """Send SIGKILL; `ended` gets the reason. With an error, the record at work is to blame."""
        self._killed = _Kill(self._killed.reason or reason, self._killed.error or error)
        if self._child:
            self._child.kill()

    async def stop(self, deadline: Deadline, reason: str = "stopped") -> None:
        """End the process: at rest by SIGTERM, so that its callbacks run; in the middle of a frame at once."""
        self._killed = self._killed._replace(reason=self._killed.reason or reason)
        async with self._starting:  # a cancelled start leaves a process that no task waits for
            pass
        if self._child:
            if not self.at_rest.is_set():
                self._child.kill()
            else:
                self._connection.end()  # a handler may have taken the signal for itself
            await self._child.stop(deadline)
            await asyncio.wait([self.ended])

    def _disconnected(self) -> None:
        # A worker without a connection is useless. Mostly it is ending already, and its exit code has the reason.
        if self._child and self._child.running and not self.ended.done():
            asyncio.get_running_loop().call_later(_OUTPUT_SECONDS, self._kill_if_running)

    def _take(self, message: protocol.ToParent) -> None:
        if isinstance(message, Response):
            assert self._frames  # the connection is opened after it
            self._frame_left(self._frames.completed(message), message.seconds)
        elif isinstance(message, protocol.Ack):
            if self._ends:  # it gets no response any more, so the ack must not count
                return
            self._connection.send(protocol.Acked(message.number, self.acknowledge(message)))
        elif isinstance(message, protocol.HasDrainCallback):
            self._drain_callback.exists = True
        elif isinstance(message, protocol.Drained):
            self._drain_callback.ends(message)
        elif isinstance(message, protocol.Unfit):
            self._killed = self._killed._replace(reason=message.reason)
        elif not self.ready.done():
            self.ready.set_result(None)

    def _frame_left(self, records: int, seconds: float) -> None:
        in_flight = self._frames.numbers if self._frames else frozenset()
        if not in_flight:
            self.at_rest.set()
        self._drain_callback.follow(in_flight)
        self._on_ended(records, seconds)

    def _kill_in_callback(self, seconds: float) -> None:
        self.kill(f"timeout: its drain callback took longer than {seconds:.3g} s")

    def _kill_if_running(self) -> None:
        if self._child and self._child.running:
            self.kill("the worker closed its connection to the parent")

    async def _bury(self, code: int) -> None:
        """Report how the process ended, once its last output is read."""
        # Programs of the handler in its process group must end with it, because they hold its output open.
        self.kill("")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_SECONDS):
                await self._connection.closed.wait()  # responses that it has sent count
                await self._output.ended.wait()
        self._output.close()
        self._connection.close()
        reason, error = self._killed
        why, tail = reason or _exit_text(code), self._output.tail
        text = f"{self.label} ended: {why}"
        text += f"; it wrote last:\n{tail}" if tail and (error or not reason) else ""
        if not self.ready.done():
            self.ready.set_exception(self._lost(text, 0))
            self.ready.exception()  # retrieved here, or asyncio would log it without a waiter
        self.ended.set_result(self._lost(text, 0))
        if self._frames:
            self._frames.lose(lambda begun: self._lost(text, begun))
            self._frames.close()
        self._drain_callback.ends(protocol.Drained())
        self.at_rest.set()

    @property
    def _ends(self) -> bool:
        """Whether nothing can be sent to it any more; `ended` gets the reason soon."""
        return bool(self._killed.reason) or self.ended.done() or self._connection.is_closing

    def _lost(self, text: str, begun: int) -> WorkerLost:
        return WorkerLost(text, worker=self.label, begun=begun, error=self._killed.error)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"
