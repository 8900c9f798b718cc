"""The real server on loopback in the test's own loop, and a client that writes bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from headrace import errors
from headrace.config.active import ActiveConsumersConfig
from headrace.config.http import HttpConfig, SecurityConfig
from headrace.config.internal_topics import kind_by_name
from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.config.producer import IdempotencyConfig, ProducerConfig
from headrace.control.consumer_control import CommandAnswer
from headrace.control.consumer_status import BreakerDetails, Details, Summary
from headrace.control.dead_letter_pages import DeadLetterPage, DeadLetterStatistics
from headrace.control.jobs import JobView
from headrace.control.redelivery import RedeliveryAnswer, RedeliveryRequest
from headrace.control.registrations import Registration
from headrace.control.replays import DryRun, ReplayMetadata
from headrace.delivery.status import SettingsInForce
from headrace.formats.codecs import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.kafka import check_topic
from headrace.lifecycle import Readiness, SystemClock
from headrace.pipelines.status import FlowStatus, PipelineStatus, State
from headrace.records import Committed, OutgoingRecord, Produced, Record, TopicPartition
from headrace.security import Authenticator, TlsFiles
from headrace.sidecar.active.entries import EntryWriter
from headrace.sidecar.idempotency import Idempotency
from headrace.sidecar.produce import ProduceService
from headrace.sidecar.transactions import Transactions
from headrace.telemetry.metrics import Metrics
from headrace.testing import ManualClock
from headrace.web.application import Application
from headrace.web.hot_path import HotPath
from headrace.web.routes.active import ActiveEndpoints
from headrace.web.routes.active_dead_letters import ActiveDeadLetterEndpoints
from headrace.web.routes.audit import AuditEndpoints
from headrace.web.routes.control import ActiveStatusEndpoints, ControlEndpoints
from headrace.web.routes.dead_letters import DeadLetterEndpoints
from headrace.web.routes.documents import DocumentEndpoints
from headrace.web.routes.functions import FunctionEndpoints
from headrace.web.routes.health import HealthEndpoints
from headrace.web.routes.jobs import JobEndpoints
from headrace.web.routes.pipelines import PipelineEndpoints
from headrace.web.routes.produce import ProduceRoute
from headrace.web.routes.registrations import RegistrationEndpoints
from headrace.web.routes.topics import TopicEndpoints
from headrace.web.routes.writing import TransactionRoute, Writing
from headrace.web.server import WebService

LIMIT_SECONDS = 60.0


class Answer(NamedTuple):
    """One HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class PipelineOfTests:
    """A run that does what it is asked."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka
        self.state: State = "running"

    def report(self) -> PipelineStatus:
        self._kafka.fail()
        return PipelineStatus("t", self.state, "", 1, 7, {"f": FlowStatus(batch_id=3, lag_records=4)})

    async def hold(self, state: State) -> None:
        self.state = state

    def resume(self) -> None:
        self.state = "running"


class Kafka:
    """Takes records; can be held, and can fail."""

    def __init__(self) -> None:
        self.records: list[OutgoingRecord] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.taken = asyncio.Event()
        self.failure: Exception | None = None
        self.not_sent: list[Any] = []
        """Requests that were refused, as the audit is told of them."""

    def fail(self) -> None:
        if self.failure:
            raise self.failure

    async def produce(self, records: Sequence[OutgoingRecord], sliced: bool = False) -> list[Any]:
        self.records += records
        self.taken.set()
        await self.gate.wait()
        self.fail()
        return [Produced(0, index) for index in range(len(records))]

    def submit(
        self, records: Sequence[OutgoingRecord], closing: Any = None, group: Any = None
    ) -> asyncio.Future[list[Any]]:
        return asyncio.ensure_future(self.produce(records))

    async def has_topic(self, name: str) -> bool:
        return True

    async def written_offsets(self, partitions: Any) -> dict[Any, int]:
        return dict.fromkeys(partitions, 0)

    async def list_topics(self) -> list[Any]:
        self.fail()
        return [SimpleNamespace(name="t.dlq")]

    async def topic_ids(self, names: Iterable[str], right: str = "") -> dict[str, str]:
        self.fail()
        return {name: name for name in names if name == "t.dlq"}

    async def topic_offsets(self, topic: str, right: str = "") -> dict[TopicPartition, tuple[int, int]]:
        self.fail()
        return {TopicPartition(topic, 0): (0, 0)}

    async def offsets_since(self, partitions: Any, timestamp_ms: int) -> dict[Any, int]:
        return {}

    async def start_offsets(self, partitions: Any) -> dict[Any, int]:
        return {}

    end_offsets = start_offsets
    config = KafkaConfig()

    def send(self, records: Sequence[OutgoingRecord], done: Callable[[list[Any]], None], *_: Any) -> None:
        self.fail()
        task = asyncio.ensure_future(self.produce(records))
        task.add_done_callback(lambda task: done(task.result()))

    def check_capacity(self, topic: str, size_bytes: int) -> None:
        if isinstance(self.failure, errors.ProducerQueueFull):
            raise self.failure

    def known(self, topic: str) -> int | None:
        return None if topic.startswith(("missing", "new", ".")) else 3

    async def partitions_of(self, topic: str) -> int:
        if check_topic(topic).startswith("missing"):
            raise errors.TopicNotFound(topic=topic)
        return 3


class Failing:
    """Fails as Kafka does."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka

    def fail(self) -> None:
        self._kafka.fail()


