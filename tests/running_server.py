"""The real server on loopback in the test's own loop, and a client that writes bytes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from headrace import errors
from headrace.admin.cluster.group_administration import GroupAdministration, OffsetsResponse
from headrace.admin.cluster.registered_schemas import RegisteredSchemas
from headrace.admin.cluster.routes import ClusterEndpoints
from headrace.admin.cluster.schema_routes import SchemaEndpoints
from headrace.admin.cluster.topic_administration import TopicAdministration, TopicChanges
from headrace.admin.health.routes import HealthEndpoints
from headrace.app.document_routes import DocumentEndpoints
from headrace.app.documents import written
from headrace.commands.consumer_control import CommandResponse
from headrace.commands.consumer_status import BreakerDetails, Details, Summary
from headrace.commands.registration_routes import RegistrationEndpoints
from headrace.commands.registration_table import Registration
from headrace.commands.routes import ControlEndpoints
from headrace.config.active import ActiveConsumersConfig
from headrace.config.http import HttpConfig, SecurityConfig
from headrace.config.kafka import SchemaRegistryConfig
from headrace.config.producer_config import IdempotencyConfig, ProducerConfig
from headrace.config.topic_names import kind_by_name
from headrace.config.whole_file import WholeFile
from headrace.delivery.status import SettingsInForce
from headrace.formats.choice import Codecs
from headrace.formats.registry import RegisteredSchema, SchemaRegistry, SubjectVersion
from headrace.http.application import Application, Router
from headrace.http.auth import Authenticator
from headrace.http.server import WebService
from headrace.records import TopicPartition
from headrace.runs.dead_letters.pages import DeadLetterPage, DeadLetterStatistics
from headrace.runs.dead_letters.routes import DeadLetterEndpoints
from headrace.runs.jobs import JobView
from headrace.runs.replay_requests import DryRun
from headrace.runs.routes import JobEndpoints
from headrace.runtime import Readiness, SystemClock
from headrace.runtime.telemetry.metrics import Metrics
from headrace.runtime.tls import TlsFiles
from headrace.sidecar.active.read_entries import EntryWriter
from headrace.sidecar.active.routes import ActiveEndpoints
from headrace.sidecar.active.status_routes import ActiveStatusEndpoints
from headrace.sidecar.active.topic_routes import TopicEndpoints
from headrace.sidecar.produce.idempotency import Idempotency
from headrace.sidecar.produce.produce import ProduceService
from headrace.sidecar.produce.routes import ProduceRoute
from headrace.sidecar.produce.transaction_routes import TransactionRoute, Writing
from headrace.sidecar.produce.transactions import Transactions
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster
from headrace_dialects.dapr.publish_routes import PublishRoute
from headrace_dialects.light4j.audit_routes import AuditEndpoints
from headrace_dialects.light4j.dead_letter_routes import ActiveDeadLetterEndpoints
from headrace_dialects.light4j.metadata_routes import MetadataEndpoints
from headrace_dialects.light4j.redelivery import RedeliveryRequest, RedeliveryResponse
from headrace_dialects.light4j.redelivery_routes import RedeliveryEndpoints
from headrace_pipelines.report import FlowStatus, PipelineStatus
from headrace_pipelines.routes import PipelineEndpoints
from headrace_queries.engine_process import QueryEngine
from headrace_queries.ksqldb_routes import KsqldbEndpoints
from headrace_queries.ksqldb_statements import KsqldbStatements
from headrace_queries.query_sections import QuerySections
from headrace_queries.routes import QueryEndpoints, RowRoute
from headrace_queries.table_config import SqlConfig, TableConfig
from tests.administration_endpoints import administration, assaults

LIMIT_SECONDS = 60.0


class Response(NamedTuple):
    """One HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def calls(kafka: MemoryCluster, value: Any = None) -> Callable[..., Any]:
    """Make a function that returns this value, or calls it with its arguments, and fails as Kafka does."""

    def call(*given: Any, **_: Any) -> Any:
        if kafka.failure:
            raise kafka.failure
        return value(*given) if callable(value) else value

    return call


def awaits(kafka: MemoryCluster, value: Any = None) -> Callable[..., Any]:
    """Make such a function whose result is awaited."""
    call = calls(kafka, value)

    async def awaited(*given: Any, **named: Any) -> Any:
        return call(*given, **named)

    return awaited


def check_name(name: str) -> None:
    """Refuse names that nothing has."""
    if not name.isprintable() or name == "..":
        raise errors.NotFound(topic=name)


