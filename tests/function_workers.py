"""A function's folder, and its service with a fake of Kafka; workers are processes, or threads of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import socket
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.config.model import HeadraceConfig
from headrace.delivery.outcomes import Delivery, Reply
from headrace.formats.registry import RegisteredSchema, SchemaRegistry
from headrace.functions import protocol
from headrace.functions.destination import FunctionDestination
from headrace.functions.frames import FramesInFlight, open_shared_page
from headrace.functions.load import load_function
from headrace.functions.process import WorkerProcess
from headrace.functions.spec import FunctionSpec
from headrace.functions.triggers.trigger import Trigger
from headrace.functions.worker.handler import context_of, log_line
from headrace.functions.worker.loop import Worker
from headrace.functions.workers import FunctionService
from headrace.kafka import TopicDirectory
from headrace.records import OutgoingRecord, Produced, Record, TopicPartition
from headrace.runtime import Deadline, Service, SystemClock

Write = Callable[..., Path]
Run = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
PARTITION = TopicPartition("flights", 3)

WAITS = """
    import pathlib, threading, time
    def handler(context, event):
        name = event.body.decode()
        with open("calls", "a") as calls:
            calls.write(f"{name} {threading.get_native_id()}\\n")
        while name.startswith("wait") and not pathlib.Path("go " + name).exists():
            time.sleep(0.005)
"""
"""An event `wait...` ends when the file `go wait...` is there."""


class Running:
    """A started function with its destination and a fake of Kafka and registry."""

    def __init__(self, spec: FunctionSpec, trigger: Trigger | None = None) -> None:
        self.clock = SystemClock()
        trigger = trigger or spec.triggers[0]
        [pool] = [pool for pool in spec.worker_pools if trigger in pool]
        self.service = FunctionService(spec, pool, self.clock)
        self.written: list[OutgoingRecord] = []
        self.schemas: dict[int, Any] = {}
        self.tasks: list[asyncio.Task[None]] = []
        """Of `begin`."""
        self.produce: Any = self._produce
        self.destination = FunctionDestination(
            self.service,
            trigger,
            self.clock,
            produce=lambda records: self.produce(records),
            registry=cast(SchemaRegistry, self),
            topics=cast(TopicDirectory, self),
        )

    async def deliver(
        self, *values: bytes | None, first: int = 0, partition: int = 3, keys: Sequence[bytes] = (), **fields: Any
    ) -> Sequence[Reply]:
        records = [
            Record(
                "flights", partition, first + index, 1_700_000_000_123, keys[index] if keys else b"key", value, **fields
            )
            for index, value in enumerate(values)
        ]
        return await self.destination.deliver(Delivery("g", TopicPartition("flights", partition), 1, records, 1))

    def begin(self, *values: bytes | None, **fields: Any) -> list[Any]:
        """Deliver in a task of the service; the result is appended to the list that is returned."""
        responses: list[Any] = []

        async def deliver() -> None:
            responses.append(await self.deliver(*values, **fields))

        self.tasks.append(self.service.spawn(deliver(), "deliver"))
        return responses

    async def until(self, condition: Callable[[], object], seconds: float = 120.0) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 the conditions are about other processes
                await asyncio.sleep(0.005)

    async def ready(self) -> None:
        await self.until(lambda: self.service.readiness().ready)

    def in_flight(self, number: int = 0) -> int:
        """Return how many frames a worker has."""
        process = self.service._slots[number].process
        return len(process._frames.numbers) if process and process._frames else 0

    def pid(self, number: int = 0) -> int:
        process = self.service._slots[number].process
        assert process and process._child
        return process._child.pid

    async def _produce(self, records: Sequence[OutgoingRecord]) -> list[Any]:
        self.written += records
        return [Produced(0, len(self.written))] * len(records)

    async def by_id(self, schema_id: int) -> RegisteredSchema:
        response = self.schemas[schema_id]
        if isinstance(response, Exception):
            raise response
        if isinstance(response, protocol.Schema):
            return RegisteredSchema(schema_id, response.schema_type, response.text, cast(Any, response.references))
        return RegisteredSchema(schema_id, "AVRO", json.dumps(response))

    async def texts_of(self, references: Any) -> dict[str, str]:
        return dict(references)

    async def partitions_of(self, topic: str) -> int:
        return 8


@pytest.fixture
def write_function(tmp_path: Path) -> Callable[..., Path]:
    """A factory of function folders: code of main.py, then overrides of the spec and of the trigger's attributes."""

    def write(code: str, *, workers: int = 1, spec: dict[str, Any] | None = None, **attributes: Any) -> Path:
        sys.modules.pop("main", None)  # what a thread has loaded
        (tmp_path / "main.py").write_text(textwrap.dedent(code))
        trigger = {
            "kind": "kafka-cluster",
            "numWorkers": workers,
            **attributes.pop("trigger", {}),
            "attributes": {"topics": ["flights"], "consumerGroup": "g", **attributes},
        }
        function = {
            "metadata": {"name": "fn"},
            "spec": {"handler": "main:handler", "triggers": {"kafka": trigger}, **(spec or {})},
        }
        (tmp_path / "function.yaml").write_text(json.dumps(function))
        return tmp_path

    return write


