"""Pipelines for unit tests: small files, and a run with everything around it faked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from headrace.config.kafka import KafkaConfig
from headrace.errors import HeadraceError
from headrace.records import TopicPartition
from headrace.runtime import Deadline, Service
from headrace_devkit.testing import ManualClock
from headrace_jvm import ClassArchive, Java
from headrace_pipelines import driver_protocol
from headrace_pipelines.connector import ConnectorSecurity, write_secrets
from headrace_pipelines.driver_process import Toolchain
from headrace_pipelines.runs import PipelineRun
from headrace_pipelines.spec import PipelineSpec

T = TypeVar("T")
SPEC = PipelineSpec.model_validate(
    {
        "name": "delays",
        "sources": {"flights": {"topic": "flights", "schema": "carrier STRING"}},
        "flows": {"by_carrier": {"sql": "SELECT * FROM flights", "sink": {"topic": "late"}}},
    }
)


def document(sink: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return a pipeline `p` whose flow `f` copies the topic `t` to the topic `out`."""
    flow = {"sql": "SELECT * FROM a", "sink": {"topic": "out", **(sink or {})}}
    return {"name": "p", "sources": {"a": {"topic": "t", "schema": "x INT"}}, "flows": {"f": flow}, **more}


def plan_of(spec: PipelineSpec, **more: Any) -> driver_protocol.DriverPlan:
    """Return a plan to run a pipeline in the folder `/s/p`, with two jars."""
    usual = {"bootstrap_servers": "b:1", "folder": Path("/s/p"), "jars": (Path("/j/a.jar"), Path("/j/b.jar"))}
    return driver_protocol.DriverPlan(spec=spec, **(usual | more))


TOOLCHAIN = Toolchain((), ClassArchive(Java(Path("/java"), Path("/java/bin/java"), 17, ""), Path("/jars")))
"""With a Java that does not exist."""


async def toolchain() -> Toolchain:
    return TOOLCHAIN


class FakeTarget:
    """The target of an exactly-once sink: numbers and rows that are committed, and failures before or after that."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number
        self.digest = ""
        self.rows: list[Any] = []
        self.failures: list[tuple[str, HeadraceError]] = []
        self.opened = 0
        self.closed = 0
        self.name = ""

    def open(self) -> int | None:
        self.opened += 1
        return self.number

    def write(self, number: int, rows: Any, digest: str = "") -> None:
        when, failure = self.failures.pop(0) if self.failures else ("", None)
        if when != "before":
            self.number = number + 1
            self.digest = digest
            self.rows.append(rows)
        if failure:
            raise failure

    def poll(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


READY = [driver_protocol.SessionReady(4.0), driver_protocol.FlowRunning("by_carrier")]


def progress(batch_id: int, **values: Any) -> driver_protocol.FlowProgress:
    fields = {
        "input_records": 10,
        "records_per_second": 5.0,
        "corrupt_records": 0,
        "tombstone_records": 0,
        "late_records": 0,
        "broken_rules": {},
        "lag_records": 0,
        "positions": {"flights": {0: 10 * (batch_id + 1)}},
    }
    return driver_protocol.FlowProgress(flow="by_carrier", batch_id=batch_id, **(fields | values))


def delayed(work: Callable[..., Awaitable[T]]) -> tuple[asyncio.Event, Callable[..., Awaitable[T]]]:
    """Return an event, and a function that does the work when the event is set."""
    event = asyncio.Event()

    async def slow(*arguments: Any) -> T:
        await event.wait()
        return await work(*arguments)

    return event, slow


class FakeDriver:
    """A driver that reports what a test gives it, and ends when the test or the run says so."""

    pid = 4711

    def __init__(self) -> None:
        self.queue: asyncio.Queue[driver_protocol.AnyEvent | None] = asyncio.Queue()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stops = 0
        self.last: list[driver_protocol.AnyEvent] = []
        self.output = ""

    def report(self, *events: driver_protocol.AnyEvent) -> None:
        for event in events:
            self.queue.put_nowait(event)

    def end(self, code: int) -> None:
        self.queue.put_nowait(None)
        if not self.ended.done():
            self.ended.set_result(code)

    async def events(self) -> AsyncIterator[driver_protocol.AnyEvent]:
        while (event := await self.queue.get()) is not None:
            yield event

    async def exit_code(self) -> int:
        return await asyncio.shield(self.ended)

    async def stop(self, deadline: Deadline) -> None:
        self.stops += 1
        self.report(*self.last)
        self.end(0)

    def kill(self) -> None:
        self.end(-9)

    def last_output(self) -> str:
        return self.output

    def bound_output(self) -> None:
        pass


class Harness:
    """A run with everything around it faked."""

    def __init__(self, folder: Path, kafka: KafkaConfig, spec: PipelineSpec | None = None) -> None:
        self.clock = ManualClock()
        self.drivers: list[FakeDriver] = []
        self.plans: list[driver_protocol.DriverPlan] = []
        self.missing: dict[str, Exception] = {}
        self.topic_id = "1"
        self.created: list[tuple[str, str]] = []
        self.published: list[tuple[str, dict[TopicPartition, int]]] = []
        self.publish_problem: Exception | None = None
        self.run = PipelineRun(spec or SPEC, kafka, folder, self.clock, self)  # type: ignore[arg-type]

    async def describe_topic(self, topic: str, right: str = "") -> Any:
        if topic in self.missing:
            raise self.missing[topic]
        return SimpleNamespace(partitions=[0, 1, 2])

    async def topic_ids(self, names: Collection[str], right: str = "") -> dict[str, str]:
        return {name: self.topic_id for name in names if name not in self.missing}

    async def ensure_topic_like(self, topic: str, like: str) -> None:
        self.created.append((topic, like))
        self.missing.pop(topic, None)

    async def alter_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        if self.publish_problem:
            raise self.publish_problem
        self.published.append((group, dict(offsets)))

    async def start_driver(
        self, owner: Service, plan: driver_protocol.DriverPlan, toolchain: Toolchain, security: ConnectorSecurity
    ) -> FakeDriver:
        self.plans.append(plan)
        plan.folder.mkdir(exist_ok=True)
        write_secrets(plan.folder, security.secrets)
        self.drivers.append(FakeDriver())
        return self.drivers[-1]

    async def report(self, *events: driver_protocol.AnyEvent) -> None:
        """Let the newest driver report events, and the run handle them."""
        self.drivers[-1].report(*events)
        await self.clock.settle()

    async def end(self, code: int, seconds: float = 0) -> None:
        """End the newest driver, and let seconds pass."""
        self.drivers[-1].end(code)
        await self.clock.advance(seconds)

    def publish_slowly(self) -> asyncio.Event:
        """Let the driver read a batch whose positions Kafka takes only after the event that is returned."""
        published, self.run._publisher._publish = delayed(self.alter_group_offsets)
        self.drivers[0].report(*READY, progress(0))
        return published

    async def pause_and_resume(self) -> asyncio.Future[None]:
        """Pause, and resume before the pause is done, which is returned."""
        pausing = asyncio.ensure_future(self.run.hold("paused"))
        await self.clock.settle()
        self.run.resume()
        await self.clock.settle()
        return pausing

    @property
    def reason(self) -> str:
        return self.run.readiness().reason

    @property
    def state(self) -> Any:
        return self.run.status()["state"]

    @property
    def flow(self) -> dict[str, Any]:
        """Return the status of the flow."""
        return dict(self.run.status()["flows"]["by_carrier"])


Started = Callable[..., AbstractAsyncContextManager[Harness]]