def query_endpoints() -> list[Any]:
    """Return the endpoints of a table, whose engine has not started."""
    tables = {"t": TableConfig(topic="t")}
    engine = QueryEngine(QuerySections(tables=tables), SystemClock())
    statements = KsqldbStatements(engine, None, 10)
    return [
        QueryEndpoints(engine, statements, HttpConfig(), SqlConfig()),
        RowRoute(engine),
        KsqldbEndpoints(statements, engine, HttpConfig()),
    ]


def dead_letters_of(kafka: MemoryCluster) -> Any:
    """Return a stand-in without dead letters, which keeps the requests."""
    requests: list[RedeliveryRequest] = []

    def page(topic: str, *_: Any) -> DeadLetterPage:
        check_name(topic)
        return DeadLetterPage(topic, [], 0, 0, 0, "")

    def chosen(request: RedeliveryRequest) -> list[tuple[str, Any]]:
        owner = "writer" if request.group == "writers" else ""
        consumer = SimpleNamespace(group="another" if request.group == "another" else "g", owner=owner)
        return [(topic, consumer) for topic in (request.topic or "").split(",") if topic]

    async def run(request: RedeliveryRequest) -> RedeliveryResponse:
        requests.append(request)
        if request.group == "away":
            raise errors.ReadFailed("away")
        return RedeliveryResponse("g", "i", ["t.dlq"], request.timeout or 0, "so many", "rolledBack")

    topics = SimpleNamespace(
        counts=awaits(kafka, []),
        page=awaits(kafka, page),
        statistics=awaits(
            kafka, lambda t, *_: DeadLetterStatistics(t, None, None, 0, 0, {}, {}, {}, {}, {}, 0, 0, False)
        ),
    )
    return SimpleNamespace(**vars(topics), topics=topics, chosen=calls(kafka, chosen), run=run, requests=requests)


VIEW = JobView("j", "replay", {}, "ann", "now", state="running", message="", owner="", updated="", progress={})


def work_of(kafka: MemoryCluster) -> Any:
    """Return a stand-in for jobs and replays, which has one job."""

    def show(name: str, *_: Any) -> JobView:
        check_name(name)
        return VIEW

    return SimpleNamespace(
        show=calls(kafka, show),
        list=calls(kafka, [VIEW]),
        entry_of=lambda name: 7,
        change=awaits(kafka, show),
        begin=awaits(kafka, lambda jobs, *asked: DryRun(3, {}) if asked[-2].dry_run else VIEW),
    )


def audit_of(kafka: MemoryCluster) -> Any:
    """Return a stand-in for the audit, which keeps what was controlled and refused."""
    controls: list[tuple[str, str, str, str]] = []
    unsent: list[Any] = []
    return SimpleNamespace(
        service_id="t",
        controls=controls,
        control=lambda action, target, *, reason, outcome: controls.append((action, target, reason, outcome)),
        produced=lambda *_, **__: None,
        refused=lambda *_, **__: None,
        unsent=unsent,
        not_sent=lambda *event: unsent.append(event),
        reported=calls(kafka, []),
    )


def control_of(kafka: MemoryCluster) -> Any:
    """Return a stand-in for steering, statuses and commands, which has one consumer, `t`."""
    settings, breaker = SettingsInForce(None, 1, 1, 0.0, 1), BreakerDetails("closed", None, "")
    summary = Summary("t", "reactive", "g", [], "", "", None, settings, breaker, {}, 0, None, 0, 0, None, 0, "", None)
    fields = {name: getattr(summary, name) for name in Summary.__struct_fields__}
    command = awaits(kafka, lambda consumer, request, by, wait_seconds: CommandResponse("i", not wait_seconds, []))
    return SimpleNamespace(
        consumers={"t": SimpleNamespace(name="t", kind="reactive", owner="")},
        details=awaits(kafka, Details(**fields, partitions=[], commands=[])),
        summary=lambda consumer: summary,
        **dict.fromkeys(("pause", "resume", "change"), awaits(kafka)),
        **dict.fromkeys(("seek", "skip"), command),
        cancel=awaits(kafka, [TopicPartition("t", 0)]),
    )