@contextlib.asynccontextmanager
async def running_function(folder: Path, config: HeadraceConfig | None = None) -> AsyncIterator[Running]:
    """Start a function; stop it at the end of the block."""
    function = Running(load_function(folder, config))
    await function.service.start()
    try:
        yield function
        assert function.service.death is None
    finally:
        try:
            await function.service.drain(Deadline(function.clock, 60))
        finally:
            await function.service.stop()  # else what it leaves open fails a later test


def calls(folder: Path) -> list[list[str]]:
    """Return what the handler was called with, and the process or thread it ran in."""
    path = folder / "calls"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def called(folder: Path, name: str) -> bool:
    return any(each == name for each, _ in calls(folder))


async def two_frames(function: Running, folder: Path) -> tuple[list[Any], list[Any]]:
    """Have worker 0 wait in a record, with a frame of two records behind it."""
    first = function.begin(b"before", b"wait", b"after", partition=1)
    await function.until(lambda: called(folder, "wait"))
    second = function.begin(b"second", b"third", partition=2)
    await function.until(lambda: function.in_flight() == 2)
    return first, second


def acknowledged(function: Running, problem: str = "") -> list[tuple[TopicPartition, int]]:
    """Take the acknowledgements of the running function, and answer with a problem."""
    found: list[tuple[TopicPartition, int]] = []

    def acknowledge(partition: TopicPartition, offset: int) -> str:
        found.append((partition, offset))
        return problem

    function.service._acknowledgers = {"flights": acknowledge}
    return found


class _Thread:
    """Stands for the process of a worker. It cannot be killed: only its connection is closed."""

    @property
    def pid(self) -> int:
        raise AssertionError("a thread is not a process")

    def __init__(self, end: socket.socket, progress: mmap.mmap, claims: int, output: int) -> None:
        self._parts, self._output = (end, progress, claims), output
        self.ended = asyncio.Event()
        self.on_end: Callable[[int], object] = lambda code: None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return not self.ended.is_set()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._parts[0].shutdown(socket.SHUT_RDWR)

    async def stop(self, deadline: Deadline) -> None:
        await self.ended.wait()

    def _run(self) -> None:
        code, (end, _, claims) = 1, self._parts
        worker = Worker(*self._parts)
        try:
            setup = worker.receive_setup()
            os.environ.update(setup.env)
            code = worker.work(setup, context_of(setup, self._log))
        finally:
            if loop := getattr(worker._runs, "_loop", None):  # of coroutines that a plain handler returned
                loop.close()
            end.close()
            os.close(claims)
            os.close(self._output)
            with contextlib.suppress(RuntimeError):  # the test has failed and its loop is closed
                self._loop.call_soon_threadsafe(self._end, code)

    def _end(self, code: int) -> None:
        self.ended.set()
        self.on_end(code)

    def _log(self, level: str, message: str, fields: dict[str, Any]) -> None:
        os.write(self._output, log_line(level, message, fields))


class ThreadWorker(WorkerProcess):
    """A worker whose code runs on a thread of this process, behind the same connection."""

    async def _start_child(self, owner: Service, folder: str, worker_end: socket.socket, output: int) -> None:
        shared = open_shared_page()
        self._frames = FramesInFlight(mmap.mmap(shared, mmap.PAGESIZE))
        progress = mmap.mmap(shared, mmap.PAGESIZE)
        os.close(shared)
        child: Any = _Thread(worker_end.dup(), progress, os.dup(self._frames.claims), os.dup(output))
        child.on_end = lambda code: owner.spawn(self._bury(code), f"end of {self.label}")
        self._child = child


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run workers as threads: their folder is the current one, and what they change in this process is restored."""
    monkeypatch.setattr("headrace.functions.workers.WorkerProcess", ThreadWorker)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    before, environment = {*sys.modules}, {**os.environ}
    yield
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")) or name == "main":
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