class DeadLetterFake(Failing):
    """Has no dead letters, and fails as Kafka does."""

    def __init__(self, kafka: Kafka) -> None:
        super().__init__(kafka)
        self.topics = self
        self.requests: list[RedeliveryRequest] = []

    async def counts(self) -> list[Any]:
        self.fail()
        return []

    async def page(self, topic: str, *_: Any) -> DeadLetterPage:
        self.fail()
        if not topic.isprintable() or topic == "..":
            raise errors.TopicNotFound()
        return DeadLetterPage(topic, [], 0, 0, 0, "")

    async def statistics(self, topic: str, *_: Any) -> DeadLetterStatistics:
        self.fail()
        return DeadLetterStatistics(topic, None, None, 0, 0, {}, {}, {}, {}, 0, 0, False)

    def chosen(self, request: RedeliveryRequest) -> list[tuple[str, Any]]:
        self.fail()
        group = "another" if request.group == "another" else "g"
        owner = "writer" if request.group == "writers" else ""
        consumer = SimpleNamespace(group=group, owner=owner)
        return [(topic, consumer) for topic in (request.topic or "").split(",") if topic]

    async def run(self, request: RedeliveryRequest) -> RedeliveryAnswer:
        self.requests.append(request)
        if request.group == "away":
            raise errors.ReadFailed("away")
        return RedeliveryAnswer("g", "i", ["t.dlq"], request.timeout or 0, "so many", "rolledBack")


VIEW = JobView("j", "replay", {}, "ann", "now", state="running", message="", owner="", updated="", progress={})


class Work(Failing):
    """Has one job; stands for jobs and replays."""

    def show(self, name: str) -> JobView:
        self.fail()
        if not name.isprintable() or name == "..":
            raise errors.NotFound()
        return VIEW

    def list(self) -> list[JobView]:
        return [self.show("j")]

    def entry_of(self, name: str) -> int:
        return 7

    async def change(self, name: str, wish: str, by: str) -> JobView:
        return self.show(name)

    async def begin(self, jobs: Any, *asked: Any) -> JobView | DryRun:
        view = self.show("j")
        return DryRun(3, {}) if asked[-2].dry_run else view

    async def begin_by_metadata(self, jobs: Any, asked: ReplayMetadata, by: str) -> JobView:
        return self.show("j")


class Notes(Failing):
    """Takes notes of nothing, and fails as Kafka does; stands for the audit."""

    service_id = "t"

    def __init__(self, kafka: Kafka) -> None:
        super().__init__(kafka)
        self.controls: list[tuple[str, str, str, str]] = []

    def control(self, action: str, target: str, *, reason: str, outcome: str) -> None:
        self.controls.append((action, target, reason, outcome))

    def produced(self, *_: Any, **__: Any) -> None:
        """Nothing is kept."""

    refused = produced

    def not_sent(self, *told: Any) -> None:
        self._kafka.not_sent.append(told)

    def reported(self, _: Any) -> list[Any]:
        self.fail()
        return []