def registered_of(kafka: MemoryCluster) -> Any:
    """Return a stand-in for registrations, which has one consumer; every second one that is put is new."""
    one = Registration("ann", "t", 7, 7, 0, {"group": "g"}, None)
    new = itertools.cycle((True, False))

    def one_of(_: Any = None, name: str = "t") -> Registration:
        if name != "t":
            raise errors.NotFound()
        return one

    return SimpleNamespace(
        one_of=calls(kafka, one_of),
        all_of=calls(kafka, [one]),
        refusal_of=lambda *_: None,
        put=awaits(kafka, lambda *_: (one, next(new))),
        remove=awaits(kafka, one),
    )


def active_of(kafka: MemoryCluster, codecs: Codecs) -> Any:
    """Return a stand-in for instances and for one of them, which reads nothing."""
    active = SimpleNamespace(topics=(), assigned=(), reads=None, batches=(), assignments={})
    active.membership = active
    active.spec = SimpleNamespace(group="t", name="t", max_read_bytes=1, wait_seconds=0)
    active.entries = EntryWriter("t", codecs.for_reading("string"), codecs.for_reading("json"))
    active.use = calls(kafka, active)
    active.create = active.read = awaits(kafka, active)
    active.statuses, active.end = awaits(kafka, []), lambda *sent: None
    active.answering = lambda size_bytes: contextlib.nullcontext()
    for name in ("delete", "subscribe", "wait_assigned", "seek", "unsubscribe"):
        setattr(active, name, awaits(kafka))
    active.committed = active.commit = awaits(kafka, {})
    return active


def cluster_of(kafka: MemoryCluster) -> ClusterEndpoints:
    """Return administration of a cluster without topics and groups."""
    node = SimpleNamespace(id=1, host="h", port=9092, rack=None)
    brokers = awaits(kafka, SimpleNamespace(cluster_id="c", controller=node, nodes=[node]))
    topics: Any = TopicAdministration(kafka, kind_by_name)  # type: ignore[arg-type]
    topics._cluster = SimpleNamespace(configs=awaits(kafka, []), create=awaits(kafka), delete=awaits(kafka))
    groups: Any = GroupAdministration(kafka, kind_by_name, SystemClock())  # type: ignore[arg-type]
    topics.change = awaits(kafka, TopicChanges("t", False, []))
    groups._cluster = SimpleNamespace(group=awaits(kafka))
    groups.reset = awaits(kafka, OffsetsResponse("t", False, 0, []))
    return ClusterEndpoints(topics, groups, SimpleNamespace(brokers=brokers))  # type: ignore[arg-type]


def registry_of(kafka: MemoryCluster) -> Any:
    """Return a stand-in for a registry with one subject."""
    found: Any = {"subjects": ["t-value"], "version_numbers": [1], "compatibility_of": "NONE"}
    found["read_version"] = SubjectVersion(1, RegisteredSchema(7, "AVRO", "1"))
    return SimpleNamespace(**{name: awaits(kafka, value) for name, value in found.items()})


def pipeline_of(kafka: MemoryCluster) -> Any:
    """Return a stand-in for a run, which is held and resumed."""
    run = SimpleNamespace(state="running")
    flows = {"f": FlowStatus(batch_id=3, lag_records=4)}
    run.report = calls(kafka, lambda: PipelineStatus("t", run.state, "", 1, 7, flows))
    run.hold = awaits(kafka, lambda state: setattr(run, "state", state))
    run.resume = lambda: setattr(run, "state", "running")
    return run


