"""Assembly: a configuration in, running services out. The only file that knows everyone."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import socket
from collections.abc import Callable, Sequence

import uvloop

from headrace.config.consumers import (
    BatchConfig,
    DeadLetterConfig,
    DeliveryConfig,
    FlowControl,
    ReactiveConsumerConfig,
)
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.control.lag import LagMonitor
from headrace.delivery.dead_letter import DeadLetterTopic
from headrace.delivery.protocols import Destination
from headrace.delivery.pump import Pump
from headrace.errors import ServiceDied
from headrace.formats.codecs import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.formats.registry_watch import RegistryWatch
from headrace.functions import wire
from headrace.functions.destination import FunctionDestination
from headrace.functions.load import load_function
from headrace.functions.service import FunctionService
from headrace.functions.spec import FunctionSpec, KafkaTrigger
from headrace.kafka import (
    Admin,
    Consumer,
    OwnTopics,
    Producer,
    StartPolicy,
    StateTopic,
    TopicDirectory,
    TransactionalProducers,
)
from headrace.kafka.producer_settings import check_properties
from headrace.lifecycle import Clock, Service, Signals, Supervisor, SystemClock
from headrace.pipelines.load import load_pipelines
from headrace.pipelines.runs import PipelineRun
from headrace.pipelines.spec import PipelineSpec
from headrace.records import TopicPartition
from headrace.security import Authenticator, TlsFiles
from headrace.sidecar.idempotency import Idempotency
from headrace.sidecar.produce import ProduceService
from headrace.sidecar.reactive.http_destination import HttpDestination
from headrace.sidecar.transactions import Transactions
from headrace.telemetry.audit import Audit, AuditTarget
from headrace.telemetry.audit_targets import AuditFile, AuditTopic
from headrace.telemetry.logs import configure_logging
from headrace.telemetry.metrics import Metrics
from headrace.web.application import Application
from headrace.web.routes.writing import Writing
from headrace.web.server import WebService

log = logging.getLogger(__name__)

_FUNCTION_BATCH = BatchConfig(max_records=256, max_bytes=1_048_576)
_FUNCTION_IN_FLIGHT = 1000
_FUNCTION_FLOW = FlowControl()
_READY_CHECK_SECONDS = 0.1
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
        self.admin = Admin(config.kafka)
        self.topics = TopicDirectory(self.admin, clock)
        self.producer = Producer(config.kafka, config.producer)
        lasting = config.producer.lasting
        self.inner_producer = (
            self.producer if lasting is config.producer else Producer(config.kafka, lasting, "inner_producer")
        )
        self.registry = SchemaRegistry(config.schema_registry, clock)
        self.codecs = Codecs(self.registry, plain_unions=config.schema_registry.avro_unions == "plain")
        self._wanted: dict[str, str] = {}
        self._groups: list[str] = []
        self._formats: set[str] = {config.producer.key_format, config.producer.value_format}
        ways_in = [*self._reactive_consumers(), *self._functions(), *self._pipelines()]
        self.services: list[Service] = [self.topics, *dict.fromkeys([self.producer, self.inner_producer])]
        self.audit = self._audit()
        if self._formats & {"avro", "jsonschema", "protobuf"} or "schema_registry" in config.model_fields_set:
            self.services.append(RegistryWatch(self.registry, clock))
        if self._wanted:
            self.services.append(OwnTopics(self.admin, self._wanted, clock))
        self.services += ways_in
        if self._groups:
            self.services.append(LagMonitor(self.admin, self._groups, clock, self._publish_lag))
        self.supervisor = Supervisor(self.services, clock, config.drain_seconds)
        produce = ProduceService(
            config.producer, self.codecs, self.producer, self.topics, self.audit, config.http.max_records
        )
        authenticator = Authenticator(config.security, clock) if config.security.mode != "none" else None
        tls = TlsFiles(config.http.tls, clock) if config.http.tls.certificate else None
        for service in [*(authenticator.services if authenticator else ()), *([tls] if tls else ())]:
            self.supervisor.add(service)
        writing = self._writing(produce)
        application = Application(
            config.http, produce, writing, self.supervisor.readiness, self.metrics, authenticator, self.audit
        )
        self.web = WebService(config.http, application, tls=tls.context if tls else None, clock=clock)
        # Last to start and first to drain; and it answers health questions while the others drain.
        self.supervisor.add(self.web)

    def _writing(self, produce: ProduceService) -> Writing:
        config = self.config
        name = config.producer.transactions.id or f"headrace-{socket.gethostname()}-{config.http.port}"
        producers = TransactionalProducers(config.kafka, config.producer, name)
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
            producer = Producer(self.config.kafka, self.config.producer.lasting, "audit_producer")
            target = AuditTopic(settings.topic, producer.produce)
            self.services.append(producer)
            if self.config.kafka.create_topics:
                self._wanted[settings.topic] = ""
        audit = Audit(settings, target, self.metrics, self.clock)
        self.services.append(audit)
        return audit

    def _reactive_consumers(self) -> list[Service]:
        services: list[Service] = []
        for name, reactive in self.config.reactive_consumers.items():
            services += self._reactive_consumer(f"reactive {name}", reactive)
        return services

    def _reactive_consumer(self, name: str, reactive: ReactiveConsumerConfig) -> list[Service]:
        self._formats |= {reactive.key_format, reactive.value_format}
        keys, values = self.codecs.for_reading(reactive.key_format), self.codecs.for_reading(reactive.value_format)
        destination = HttpDestination(f"{name} backend", reactive.backend, keys, values)
        pump = self._pump(name, reactive.group, destination, reactive.topics, reactive.dead_letter, reactive)
        policy = StartPolicy(reactive.auto_offset_reset, reactive.on_gap)
        consumer = self._consumer(name, pump, self.config.kafka, reactive.topics, policy, reactive.flow)
        return [destination, pump, consumer]

    def _functions(self) -> list[Service]:
        services: list[Service] = []
        for file in self.config.functions:
            spec = load_function(file)
            for trigger in spec.triggers:
                services += self._function(spec, trigger)
        return services

    def _function(self, spec: FunctionSpec, trigger: KafkaTrigger) -> list[Service]:
        self._formats |= {trigger.key_format, trigger.value_format}
        workers = FunctionService(spec, trigger, self.clock)
        destination = FunctionDestination(
            workers.serve,
            trigger,
            self.clock,
            produce=self.inner_producer.produce,
            schema_of=self._schema_of,
            partitions_of=self.topics.partitions_of,
        )
        if trigger.output_topic and self.config.kafka.create_topics:
            self._wanted[trigger.output_topic] = trigger.topics[0]
        delivery = DeliveryConfig(batch=_FUNCTION_BATCH, retry=trigger.retry, max_in_flight=_FUNCTION_IN_FLIGHT)
        pump = self._pump(workers.name, trigger.group, destination, trigger.topics, trigger.dead_letter, delivery)
        kafka = self.config.kafka
        if trigger.brokers:
            kafka = kafka.model_copy(update={"bootstrap_servers": ",".join(trigger.brokers)})
        if trigger.client_properties:
            kafka = kafka.model_copy(update={"properties": {**kafka.properties, **trigger.client_properties}})
        consumer = self._consumer(workers.name, pump, kafka, trigger.topics, StartPolicy(trigger.auto_offset_reset))
        return [workers, pump, consumer]

    def _pipelines(self) -> list[Service]:
        return [self._pipeline(spec) for spec in load_pipelines(self.config.pipelines)]

    def _pipeline(self, spec: PipelineSpec) -> Service:
        folder = self.config.state_dir / "pipelines"
        run = PipelineRun(spec, self.config.kafka, folder, self.clock, self.admin)
        for flow, group in run.groups.items():
            self._groups.append(group)
            self.metrics.watch_deliveries(f"{run.name} {flow}", functools.partial(run.counts, flow))
        return run

    def _pump(
        self,
        name: str,
        group: str,
        destination: Destination,
        topics: Sequence[str],
        dead_letter: DeadLetterConfig,
        delivery: DeliveryConfig,
    ) -> Pump:
        letters = None
        if dead_letter.enabled:
            creates = self.config.kafka.create_topics
            letters = DeadLetterTopic(
                dead_letter.topic, self.inner_producer.produce, self.admin.ensure_topic_like if creates else None
            )
            if creates:
                self._wanted.update({letters.topic_for(topic): topic for topic in topics})
        self._groups.append(group)
        pump = Pump(f"{name} delivery", group, destination, letters, delivery=delivery, clock=self.clock)
        self.metrics.watch_deliveries(name, pump.counts.read)
        return pump

    def _consumer(
        self,
        name: str,
        pump: Pump,
        kafka: KafkaConfig,
        topics: Sequence[str],
        policy: StartPolicy,
        flow: FlowControl = _FUNCTION_FLOW,
    ) -> Consumer:
        consumer = Consumer(
            kafka,
            name=f"{name} consumer",
            group=pump.group,
            topics=topics,
            listener=pump,
            flow=flow,
            clock=self.clock,
            policy=policy,
        )
        pump.source = consumer
        return consumer

    def _publish_lag(self, group: str, partition: TopicPartition, records: int) -> None:
        self.metrics.lag(group, partition.topic, partition.partition, records)

    async def _schema_of(self, schema_id: int) -> wire.Schema:
        schema = await self.registry.by_id(schema_id)
        return wire.Schema(schema_id, schema.type, schema.text, await self.registry.texts_of(schema.references))


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
        while not all(readiness.ready for readiness in self._supervisor.readiness().values()):
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
