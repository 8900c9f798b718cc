"""One process: its services in the order they start."""

import asyncio
import gc
import itertools
import logging
import os
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvloop

from headrace.admin.cluster.group_administration import GroupAdministration
from headrace.admin.cluster.registered_schemas import RegisteredSchemas
from headrace.admin.cluster.routes import ClusterEndpoints
from headrace.admin.cluster.schema_routes import SchemaEndpoints
from headrace.admin.cluster.topic_administration import TopicAdministration
from headrace.admin.health.examination import Durability, require
from headrace.admin.health.routes import HealthEndpoints
from headrace.app.administration_parts import Administration
from headrace.app.assembly import Assembly
from headrace.app.changed_files import ChangedFiles
from headrace.app.console_process import ConsoleProcess
from headrace.app.document_routes import DocumentEndpoints
from headrace.app.job_services import dead_letters, jobs_of
from headrace.app.ready_announcer import ReadyAnnouncer
from headrace.app.registered_consumers import RegisteredConsumers
from headrace.app.shared_work import Several
from headrace.app.topic_requirements import examination
from headrace.app.user_program import UserProgram
from headrace.commands.commands import Commands
from headrace.commands.consumer_control import ConsumerControl
from headrace.commands.consumer_status import ConsumerStatuses
from headrace.commands.instance_owners import InstanceOwners
from headrace.commands.routes import ControlEndpoints
from headrace.config.format_list import SCHEMA_TYPES
from headrace.config.http import HttpConfig
from headrace.config.kafka_security import warnings_of
from headrace.config.model import HeadraceConfig
from headrace.consumers.lag import LagMonitor
from headrace.consumers.process_context import ProcessContext, make_context, transactional_id
from headrace.consumers.running_consumer import RunningConsumer, RunningConsumers, groups_of
from headrace.errors import ConfigError, ServiceDied
from headrace.functions.routes import FunctionEndpoints
from headrace.http.application import Application, Router
from headrace.http.auth import Authenticator
from headrace.http.endpoint import OPEN
from headrace.http.forwarding import Forwarder
from headrace.http.other_processes import OtherProcesses
from headrace.http.server import WebService
from headrace.kafka import JSON_OBJECTS, CompactedTable, InternalTopic, Lease, TopicCreator, TransactionalProducers
from headrace.kafka.client.properties import check_properties
from headrace.kafka.cluster_admin import ClusterAdmin
from headrace.pipelines.routes import PipelineEndpoints
from headrace.runtime import Clock, ServerWatch, Service, Signals, Supervisor, SystemClock
from headrace.runtime.gauge_registry import register_gauge
from headrace.runtime.notification import Notifications
from headrace.runtime.telemetry.influxdb import InfluxDb
from headrace.runtime.telemetry.logs import configure_logging
from headrace.runtime.telemetry.loop_delay import LoopDelay
from headrace.runtime.telemetry.otlp import otlp_target
from headrace.runtime.telemetry.periodic_push import MetricsPush, PushTarget
from headrace.runtime.telemetry.tracing import configure_tracing
from headrace.runtime.tls import ClientTlsFiles, TlsFiles
from headrace.sidecar.active.audit_routes import AuditEndpoints
from headrace.sidecar.active.dead_letter_routes import INSTANCE, ActiveDeadLetterEndpoints
from headrace.sidecar.active.instances import ActiveInstances
from headrace.sidecar.active.routes import ActiveEndpoints
from headrace.sidecar.active.status_routes import ActiveStatusEndpoints
from headrace.sidecar.active.topic_routes import TopicEndpoints
from headrace.sidecar.produce.idempotency import Idempotency
from headrace.sidecar.produce.produce import ProduceService
from headrace.sidecar.produce.routes import ProduceRoute
from headrace.sidecar.produce.transaction_routes import TransactionRoute, Writing
from headrace.sidecar.produce.transactions import Transactions

if TYPE_CHECKING:  # what a configuration does not name is not imported
    from headrace.queries.engine_process import QueryEngine

log = logging.getLogger(__name__)

_EXIT_DIED = 1
_COLLECT_AFTER = 20_000, 50, 100