class ControlFake(Failing):
    """Has one consumer, `t`, and fails as Kafka does; stands for steering, statuses and commands."""

    def __init__(self, kafka: Kafka) -> None:
        super().__init__(kafka)
        self.consumers = {"t": SimpleNamespace(name="t", kind="reactive", owner="")}

    async def details(self, consumer: Any) -> Details:
        await self.pause()
        return Details(
            **{name: getattr(self.summary(consumer), name) for name in Summary.__struct_fields__},
            partitions=[],
            commands=[],
        )

    def summary(self, consumer: Any) -> Summary:
        settings, breaker = SettingsInForce(None, 1, 1, 0.0, 1), BreakerDetails("closed", None, "")
        return Summary("t", "reactive", "g", [], "", "", None, settings, breaker, {}, 0, None, 0, 0, None, 0, "", None)

    async def pause(self, *_: Any) -> None:
        self.fail()

    resume = change = pause

    async def seek(self, consumer: Any, request: Any, by: str, wait_seconds: float) -> CommandAnswer:
        await self.pause()
        return CommandAnswer("i", not wait_seconds, [])

    skip = seek

    async def cancel(self, *_: Any) -> list[TopicPartition]:
        await self.pause()
        return [TopicPartition("t", 0)]


class Registered(Failing):
    """Has one registered consumer, and fails as Kafka does."""

    def __init__(self, kafka: Kafka) -> None:
        super().__init__(kafka)
        self._new = False

    def one_of(self, _: Any = None, name: str = "t") -> Registration:
        if failure := self._kafka.failure or (errors.NotFound() if name != "t" else None):
            raise failure
        return Registration("ann", "t", 7, 7, 0, {"group": "g"}, None)

    def all_of(self, *_: Any) -> list[Registration]:
        return [self.one_of()]

    def refusal_of(self, *_: Any) -> None:
        """It runs."""

    async def put(self, *_: Any) -> tuple[Registration, bool]:
        self._new = not self._new
        return self.one_of(), self._new

    async def remove(self, *_: Any) -> Registration:
        return self.one_of()


