"""One process: its services in the order they start, and what binds them."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable

import uvloop

from headrace.app.control_room import Controls
from headrace.app.dead_letters import dead_letters
from headrace.app.registrations import RegisteredConsumers
from headrace.app.replays import jobs_of
from headrace.app.uses import examination
from headrace.app.ways_in import WaysIn
from headrace.config.model import HeadraceConfig
from headrace.control.doctor import Durability, require
from headrace.control.lag import LagMonitor
from headrace.errors import ServiceDied
from headrace.formats.codecs import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.formats.registry_watch import RegistryWatch
from headrace.kafka import (
    Admin,
    BatchLimits,
    BulkProducer,
    OwnTopics,
    Producer,
    Reachability,
    StateTopic,
    TopicDirectory,
    TransactionalProducers,
)
from headrace.kafka.producer_settings import check_properties
from headrace.lifecycle import Clock, Service, Signals, Supervisor, SystemClock
from headrace.lifecycle.gauge_registry import register_gauge
from headrace.security import Authenticator, TlsFiles
from headrace.sidecar.idempotency import Idempotency
from headrace.sidecar.produce import ProduceService
from headrace.sidecar.transactions import Transactions
from headrace.telemetry.audit import Audit, AuditTarget
from headrace.telemetry.audit_targets import AuditFile, AuditTopic
from headrace.telemetry.logs import configure_logging
from headrace.telemetry.metrics import Metrics
from headrace.web.application import Application, Routes
from headrace.web.routes.control import control_routes
from headrace.web.routes.writing import Writing
from headrace.web.server import WebService

log = logging.getLogger(__name__)

_READY_CHECK_SECONDS = 0.1
_FIRST_LOG_SECONDS = 2.0
_NEXT_LOG_SECONDS = 15.0
_LARGEST_RECORD_BYTES = 1_000_000_000
_EXIT_OK, _EXIT_DIED = 0, 1
_COLLECT_AFTER = 20_000, 50, 100


class App:
    """The services of one process, downstream first, and what binds them."""

    def __init__(self, config: HeadraceConfig, clock: Clock) -> None:
        """Make every service; nothing is started, no one is contacted.

        Raises:
            ConfigError: A client property is not allowed, or the files of TLS are not usable.
            FunctionInvalid: A function file is not usable.
            PipelineInvalid: A pipeline file is not usable.
        """
        self.config = config
        self.clock = clock
        self.metrics = Metrics()
        check_properties(config.kafka, config.producer)
        for warning in config.producer.warnings:
            log.warning("%s", warning)
        self.reachability = Reachability(config.kafka, clock)
        self.admin = Admin(config.kafka, self.reachability)
        self.limits = BatchLimits(lambda: self.admin, config.producer.batch_bytes)
        self.topics = TopicDirectory(self.admin, clock, self.limits)
        self.producer = Producer(
            config.kafka, config.producer, reachability=self.reachability, refuses=True, limits=self.limits
        )
        self.inner_producer = self._inner_producer()
        self.registry = SchemaRegistry(config.schema_registry, clock)
        self.codecs = Codecs(self.registry, plain_unions=config.schema_registry.avro_unions == "plain")
        self._wanted: dict[str, str] = {}
        self.services: list[Service] = [self.reachability, self.topics]
        self.services += dict.fromkeys([self.producer, self.inner_producer])
        self.audit = self._audit()
        ways_in = WaysIn(self)
        if ways_in.need_registry or "schema_registry" in config.model_fields_set:
            self.services.append(RegistryWatch(self.registry, clock))
        if wanted := {**self._wanted, **ways_in.wanted_topics}:
            self.services.append(OwnTopics(self.admin, wanted, clock, fits=ways_in.fits))
        lag = LagMonitor(self.admin, ways_in.groups, clock)
        self.metrics.lag_of = lag.all
        controls = Controls(self, ways_in, lag)
        jobs, routes_of_jobs = jobs_of(self, controls, ways_in)
        self.services += [*controls.services, *ways_in.services, *([jobs] if controls.services else ()), lag]
        registered = RegisteredConsumers(self, ways_in, controls) if config.registrations.backends else None
        self.services += registered.services if registered else ()
        self._examine = examination(config, ways_in.functions, self.admin)
        if config.durability == "report" and (config.reactive_consumers or config.functions):
            self.services.append(Durability(self._examine, clock))
        self.supervisor = Supervisor(self.services, clock, config.drain_seconds)
        routes = [*routes_of_jobs, *(registered.routes if registered else ())]
        self.web = self._web(ways_in, controls, routes)
        # Last to start and first to drain; and it answers health questions while the others drain.
        self.supervisor.add(self.web)

    def _web(self, ways_in: WaysIn, controls: Controls, more: Routes) -> WebService:
        """Make the HTTP server, and add what its endpoints need to the services."""
        config, clock, note = self.config, self.clock, controls.room.note
        topics, most = self.topics, config.http.max_records
        produce = ProduceService(
            config.producer, self.codecs, self.producer, topics, self.audit, most, ways_in.internal
        )
        authenticator = Authenticator(config.security, clock) if config.security.mode != "none" else None
        tls = TlsFiles(config.http.tls, clock) if config.http.tls.certificate else None
        for service in [*(authenticator.services if authenticator else ()), *([tls] if tls else ())]:
            self.supervisor.add(service)
        writing = self._writing(produce)
        redelivery, dead_letter_routes = dead_letters(self, ways_in.letter_consumers, note)
        self.supervisor.add(redelivery)
        readiness = self.supervisor.readiness
        register_gauge("headrace_ready", lambda: int(all(service.ready for service in readiness().values())))
        routes = [*dead_letter_routes, *control_routes(controls.room, config.http), *more]
        application = Application(
            config.http, produce, writing, readiness, self.metrics, authenticator, self.audit, more=routes
        )
        return WebService(config.http, application, tls=tls.context if tls else None, clock=clock)

    def _inner_producer(self) -> Producer:
        config = self.config
        if not (config.reactive_consumers or config.functions or config.registrations.backends):
            return self.producer
        # Its records may be larger: a dead letter is a record that Kafka took, and headers.
        lasting = config.producer.lasting.model_copy(update={"max_record_bytes": _LARGEST_RECORD_BYTES})
        return Producer(config.kafka, lasting, "inner_producer", self.reachability, limits=self.limits)

    def _writing(self, produce: ProduceService) -> Writing:
        config = self.config
        name = config.producer.transactions.id or f"headrace-{socket.gethostname()}-{config.http.port}"
        producers = TransactionalProducers(
            config.kafka, config.producer, name, reachability=self.reachability, limits=self.limits
        )
        transactions = Transactions(config.producer, produce, producers, self.audit)
        state = StateTopic(config.kafka, self.admin, config.producer.idempotency.topic)
        idempotency = Idempotency(config.producer.idempotency, transactions, state, producers.open, self.clock)
        self.supervisor.add(producers)
        self.supervisor.add(idempotency)
        return Writing(transactions, idempotency, self.metrics)

    async def run(self, announce: Callable[[str], None]) -> int:
        """Run until a signal or a death. Returns the exit code."""
        signals = Signals()
        signals.install()
        announcer = _Announcer(self.supervisor, self.clock, lambda: announce(f"ready http={self.web.url}"))
        self.supervisor.add(announcer)
        try:
            self.web.claim()  # the web starts last, and consumers would have begun by then
            if self.config.durability == "strict":
                await require(self._examine)
            await self.supervisor.start()
            # What was made until now stays. Looking through it again and again took a fifth of producing.
            gc.freeze()
            gc.set_threshold(*_COLLECT_AFTER)
            await self.supervisor.run(signals)
        except ServiceDied as death:
            log.critical("%s", death.description)
            return _EXIT_DIED
        finally:
            await self.registry.close()
        return _EXIT_OK

    def _audit(self) -> Audit | None:
        settings = self.config.audit
        if settings.to == "none":
            return None
        target: AuditTarget = AuditFile(settings)
        if settings.to == "topic":
            # Of its own, so notes never take the room or the turn of the records they tell of.
            producer = BulkProducer(self.config.kafka, self.config.producer.lasting, "audit_producer", self.limits)
            target = AuditTopic(settings.topic, producer)
            self.services.append(producer)
            if self.config.kafka.create_topics:
                self._wanted[settings.topic] = ""
        audit = Audit(settings, target, self.metrics, self.clock)
        self.services.append(audit)
        return audit


class _Announcer(Service):
    """Says once that everything in the file answers."""

    def __init__(self, supervisor: Supervisor, clock: Clock, announce: Callable[[], None]) -> None:
        super().__init__("announcer")
        self._supervisor = supervisor
        self._clock = clock
        self._announce = announce

    async def start(self) -> None:
        self.spawn(self._wait(), "wait")

    async def _wait(self) -> None:
        next_log = self._clock.monotonic() + _FIRST_LOG_SECONDS
        while waits := {name: one.reason for name, one in self._supervisor.readiness().items() if not one.ready}:
            if self._clock.monotonic() >= next_log:
                next_log += _NEXT_LOG_SECONDS
                log.info("not ready yet: %s", "; ".join(f"{name}: {reason}" for name, reason in waits.items()))
            await self._clock.sleep(_READY_CHECK_SECONDS)
        self._announce()


def run(config: HeadraceConfig, *, announce: Callable[[str], None]) -> int:
    """Run everything the configuration names, in the foreground.

    Args:
        config: What to run.
        announce: Takes the one line `ready http=...` when everything answers.

    Returns:
        Exit code: 0 after a drain by signal, 1 when a service ended by itself.

    Raises:
        ConfigError, FunctionInvalid, PipelineInvalid, PortTaken: Nothing was started.
    """
    configure_logging(config.log_level)

    async def main() -> int:
        return await App(config, SystemClock()).run(announce)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