class App:
    """The services of one process, downstream first."""

    def __init__(self, config: HeadraceConfig, clock: Clock, several: Several | None = None) -> None:
        """Make every service; nothing is started or contacted. `several` is set in one of several processes.

        Raises:
            ConfigError: A client property is not allowed, or the files of TLS are not usable.
            FunctionInvalid: A function file is not usable.
            PipelineInvalid: A pipeline file is not usable.
        """
        _check(config)
        self._several = several
        self.context = context = make_context(config, clock, several.share.number if several else None)
        assembly = Assembly(context, config, engine=_engine(config, clock) if config.tables else None)
        self._examine = examination(config, assembly.function_specs, context.admin)
        self.services: list[Service] = [*_measuring(context), *context.services, *_preparation(context, assembly)]
        running: dict[str, RunningConsumer] = {}
        lag = LagMonitor(lambda: groups_of(running.values(), assembly.parts.other_groups), clock)
        context.metrics.lag_of = lag.all
        table = _control_table(context, assembly)
        control = ConsumerControl(table, running, context.member, lag.of, clock)
        for consumer in assembly.parts.consumers:
            control.add(consumer)
        assembly.parts.on_made = control.add
        jobs, job_endpoints = jobs_of(context, table, running, assembly.internal)
        if assembly.parts.consumers or config.registrations.backends or config.cluster.peers:
            # A paused consumer must not start, so the table is read before the consumers start.
            self.services += [table, control, *assembly.services, jobs, lag]
        else:
            table.missing = "this process runs no consumer: send the request to another, or add one to its file"
            self.services += [*assembly.services, lag]
        functions = FunctionEndpoints(assembly.functions.known, lag.of, assembly.functions.reloads, self._others)
        controls = self._controls(control, ConsumerStatuses(control, lag.of, clock))
        families: list[object] = [controls, functions, job_endpoints, PipelineEndpoints(assembly.pipelines)]
        if config.registrations.backends:
            registered = RegisteredConsumers(context, assembly, table, control)
            self.services += registered.services
            families.append(registered.endpoints)
        families += self._queries(assembly.engine)
        if config.durability == "report" and (config.reactive_consumers or config.functions):
            self.services.append(Durability(self._examine, clock))
        self._instances: ActiveInstances | None = None
        owners = self._owners(table) if config.cluster.peers else None
        families += self._active(assembly, running, owners)
        self.signals = Signals()
        self.administration = self._administration(assembly)
        self.supervisor = Supervisor(self.services, clock, config.drain_seconds)
        self.web = self._web(assembly, [*families, dead_letters(context, running)], owners)
        if self._instances:
            self.web.before_drain.append(self._instances.end_reads)
        # Last to start and first to drain; it still answers health requests while the others drain.
        self.supervisor.add(self.web)

    @property
    def _others(self) -> OtherProcesses | None:
        return self._several.others if self._several else None

    def _controls(self, control: ConsumerControl, statuses: ConsumerStatuses) -> ControlEndpoints:
        return ControlEndpoints(control, statuses, Commands(control, self.context.clock), self._others)

    def _administration(self, assembly: Assembly) -> Administration:
        """Make the administration, and add the service of assaults if they are allowed."""
        administration = Administration(
            self.context,
            assembly,
            lambda: self.supervisor.services,
            self.signals.drain_requested.set,  # a request during the drain is no second signal
            self._several,
        )
        if self.context.config.admin.chaos != "none":
            self.services.append(administration.chaos)
        return administration

    def _active(self, assembly: Assembly, running: RunningConsumers, owners: InstanceOwners | None) -> list[object]:
        """Make the endpoints that clients read records with, and add the services that they need."""
        context, settings = self.context, self.context.config.active_consumers
        found: list[object] = [
            TopicEndpoints(settings, context.admin, context.codecs, assembly.internal.kind_of, context.audit),
            _administration(context, assembly),
            SchemaEndpoints(RegisteredSchemas(context.registry)),
        ]
        if settings.enabled:
            shared = (owners.claim, owners.release) if owners else None
            instances = ActiveInstances(settings, context.admin, context.codecs, context.clock, context.audit, shared)
            instances.own_groups = lambda: groups_of(running.values(), assembly.parts.other_groups)
            self._instances = instances
            monitor, consumers = instances.monitor, context.metrics.lag_of
            context.metrics.lag_of = lambda: itertools.chain(consumers(), monitor.lags())
            self.services += [monitor, instances]
            status = ActiveStatusEndpoints(monitor, context.member, self._others)
            found += [ActiveEndpoints(settings, instances, context.admin, ""), status]
            ensure = context.admin.ensure_topic_like if context.config.kafka.create_topics else None
            produce, codecs = context.audited_produce(), context.codecs
            # Each process has an instance of its own in the group, so that no call depends on another process.
            name = f"{INSTANCE}-{context.host}-{context.config.http.port}" if owners else INSTANCE
            found.append(
                ActiveDeadLetterEndpoints(settings, instances, context.admin, codecs, running, produce, ensure, name)
            )
        return found

    def _queries(self, engine: "QueryEngine | None") -> list[object]:
        """Make the endpoints of SQL, and add the services that they need."""
        config, clock = self.context.config, self.context.clock
        if not engine and not config.ksqldb:
            return []
        from headrace.queries.ksqldb_routes import KsqldbEndpoints
        from headrace.queries.ksqldb_server import KsqldbServer
        from headrace.queries.ksqldb_statements import KsqldbStatements
        from headrace.queries.routes import QueryEndpoints

        server = KsqldbServer(config.ksqldb, clock) if config.ksqldb else None
        if server:
            self.services += [*filter(None, [server.tls]), ServerWatch("ksqlDB server", server, clock)]
        statements = KsqldbStatements(engine, server, config.sql.max_rows)
        queries = QueryEndpoints(engine, statements, config.http, config.sql)
        return [queries, KsqldbEndpoints(statements, engine, config.http)]

    def _owners(self, table: CompactedTable[Any]) -> InstanceOwners:
        """Make the directory of the instances of all processes, and add it to the services."""
        context, config = self.context, self.context.config
        lease_of = partial(Lease, config.kafka, context.admin, clock=context.clock)
        owners = InstanceOwners(table, config.cluster.url or "", lease_of, context.admin, context.clock)
        self.services.append(owners)
        return owners

    def _forwarder(self, owners: InstanceOwners) -> Forwarder:
        """Make the forwarder to other processes, and add the certificates that it needs."""
        config, clock = self.context.config, self.context.clock
        tls = ClientTlsFiles("cluster.tls", config.cluster.tls, clock)
        self.services.append(tls)
        return Forwarder(config.cluster, config.http, owners, tls.context, clock)

    def _web(self, assembly: Assembly, families: Sequence[object], owners: InstanceOwners | None) -> WebService:
        """Make the HTTP server, and add the services that its endpoints need."""
        context, supervisor = self.context, self.supervisor
        config, clock = context.config, context.clock
        forwarder = self._forwarder(owners) if owners else None
        produce = ProduceService(
            config.producer,
            context.codecs,
            context.producer,
            context.topics,
            context.audit,
            config.http.max_records,
            assembly.internal,
        )
        authenticator = Authenticator(config.security, clock) if config.security.mode != "none" else None
        self.administration.authenticator = authenticator
        tls = TlsFiles(config.http.tls, clock) if config.http.tls.certificate else None
        for service in [*(authenticator.services if authenticator else ()), *([tls] if tls else ())]:
            supervisor.add(service)
        writing = self._writing(produce, forwarder)
        readiness = supervisor.readiness
        register_gauge("headrace_ready", lambda: int(all(service.ready for service in readiness().values())))
        audit, metrics = context.audit, context.metrics
        produce_route = ProduceRoute(produce, writing, metrics, config.http)
        families = [
            produce_route,
            TransactionRoute(writing, config.http, self._instances, forwarder),
            self._health(),
            self.administration.endpoints,
            DocumentEndpoints(_document),
            AuditEndpoints(audit, config.http.max_records),
            *families,
        ]
        own_host = urlsplit(config.cluster.url or "").hostname
        http = config.http.model_copy(update={"allowed_hosts": [*config.http.allowed_hosts, *filter(None, [own_host])]})
        management = self._management(families, authenticator)
        router = Router.of(families, http, audit, lambda endpoint: not (management and endpoint.administers))
        application = Application(http, router, metrics, authenticator, audit, forwarder)
        context_of_tls = tls.context if tls else None
        self.listeners = [management] if management else []
        if self._several:
            self._several.others.forwarder = forwarder
            everything = Application(http, Router.of(families, http, audit), metrics, authenticator, audit, forwarder)
            supervisor.add(self._several.listen_privately(http, everything, clock))
        if assembly.functions.listening:
            self._listen(assembly, http, authenticator, context_of_tls)
        self.administration.gates.append(application.gate)
        return WebService(config.http, application, produce_route.stream, tls=context_of_tls, clock=clock)

    def _listen(
        self, assembly: Assembly, http: HttpConfig, authenticator: Authenticator | None, tls: ssl.SSLContext | None
    ) -> None:
        """Make and add the listeners of functions that answer requests."""
        from headrace.functions.triggers.http_requests import FunctionRequests

        context = self.context
        for workers, trigger, destination in assembly.functions.listening:
            own = http.model_copy(update={"port": trigger.port, "max_body_bytes": trigger.max_body_bytes})
            if self._several and not trigger.port:
                raise ConfigError(f"{workers.name}: several processes cannot share port 0: choose a port")
            requests = FunctionRequests(workers, trigger, destination, own)
            called = Application(own, requests, context.metrics, authenticator, context.audit)
            self.listeners.append(WebService(own, called, name=requests.name, tls=tls, clock=context.clock))
            self.supervisor.add(self.listeners[-1])
            self.administration.gates.append(called.gate)

    def _management(self, families: Sequence[object], authenticator: Authenticator | None) -> WebService | None:
        """Make the listener of administration, if there is one, and add it; it serves while all others drain."""
        context, supervisor, http = self.context, self.supervisor, self.context.config.http
        settings = http.management
        if not settings:
            return None
        tls = TlsFiles(settings.tls, context.clock, "http.management.tls") if settings.tls.certificate else None
        if tls:
            supervisor.add(tls)
        own = http.model_copy(update={"host": settings.host, "port": settings.port, "tls": settings.tls})
        router = Router.of(families, own, context.audit, lambda one: one.administers or one.rule == OPEN)
        application = Application(own, router, context.metrics, authenticator, context.audit)
        context_of_tls = tls.context if tls else None
        web = WebService(own, application, name="management", tls=context_of_tls, clock=context.clock)
        supervisor.add(web, outlives=True)
        return web

    def _health(self) -> HealthEndpoints:
        context, several, own = self.context, self._several, self.supervisor.readiness
        readiness = (lambda: {**own(), **several.link.others()}) if several else own
        name = context.audit.service_id if context.audit else "headrace"
        return HealthEndpoints(readiness, name, context.metrics, context.config.health, self._others)

    def _writing(self, produce: ProduceService, forwarder: Forwarder | None) -> Writing:
        """Make what serves transactions and idempotency keys."""
        context, config = self.context, self.context.config
        name = transactional_id(config)
        producers = TransactionalProducers(config.kafka, config.producer, name, admin=context.admin)
        transactions = Transactions(config.producer, produce, producers, context.audit)
        idempotency = Idempotency(
            config.producer.idempotency, transactions, context.admin, producers.open, context.clock
        )
        self.supervisor.add(producers)
        self.supervisor.add(idempotency)
        keys = self._several.key_owners(forwarder) if self._several and forwarder else None
        if keys:
            idempotency.is_own = keys.is_own
        return Writing(transactions, idempotency, context.metrics, keys)

    async def run(
        self, announce: Callable[[str], None], program: Sequence[str] = (), files: ChangedFiles | None = None
    ) -> int:
        """Run until a signal or a death, a change of watched files, or the end of the user's program.

        Returns the exit code.
        """
        self.signals.install()
        self.administration.open()
        webs = [self.web, *self.listeners]
        line = lambda: announce("ready " + " ".join(f"{web.name}={web.url}" for web in webs))  # noqa: E731
        several = self._several
        manager = several.link if several else Notifications(os.environ)
        self.supervisor.add(ReadyAnnouncer(self.supervisor, self.context.clock, line, manager))
        config = self.context.config
        if config.console:
            urls = lambda: {web.name: web.url for web in webs}  # noqa: E731
            self.supervisor.add(ConsoleProcess(config.console, config.http, urls, self.context.clock))
        ended = self.signals.drain_requested.set
        user = UserProgram(program, lambda: self.web.url, self.supervisor.readiness, ended, self.context.clock)
        if files:
            files.signals = self.signals
            self.supervisor.add(files)
        if program:
            self.supervisor.add(user)  # the last to start, and the first to drain
        try:
            if several:
                several.open(webs, ended)
            for web in webs:
                web.claim()  # the web starts last, and consumers would have begun by then
            if self.context.config.durability == "strict":
                await require(self._examine)
            await self.supervisor.start()
            # Objects made until now stay. Scanning them in each collection took a fifth of the time of producing.
            gc.freeze()
            gc.set_threshold(*_COLLECT_AFTER)
            await self.supervisor.run(self.signals)
        except ServiceDied as death:
            log.critical("stopping this process: %s", death.description)
            return _EXIT_DIED
        finally:
            self.administration.close()
            await self.context.registry.close()
        return user.exit_code