class ActiveFake(Failing):
    """Has every instance, which reads nothing, and fails as Kafka does; stands for the instances and for one."""

    topics: tuple[str, ...] = ()
    assigned: tuple[TopicPartition, ...] = ()
    reads = None
    records: tuple[Record, ...] = ()
    spec = SimpleNamespace(name="t", max_read_bytes=1, wait_seconds=0)

    def __init__(self, kafka: Kafka, codecs: Codecs) -> None:
        super().__init__(kafka)
        self.entries = EntryWriter("t", codecs.for_reading("string"), codecs.for_reading("json"))

    def find(self, *_: Any) -> ActiveFake:
        self.fail()
        return self

    async def create(self, *_: Any, **__: Any) -> ActiveFake:
        return self.find()

    async def statuses(self) -> list[Any]:
        return []

    def answering(self, size_bytes: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def read(self, **_: Any) -> ActiveFake:
        return self

    def end(self, delivered: int) -> None:
        """Nothing was read."""

    async def delete(self, *_: Any) -> None:
        """It is there again."""

    subscribe = wait_assigned = seek = delete

    async def unsubscribe(self) -> None:
        """It reads nothing."""

    async def committed(self, *_: Any, **__: Any) -> dict[TopicPartition, Committed]:
        return {}

    commit = committed


class RunningServer:
    """A running server and what it talks to."""

    def __init__(self, web: WebService, kafka: Kafka, metrics: Metrics, services: dict[str, Readiness]) -> None:
        self.web, self.kafka, self.metrics, self.services = web, kafka, metrics, services
        self.tls: TlsFiles | None = None
        self.dead_letters: Any = None
        self.notes: Any = None
        self.streams: Any = None
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection; it is closed with the server."""
        host, port = self.web.url.partition("://")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self._writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ask(self, request: bytes) -> Answer:
        """Send bytes on a connection of their own and read one answer."""
        reader, writer = await self.connect()
        writer.write(request)
        answer = await self.read(reader)
        writer.close()
        return answer

    async def read(self, reader: asyncio.StreamReader) -> Answer:
        """Read one answer."""
        return await asyncio.wait_for(read_answer(reader), LIMIT_SECONDS)

    async def get(self, path: str, method: str = "GET") -> Answer:
        return await self.ask(f"{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Read one answer that has a Content-Length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
    return Answer(int(head[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0))))


@contextlib.asynccontextmanager
async def _opened(**settings: Any) -> AsyncIterator[RunningServer]:
    security = SecurityConfig.model_validate(settings.pop("security", {}))
    config = HttpConfig.model_validate({"port": 0, "allowed_hosts": ["h"], **settings})
    kafka, metrics, services = Kafka(), Metrics(), {"kafka": Readiness(True)}
    registry = SchemaRegistry(SchemaRegistryConfig(url="http://127.0.0.1:1"), ManualClock())
    notes: Any = Notes(kafka)
    produce = ProduceService(ProducerConfig(), Codecs(registry), kafka, kafka, notes, config.max_records)
    transactions = Transactions(ProducerConfig(), produce, kafka)
    idempotency = Idempotency(IdempotencyConfig(), transactions, kafka, lambda: None, SystemClock())
    writing = Writing(transactions, idempotency, metrics)
    authenticator = Authenticator(security, SystemClock()) if security.mode != "none" else None
    tls = TlsFiles(config.tls, SystemClock()) if config.tls.certificate else None
    dead_letters: Any = DeadLetterFake(kafka)
    work: Any = Work(kafka)
    control: Any = ControlFake(kafka)
    registered: Any = Registered(kafka)
    reactive: Any = SimpleNamespace(
        kind="reactive", topics=["t"], reads=lambda topic: topic == "t", group="g", dead_letters=None
    )
    active: Any = ActiveFake(kafka, Codecs(registry))
    produce_route = ProduceRoute(produce, writing, metrics, config)
    trigger = SimpleNamespace(name="in", group="g", topics=["t"])
    function: Any = SimpleNamespace(name="t", replica_bounds=(0, 1), triggers=[trigger])

    def lag_of(group: str) -> dict[TopicPartition, Any]:
        control.fail()
        return {TopicPartition("t", 0): SimpleNamespace(lag=7)}

    async def reload() -> None:
        control.fail()

    reloads: Any = {"t": SimpleNamespace(reload=reload)}
    families = [
        produce_route,
        TransactionRoute(writing, config),
        HealthEndpoints(lambda: services, "t", metrics),
        DocumentEndpoints(),
        AuditEndpoints(notes, config.max_records),
        DeadLetterEndpoints(dead_letters, dead_letters),
        JobEndpoints(work, work, work),
        ControlEndpoints(control, control, control),
        FunctionEndpoints([function], lag_of, reloads),
        PipelineEndpoints({"t": PipelineOfTests(kafka)}),  # type: ignore[dict-item]
        ActiveStatusEndpoints(active, "here"),
        ActiveDeadLetterEndpoints(
            ActiveConsumersConfig(), active, kafka, Codecs(registry), {"r": reactive}, kafka.produce, None
        ),
        RegistrationEndpoints(registered, lambda _: Readiness(True)),
        ActiveEndpoints(ActiveConsumersConfig(), active, kafka, ""),
        TopicEndpoints(ActiveConsumersConfig(), kafka, Codecs(registry), kind_by_name, None),
    ]
    application = Application(config, families, metrics, authenticator, notes)
    hot_path = HotPath(config, produce, metrics, application.gate, application.checks, authenticator)
    streams, context = produce_route.stream, tls.context if tls else None
    web = WebService(config, application, hot_path, streams, tls=context)
    await idempotency.start()
    await web.start()
    server = RunningServer(web, kafka, metrics, services)
    server.tls, server.dead_letters, server.notes, server.streams = tls, dead_letters, notes, streams
    try:
        yield server
    finally:
        kafka.gate.set()
        await server.close()
        await web.stop()
        await idempotency.stop()
        await registry.close()


@pytest.fixture
def opened() -> Callable[..., contextlib.AbstractAsyncContextManager[RunningServer]]:
    """Open a running server: `async with opened(max_body_bytes=10) as server`."""
    return _opened
