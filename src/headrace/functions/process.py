"""One worker process in the parent: its wire, its output, its present frame, and how it ended."""

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from headrace.errors import WorkerLost
from headrace.functions import wire
from headrace.functions.worker_log import WorkerOutput
from headrace.lifecycle import ChildProcess, Deadline, Service
from headrace.records import TopicPartition

log = logging.getLogger(__name__)

_OUTPUT_SECONDS = 0.5
_CALLBACK_SECONDS = 20.0
"""The longest time of a drain callback, also after the deadline of its caller."""


class _Progress:
    """The number of records that the worker has begun, in memory that both processes share."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.served = 0
        """Frames answered."""
        self._begun = memoryview(memory).cast("Q")
        self._ended_records = 0
        self._frame_records = 0
        self._seen = (-1, 0.0)

    @property
    def begun(self) -> int:
        """Records of the present frame that the worker has begun."""
        return self._begun[0] - self._ended_records

    def frame_begins(self, records: int) -> None:
        self._frame_records, self._seen = records, (-1, 0.0)

    def frame_ended(self) -> None:
        self._ended_records += self._frame_records
        self.served += 1

    def fits(self, answer: wire.Done | wire.Results) -> bool:
        """Return whether an answer has a result for each record of the present frame."""
        return isinstance(answer, wire.Done) or len(answer.results) == self._frame_records

    def is_stuck(self, now: float, limit_seconds: float) -> bool:
        """Return whether the worker has been at the same record for longer than the limit; ask again and again."""
        if self.begun != self._seen[0]:
            self._seen = (self.begun, now)
        return now - self._seen[1] >= limit_seconds


class _DrainCallback:
    """The handler's drain callback, which the worker runs after the frame that it serves."""

    def __init__(self, on_timeout: Callable[[float], None]) -> None:
        self.exists = False
        self.undrained: set[TopicPartition] = set()
        """Partitions with events since the last request."""
        self.ended: asyncio.Future[wire.Drained] | None = None
        """The end of the last request; None before the first one."""
        self.limit: asyncio.TimerHandle | None = None
        """Ends a callback that takes too long; None while none runs."""
        self._on_timeout = on_timeout

    @property
    def pending(self) -> bool:
        """Whether a request has not ended."""
        return self.ended is not None and not self.ended.done()

    def requested(self) -> asyncio.Future[wire.Drained]:
        """Begin a request and return its end."""
        self.ended = asyncio.get_running_loop().create_future()
        self.undrained.clear()
        return self.ended

    def begins(self) -> None:
        """Start the time limit: the worker has answered everything that was sent before the request."""
        if self.pending:
            self.limit = asyncio.get_running_loop().call_later(_CALLBACK_SECONDS, self._on_timeout, _CALLBACK_SECONDS)

    def ends(self, message: wire.Drained) -> None:
        if self.limit:
            self.limit.cancel()
            self.limit = None
        if self.ended and not self.ended.done():
            self.ended.set_result(message)


class _Kill(NamedTuple):
    reason: str = ""
    timed_out: bool = False