def _document(version: str, media_type: str) -> bytes:
    from headrace.app.documents import written  # here, because its list has every endpoint of the product

    return written(version, media_type)


def _administration(context: ProcessContext, assembly: Assembly) -> ClusterEndpoints:
    admin, kind_of = context.admin, assembly.internal.kind_of
    topics, groups = TopicAdministration(admin, kind_of), GroupAdministration(admin, kind_of, context.clock)
    return ClusterEndpoints(topics, groups, ClusterAdmin(admin))


def _check(config: HeadraceConfig) -> None:
    """Check the client properties, and log warnings about settings."""
    check_properties(config.kafka, config.producer)
    weak = [
        text
        for server in (config.schema_registry, config.ksqldb, config.metrics.influxdb)
        if server
        for text in server.warnings
    ]
    for warning in [*config.producer.warnings, *warnings_of(config.kafka.security), *weak]:
        log.warning("%s", warning)


def _engine(config: HeadraceConfig, clock: Clock) -> "QueryEngine":
    from headrace.queries.engine_process import QueryEngine

    return QueryEngine(config, clock)


def _preparation(context: ProcessContext, assembly: Assembly) -> list[Service]:
    """Return what consumers need: the engine of tables, watches of servers, the creator of topics, if used."""
    config, clock = context.config, context.clock
    services: list[Service] = [assembly.engine] if assembly.engine else []
    formats = {config.producer.key_format, config.producer.value_format, *assembly.parts.formats}
    if formats & SCHEMA_TYPES.keys() or "schema_registry" in config.model_fields_set:
        services.append(ServerWatch("schema registry", context.registry, clock))
    if url := config.health.downstream_url:
        from headrace.admin.health.backend_check import BackendCheck

        origin = urlsplit(url)[:2]
        same = (
            one.backend.tls for one in config.reactive_consumers.values() if urlsplit(one.backend.url)[:2] == origin
        )
        tls = next(same, None)
        files = ClientTlsFiles("health", tls, clock) if tls and origin[0] == "https" else None
        services.append(ServerWatch("backend", BackendCheck(config.health, url, files), clock))
    created = assembly.parts.created_topics
    if config.audit.to == "topic" and config.kafka.create_topics:
        created = {config.audit.topic: InternalTopic(config.audit.topic), **created}
    if created:
        services.append(TopicCreator(context.admin, created.values(), clock))
    return services