class RunningServer:
    """A running server and what it talks to."""

    def __init__(self, web: WebService, kafka: MemoryCluster, metrics: Metrics, services: dict[str, Readiness]) -> None:
        self.web, self.kafka, self.metrics, self.services = web, kafka, metrics, services
        self.tls: TlsFiles | None = None
        self.dead_letters: Any = None
        self.events: Any = None
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

    async def ask(self, request: bytes) -> Response:
        """Send bytes on a connection of their own and read one response."""
        reader, writer = await self.connect()
        writer.write(request)
        response = await self.read(reader)
        writer.close()
        return response

    async def read(self, reader: asyncio.StreamReader) -> Response:
        """Read one response."""
        return await asyncio.wait_for(read_response(reader), LIMIT_SECONDS)

    async def get(self, path: str, method: str = "GET") -> Response:
        return await self.ask(f"{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())


async def read_response(reader: asyncio.StreamReader) -> Response:
    """Read one response that has a Content-Length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
    return Response(int(head[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0))))


def _further_endpoints(kafka: MemoryCluster, codecs: Codecs) -> list[object]:
    """Return the endpoints that need no part of the server except Kafka and the formats."""
    work = work_of(kafka)
    control = control_of(kafka)
    registered = registered_of(kafka)
    reactive: Any = SimpleNamespace(
        kind="reactive", topics=["t"], reads=lambda topic: topic == "t", group="g", dead_letters=None
    )
    active, produce = active_of(kafka, codecs), kafka.producer.produce
    return [
        DocumentEndpoints(written),
        JobEndpoints(work, work, work),
        MetadataEndpoints(work, SimpleNamespace(begin=awaits(kafka, VIEW))),
        ControlEndpoints(control, control, control),
        PipelineEndpoints({"t": pipeline_of(kafka)}),
        *query_endpoints(),
        ActiveStatusEndpoints(active, "here"),
        ActiveDeadLetterEndpoints(ActiveConsumersConfig(), active, kafka, codecs, {"r": reactive}, produce, None),
        RegistrationEndpoints(registered, lambda _: Readiness(True)),
        ActiveEndpoints(ActiveConsumersConfig(), active, kafka),
        TopicEndpoints(ActiveConsumersConfig(), kafka, codecs, kind_by_name, None),
        administration(),
        assaults(WholeFile()),
        cluster_of(kafka),
        SchemaEndpoints(RegisteredSchemas(registry_of(kafka))),
    ]


@contextlib.asynccontextmanager
async def _opened(**settings: Any) -> AsyncIterator[RunningServer]:
    security = SecurityConfig.model_validate(settings.pop("security", {}))
    config = HttpConfig.model_validate({"port": 0, "allowed_hosts": ["h"], **settings})
    kafka, metrics, services = MemoryCluster({"t": 3, "t.dlq": 1}), Metrics(), {"kafka": Readiness(True)}
    kafka.brokers.create_topic("new", 3)  # known when it is looked up
    registry = SchemaRegistry(SchemaRegistryConfig(url="http://127.0.0.1:1"), ManualClock())
    events = audit_of(kafka)
    produce = ProduceService(ProducerConfig(), Codecs(registry), kafka.producer, kafka, events, config.max_records)
    transactions = Transactions(ProducerConfig(), produce, kafka.producer)
    idempotency = Idempotency(IdempotencyConfig(), kafka, lambda: None, SystemClock())
    writing = Writing(transactions, idempotency, metrics)
    authenticator = Authenticator(security, SystemClock()) if security.mode != "none" else None
    tls = TlsFiles(config.tls, SystemClock()) if config.tls.certificate else None
    dead_letters = dead_letters_of(kafka)
    produce_route = ProduceRoute(produce, writing, metrics, config)
    families = [
        produce_route,
        TransactionRoute(writing, config),
        PublishRoute(["kafka"], produce, metrics, ManualClock(1_800_000_000), config),
        HealthEndpoints(lambda: services, "t", metrics),
        AuditEndpoints(events, config.max_records),
        DeadLetterEndpoints(dead_letters),
        RedeliveryEndpoints(dead_letters),
        *_further_endpoints(kafka, Codecs(registry)),
    ]
    application = Application(config, Router.of(families, config, events), metrics, authenticator, events)
    web = WebService(config, application, tls=tls.context if tls else None)
    produce_route.stream.spawn = web.spawn
    web.before_drain.append(produce_route.stream.drain)
    await idempotency.start()
    await web.start()
    server = RunningServer(web, kafka, metrics, services)
    server.tls, server.dead_letters, server.events, server.streams = tls, dead_letters, events, produce_route.stream
    try:
        yield server
    finally:
        kafka.producer.release()
        await server.close()
        await web.stop()
        await idempotency.stop()
        await registry.close()


OpenServer = Callable[..., contextlib.AbstractAsyncContextManager[RunningServer]]
"""The fixture `opened`."""


@pytest.fixture
def opened() -> OpenServer:
    """Open a running server: `async with opened(max_body_bytes=10) as server`."""
    return _opened


@pytest.fixture
def server() -> contextlib.AbstractAsyncContextManager[RunningServer]:
    """A server with the usual settings, which runs while the test does."""
    return _opened()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Open the server that a test asks for in the loop of the test."""
    test = pyfuncitem.obj
    if not isinstance(pyfuncitem.funcargs.get("server"), contextlib.AbstractAsyncContextManager):
        return

    async def whole(server: Any, **given: Any) -> None:
        async with server as running:
            await test(server=running, **given)

    whole.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    pyfuncitem.obj = whole
