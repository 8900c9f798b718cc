"""One worker process as the parent sees it: its wire, its output, the frame it is at, and how it ended."""

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
from typing import Any

from headrace.errors import WorkerLost
from headrace.functions import wire
from headrace.functions.output import WorkerOutput
from headrace.lifecycle import ChildProcess, Deadline, Service
from headrace.records import TopicPartition

log = logging.getLogger(__name__)

_OUTPUT_SECONDS = 0.5
_CALLBACK_SECONDS = 20.0
"""How long a drain callback may run, also when nobody waits for it any more."""


class WorkerProcess(asyncio.Protocol):
    """A started worker. It serves one frame at a time."""

    def __init__(self, label: str, on_idle: Callable[[], None]) -> None:
        """Prepare; `label` is for logs and messages, `on_idle` is called each time a frame has ended by an answer."""
        self.label = label
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the handler is loaded and set up; `WorkerLost` when that fails."""
        self.ended: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()
        """Done, with what is to be said about it, when the process is gone."""
        self.at_rest = asyncio.Event()
        self.at_rest.set()
        self.served = 0
        """Frames answered."""
        self._on_idle = on_idle
        self._reader = wire.FrameReader(wire.decode_to_parent)
        self._known_schemas: set[int] = set()
        self._answer: asyncio.Future[wire.Done | wire.Results] | None = None
        self._undrained: set[TopicPartition] = set()
        """Partitions whose events came since the drain callback was asked for last."""
        self._drained: asyncio.Future[wire.Drained] | None = None
        self._callback_limit: asyncio.TimerHandle | None = None
        """Ends a drain callback that takes too long; None while none runs."""
        self._has_drain_callback = False
        self._ended_records = 0
        self._frame_records = 0
        self._seen = (-1, 0.0)
        self._killed_because = ""
        self._timed_out = False
        self._output = WorkerOutput(label)
        self._output_transport: Any = None
        self._transport: Any = None
        self._child: ChildProcess | None = None

    async def start(self, owner: Service, setup: wire.Setup) -> None:
        """Start the process and send it its setup; `ready` says when it can serve.

        Raises:
            OSError: The machine has no room for another process.
        """
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        # A pipe of our own: with asyncio's, the end of the process is noticed only when nobody holds the pipe any more,
        # and a program that the handler has started may hold it for ever.
        read_end, write_end = os.pipe()
        reading = os.fdopen(read_end, "rb", 0)
        self._output_transport, _ = await loop.connect_read_pipe(lambda: self._output, reading)
        try:
            await self._start_child(owner, setup.folder, theirs, write_end)
            self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            self._output_transport.close()
            ours.close()
            self.kill("its start was broken off")
            raise
        finally:
            theirs.close()
            os.close(write_end)
        self._transport.write(wire.encode_frame(setup))

    async def _start_child(self, owner: Service, folder: str, theirs: socket.socket, output: int) -> None:
        # A file rather than shared memory of a name: it leaves nothing behind, however the two processes end.
        with tempfile.TemporaryFile() as shared:
            shared.truncate(mmap.PAGESIZE)
            self._progress = memoryview(mmap.mmap(shared.fileno(), mmap.PAGESIZE)).cast("Q")
            numbers = (theirs.fileno(), shared.fileno())
            # -P keeps the user's folder off the path until our own modules are loaded.
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
        if self.ended.done() or self._transport.is_closing():
            # A killed process closes its connection a moment before its end is known, and `ended` says what to say.
            raise self._lost((await asyncio.shield(self.ended)).description, 0)
        for schema_id in schemas.keys() - self._known_schemas:
            self._transport.write(wire.encode_frame(schemas[schema_id]))
            self._known_schemas.add(schema_id)
        self._answer = asyncio.get_running_loop().create_future()
        self._frame_records, self._seen = records, (-1, 0.0)
        self._undrained.add(partition)
        self.at_rest.clear()
        self._transport.write(frame)
        return await self._answer

    def must_drain(self, partitions: Collection[TopicPartition]) -> bool:
        """Whether the drain callback is due before these partitions are given up: not if a frame of others is at hand
        and the callback has followed every event of these."""
        pending = self._drained is not None and not self._drained.done()
        return self.at_rest.is_set() or pending or not self._undrained.isdisjoint(partitions)

    async def call_drain_callback(self, deadline: Deadline) -> None:
        """Let the handler's drain callback run behind the frame at hand, and wait for its end until the deadline.

        A worker whose callback has begun and does not end in time is killed, whatever waits behind it. A second call
        waits for the first.
        """
        if not self._has_drain_callback or self.ended.done() or self._transport.is_closing():
            return
        if self._drained is None or self._drained.done():
            self._drained = asyncio.get_running_loop().create_future()
            self._undrained.clear()
            self._transport.write(wire.encode_frame(wire.Drain()))
            if self.at_rest.is_set():
                self._drain_callback_begins()
        seconds = deadline.remaining_seconds
        await asyncio.wait([self._drained], timeout=seconds)
        if self._drained.done():
            if problem := self._drained.result().problem:
                log.warning("%s: its drain callback failed: %s", self.label, problem)
        elif seconds and self._callback_limit:
            self._kill_in_callback(seconds)
        else:
            log.warning("%s: its drain callback runs late: the partitions are given up before it", self.label)

    def check_time(self, now: float, limit_seconds: float) -> None:
        """Kill the process if it has been at the same record for longer than the limit."""
        if self.at_rest.is_set() or self._callback_limit:
            return
        begun = self._progress[0]
        if begun != self._seen[0]:
            self._seen = (begun, now)
        elif now - self._seen[1] >= limit_seconds:
            self._timed_out = True
            self.kill(f"timeout: an event took longer than {limit_seconds:g} s (spec.eventTimeout)")

    def kill(self, because: str) -> None:
        """SIGKILL; `ended` says why."""
        self._killed_because = self._killed_because or because
        if self._child:
            self._child.kill()

    async def stop(self, deadline: Deadline) -> None:
        """End the process: at rest by SIGTERM, so that its callbacks run; in the midst of a frame at once."""
        self._killed_because = self._killed_because or "stopped"
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
            self.kill(f"the worker does not speak our protocol: {cause}")

    def connection_lost(self, exc: Exception | None) -> None:
        # A worker without its wire is of no use; mostly it is dying anyway, and then its exit code says more.
        if self._child and self._child.running and not self.ended.done():
            asyncio.get_running_loop().call_later(_OUTPUT_SECONDS, self._kill_if_running)

    def _take(self, message: wire.ToParent) -> None:
        if isinstance(message, wire.Done | wire.Results):
            if self.at_rest.is_set() or (type(message) is wire.Results and len(message.results) != self._frame_records):
                self.kill("the worker answered something it was not asked")
                return
            self._ended_records += self._frame_records
            self.served += 1
            answer, self._answer = self._answer, None
            if answer and not answer.done():
                answer.set_result(message)
            self.at_rest.set()
            if self._drained and not self._drained.done():
                self._drain_callback_begins()
            self._on_idle()
        elif isinstance(message, wire.HasDrainCallback):
            self._has_drain_callback = True
        elif isinstance(message, wire.Drained):
            self._drain_callback_ends(message)
        elif isinstance(message, wire.Unfit):
            self._killed_because = message.reason
        elif not self.ready.done():
            self.ready.set_result(None)

    def _drain_callback_begins(self) -> None:
        """The worker does one thing after the other: all that was sent before the `Drain` is answered now."""
        loop = asyncio.get_running_loop()
        self._callback_limit = loop.call_later(_CALLBACK_SECONDS, self._kill_in_callback, _CALLBACK_SECONDS)

    def _drain_callback_ends(self, message: wire.Drained) -> None:
        if self._callback_limit:
            self._callback_limit.cancel()
            self._callback_limit = None
        if self._drained and not self._drained.done():
            self._drained.set_result(message)

    def _kill_in_callback(self, seconds: float) -> None:
        self.kill(f"timeout: its drain callback took longer than {seconds:.3g} s")

    def _kill_if_running(self) -> None:
        if self._child and self._child.running:
            self.kill("the worker closed its connection to the parent")

    def _exited(self, owner: Service, code: int) -> None:
        owner.spawn(self._bury(code), f"end of {self.label}")

    async def _bury(self, code: int) -> None:
        """Say how the process ended, once what it has written last is read."""
        # What the handler has started in the worker's process group must not outlive it, nor hold its output open.
        self.kill("")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._output.ended.wait(), _OUTPUT_SECONDS)
        self._output_transport.close()
        if self._transport:
            self._transport.close()
        why = self._killed_because or _exit_text(code)
        tail = self._output.tail
        text = f"{self.label} ended: {why}" + (f"; it wrote last:\n{tail}" if tail and not self._killed_because else "")
        begun = self._progress[0] - self._ended_records if self._answer else 0
        if not self.ready.done():
            self.ready.set_exception(self._lost(text, 0))
            self.ready.exception()  # nobody may be waiting any more; then asyncio would complain
        self.ended.set_result(self._lost(text, 0))
        if self._answer and not self._answer.done():
            self._answer.set_exception(self._lost(text, begun))
        self._drain_callback_ends(wire.Drained())
        self.at_rest.set()

    def _lost(self, text: str, begun: int) -> WorkerLost:
        return WorkerLost(text, worker=self.label, begun=begun, timeout=self._timed_out)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"