def _measuring(context: ProcessContext) -> list[Service]:
    """Return the services that send spans, measure the event loop and push metrics."""
    config, metrics = context.config, context.metrics
    targets: list[PushTarget] = [*filter(None, [otlp_target(os.environ, f"{context.host}:{config.http.port}")])]
    if config.metrics.influxdb:
        database = InfluxDb(config.metrics.influxdb, config.audit.service_id, context.host)
        metrics.on_request = database.request
        targets.append(database)
    return [*configure_tracing(), LoopDelay(), *(MetricsPush(target, metrics, context.clock) for target in targets)]


def _control_table(context: ProcessContext, assembly: Assembly) -> CompactedTable[Any]:
    """Make the control table; its topic is created like the first topic that is read on the same cluster."""
    topics = [
        topic
        for each in assembly.parts.consumers
        if each.admin.servers == context.admin.servers
        for topic in each.topics
    ]
    topic = InternalTopic(context.config.control.topic, next(iter(topics), ""))
    produce = context.inner_producer.produce
    return CompactedTable(context.admin, topic, JSON_OBJECTS, produce, context.clock, optional="control")


def run(
    config: HeadraceConfig,
    *,
    announce: Callable[[str], None],
    read_again: Callable[[], HeadraceConfig] | None = None,
    program: Sequence[str] = (),
    files: ChangedFiles | None = None,
    several: Several | None = None,
) -> int:
    """Run everything the configuration names, in the foreground.

    Args:
        announce: Gets the line `ready http=...` when everything is ready.
        read_again: Reads the configuration again when an operator reloads a part of it.
        program: The user's program and its arguments, which runs with the process.
        files: Watches files, and ends the process when they have changed.
        several: Set in one of several processes.

    Returns:
        Exit code: 0 after a drain by signal, 1 after a service died; that of the program when it ended by itself.

    Raises:
        ConfigError, FunctionInvalid, PipelineInvalid, PortTaken: Nothing was started.
    """
    configure_logging(config.log_level, config.log_format, several.share.number if several else None)

    async def main() -> int:
        app = App(config, SystemClock(), several)
        app.administration.read_again = read_again
        return await app.run(announce, program, files)

    # The loop stays open until the process ends: to close it means to wait for threads that look up names.
    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