class WorkerProcess(asyncio.Protocol):
    """A started worker. It serves one frame at a time."""

    def __init__(self, label: str, on_idle: Callable[[], None]) -> None:
        """Prepare; `label` is for logs and messages, `on_idle` is called each time a frame has ended by an answer."""
        self.label = label
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the handler is loaded and set up; `WorkerLost` when that fails."""
        self.ended: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the process has ended."""
        self.at_rest = asyncio.Event()
        self.at_rest.set()
        self._on_idle = on_idle
        self._reader = wire.FrameReader(wire.decode_to_parent)
        self._known_schemas: set[int] = set()
        self._answer: asyncio.Future[wire.Done | wire.Results] | None = None
        self._drain_callback = _DrainCallback(self._kill_in_callback)
        self._killed = _Kill()
        self._output = WorkerOutput(label)
        self._progress: _Progress | None = None
        self._transport: Any = None
        self._child: ChildProcess | None = None

    @property
    def served(self) -> int:
        """Frames answered."""
        return self._progress.served if self._progress else 0

    async def start(self, owner: Service, setup: wire.Setup) -> None:
        """Start the process and send it its setup; `ready` is done when it can serve.

        Raises:
            OSError: The machine cannot run another process.
        """
        own_end, worker_end = socket.socketpair()
        loop = asyncio.get_running_loop()
        # Not asyncio's pipe: with it, the end of the process is noticed only when no process holds the pipe any more,
        # and a program that the handler has started may hold it for ever.
        read_end, write_end = os.pipe()
        reading = os.fdopen(read_end, "rb", 0)
        await loop.connect_read_pipe(lambda: self._output, reading)
        try:
            await self._start_child(owner, setup.folder, worker_end, write_end)
            self._transport, _ = await loop.create_unix_connection(lambda: self, sock=own_end)
        except BaseException:
            self._output.close()
            own_end.close()
            self.kill("its start was broken off")
            raise
        finally:
            worker_end.close()
            os.close(write_end)
        self._transport.write(wire.encode_frame(setup))

    async def _start_child(self, owner: Service, folder: str, worker_end: socket.socket, output: int) -> None:
        # A file rather than shared memory of a name: it leaves nothing behind, however the two processes end.
        with tempfile.TemporaryFile() as shared:
            shared.truncate(mmap.PAGESIZE)
            self._progress = _Progress(mmap.mmap(shared.fileno(), mmap.PAGESIZE))
            numbers = (worker_end.fileno(), shared.fileno())
            # -P keeps the user's folder off the path until Headrace's modules are loaded.
            self._child = await ChildProcess.start(
                owner,
                self.label,
                [sys.executable, "-P", "-u", "-m", "headrace.functions.worker", *map(str, numbers)],
                lambda code: self._exited(owner, code),
                pass_fds=numbers,
                cwd=folder,
                stdout=output,
                stderr=output,
            )

    async def serve(
        self, partition: TopicPartition, frame: bytearray, records: int, schemas: Mapping[int, wire.Schema]
    ) -> wire.Done | wire.Results:
        """Send one frame of work and return its answer. If cancelled, the worker still ends the frame.

        Args:
            partition: Whose records they are.
            frame: The encoded `Work`.
            records: How many records it holds.
            schemas: Schemas its records need, by id.

        Raises:
            WorkerLost: The process ended before it answered. Its parameter `begun` is how many of the records it had
                begun, the last of which it was at; 0 means it had not touched the frame. `timeout` is whether it was
                killed for taking too long.
        """
        if self._progress is None or self.ended.done() or self._transport.is_closing():
            # A killed process closes its connection a moment before its end is known, and `ended` has the reason.
            raise self._lost((await asyncio.shield(self.ended)).description, 0)
        for schema_id in schemas.keys() - self._known_schemas:
            self._transport.write(wire.encode_frame(schemas[schema_id]))
            self._known_schemas.add(schema_id)
        self._answer = asyncio.get_running_loop().create_future()
        self._progress.frame_begins(records)
        self._drain_callback.undrained.add(partition)
        self.at_rest.clear()
        self._transport.write(frame)
        return await self._answer

    def must_drain(self, partitions: Collection[TopicPartition]) -> bool:
        """Whether the drain callback is due before these partitions are given up: not while it serves a frame of
        others, if the callback has followed every event of these."""
        callback = self._drain_callback
        return self.at_rest.is_set() or callback.pending or not callback.undrained.isdisjoint(partitions)

    async def call_drain_callback(self, deadline: Deadline) -> None:
        """Let the handler's drain callback run after the present frame, and wait for its end until the deadline.

        A worker whose callback has begun and does not end in time is killed, whatever waits behind it. A second call
        waits for the first.
        """
        callback = self._drain_callback
        if not callback.exists or self.ended.done() or self._transport.is_closing():
            return
        ended = callback.ended
        if ended is None or ended.done():
            ended = callback.requested()
            self._transport.write(wire.encode_frame(wire.Drain()))
            if self.at_rest.is_set():
                callback.begins()
        seconds = deadline.remaining_seconds
        await asyncio.wait([ended], timeout=seconds)
        if ended.done():
            if problem := ended.result().problem:
                log.warning("%s: its drain callback failed: %s", self.label, problem)
        elif seconds and callback.limit:
            self._kill_in_callback(seconds)
        else:
            log.warning("%s: its drain callback runs late: the partitions are given up before it", self.label)

    def check_time(self, now: float, limit_seconds: float) -> None:
        """Kill the process if it has been at the same record for longer than the limit."""
        if self.at_rest.is_set() or self._drain_callback.limit or not self._progress:
            return
        if self._progress.is_stuck(now, limit_seconds):
            self.kill(f"timeout: an event took longer than {limit_seconds:g} s (spec.eventTimeout)", timed_out=True)

    def kill(self, reason: str, *, timed_out: bool = False) -> None:
        """SIGKILL; `ended` has the reason."""
        self._killed = _Kill(self._killed.reason or reason, self._killed.timed_out or timed_out)
        if self._child:
            self._child.kill()

    async def stop(self, deadline: Deadline) -> None:
        """End the process: at rest by SIGTERM, so that its callbacks run; in the middle of a frame at once."""
        self._killed = self._killed._replace(reason=self._killed.reason or "stopped")
        if self._child:
            if not self.at_rest.is_set():
                self._child.kill()
            await self._child.stop(deadline)
            await asyncio.wait([self.ended])

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except wire.WireBroken as cause:
            self.kill(f"the worker does not follow the protocol: {cause}")

    def connection_lost(self, exc: Exception | None) -> None:
        # A worker without its wire is of no use; mostly it is ending anyway, and then its exit code has the reason.
        if self._child and self._child.running and not self.ended.done():
            asyncio.get_running_loop().call_later(_OUTPUT_SECONDS, self._kill_if_running)

    def _take(self, message: wire.ToParent) -> None:
        if isinstance(message, wire.Done | wire.Results):
            if self.at_rest.is_set() or not self._progress or not self._progress.fits(message):
                self.kill("the worker sent an answer without a request")
                return
            self._progress.frame_ended()
            answer, self._answer = self._answer, None
            if answer and not answer.done():
                answer.set_result(message)
            self.at_rest.set()
            self._drain_callback.begins()
            self._on_idle()
        elif isinstance(message, wire.HasDrainCallback):
            self._drain_callback.exists = True
        elif isinstance(message, wire.Drained):
            self._drain_callback.ends(message)
        elif isinstance(message, wire.Unfit):
            self._killed = self._killed._replace(reason=message.reason)
        elif not self.ready.done():
            self.ready.set_result(None)

    def _kill_in_callback(self, seconds: float) -> None:
        self.kill(f"timeout: its drain callback took longer than {seconds:.3g} s")

    def _kill_if_running(self) -> None:
        if self._child and self._child.running:
            self.kill("the worker closed its connection to the parent")

    def _exited(self, owner: Service, code: int) -> None:
        owner.spawn(self._bury(code), f"end of {self.label}")

    async def _bury(self, code: int) -> None:
        """Report how the process ended, once its last output is read."""
        # What the handler has started in the worker's process group must end with it and must not hold its output open.
        self.kill("")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._output.ended.wait(), _OUTPUT_SECONDS)
        self._output.close()
        if self._transport:
            self._transport.close()
        reason = self._killed.reason
        why = reason or _exit_text(code)
        tail = self._output.tail
        text = f"{self.label} ended: {why}" + (f"; it wrote last:\n{tail}" if tail and not reason else "")
        begun = self._progress.begun if self._answer and self._progress else 0
        if not self.ready.done():
            self.ready.set_exception(self._lost(text, 0))
            self.ready.exception()  # retrieved here, or asyncio would log it if there is no waiter
        self.ended.set_result(self._lost(text, 0))
        if self._answer and not self._answer.done():
            self._answer.set_exception(self._lost(text, begun))
        self._drain_callback.ends(wire.Drained())
        self.at_rest.set()

    def _lost(self, text: str, begun: int) -> WorkerLost:
        return WorkerLost(text, worker=self.label, begun=begun, timeout=self._killed.timed_out)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"
