"""Function folders and running services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.config.model import HeadraceConfig
from headrace.delivery.protocols import Delivery, Reply
from headrace.formats.registry import RegisteredSchema, SchemaRegistry
from headrace.functions import wire
from headrace.functions.destination import FunctionDestination
from headrace.functions.load import load_function
from headrace.functions.service import FunctionService
from headrace.functions.spec import FunctionSpec
from headrace.kafka import TopicDirectory
from headrace.lifecycle import Deadline, SystemClock
from headrace.records import OutgoingRecord, Produced, Record, TopicPartition

PARTITION = TopicPartition("flights", 3)


class Running:
    """A started function with its destination and a fake of Kafka and registry."""

    def __init__(self, spec: FunctionSpec) -> None:
        self.clock = SystemClock()
        trigger = spec.triggers[0]
        self.service = FunctionService(spec, spec.worker_pools[0], self.clock)
        self.written: list[OutgoingRecord] = []
        self.schemas: dict[int, Any] = {}
        self.asked: list[int] = []
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
        answers: list[Any] = []

        async def deliver() -> None:
            answers.append(await self.deliver(*values, **fields))

        self.tasks.append(self.service.spawn(deliver(), "deliver"))
        return answers

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
        self.asked.append(schema_id)
        answer = self.schemas[schema_id]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, wire.Schema):
            return RegisteredSchema(schema_id, answer.schema_type, answer.text, cast(Any, answer.references))
        return RegisteredSchema(schema_id, "AVRO", json.dumps(answer))

    async def texts_of(self, references: Any) -> dict[str, str]:
        return dict(references)

    async def partitions_of(self, topic: str) -> int:
        return 8


@pytest.fixture
def write_function(tmp_path: Path) -> Callable[..., Path]:
    """A factory of function folders: code of main.py, then overrides of the spec and of the trigger's attributes."""

    def write(code: str, *, workers: int = 1, spec: dict[str, Any] | None = None, **attributes: Any) -> Path:
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


@pytest.fixture
def running() -> Callable[..., contextlib.AbstractAsyncContextManager[Running]]:
    """A factory of started functions, stopped at the end of the block."""

    @contextlib.asynccontextmanager
    async def run(folder: Path, config: HeadraceConfig | None = None) -> AsyncIterator[Running]:
        function = Running(load_function(folder, config))
        await function.service.start()
        try:
            yield function
            assert function.service.death is None
        finally:
            await function.service.drain(Deadline(function.clock, 60))
            await function.service.stop()

    return run
