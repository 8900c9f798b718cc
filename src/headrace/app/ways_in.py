"""What carries records to people's code: every reactive consumer, function and pipeline of the configuration."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.app import retry_path
from headrace.app.noting import noted_produce, witness_of
from headrace.config.backend import BackendConfig
from headrace.config.consumers import BatchConfig, DeliveryConfig, FlowControl, ReactiveConsumerConfig
from headrace.config.internal_topics import InternalTopics
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.config.retry import DeadLetterConfig
from headrace.control.replay_targets import Target
from headrace.control.steering import Steered
from headrace.delivery.dead_letter import DeadLetterTopic
from headrace.delivery.limit import SharedSlots
from headrace.delivery.protocols import DeadLetterWriter, Destination
from headrace.delivery.pump import Pump
from headrace.errors import FunctionInvalid, PipelineInvalid
from headrace.formats.codecs import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.functions import wire
from headrace.functions.destination import FunctionDestination
from headrace.functions.load import load_function
from headrace.functions.service import FunctionService
from headrace.functions.spec import FunctionSpec, KafkaTrigger, triggers_of
from headrace.kafka import Admin, Consumer, Reachability, ReadPolicy, Subscription, TopicDirectory
from headrace.lifecycle import Service
from headrace.pipelines.load import load_pipelines
from headrace.pipelines.runs import PipelineRun
from headrace.pipelines.spec import PipelineSpec
from headrace.security import BackendTlsFiles
from headrace.sidecar.reactive.health_wait import AfterHealth
from headrace.sidecar.reactive.http_destination import HttpDestination
from headrace.sidecar.reactive.kept_offsets import KeptOffsets
from headrace.sidecar.reactive.redelivered import LetterConsumer
from headrace.sidecar.reactive.stored import Stored
from headrace.telemetry.audit import Audit
from headrace.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_FUNCTION_BATCH = BatchConfig(max_records=256, max_bytes=1_048_576)
_FUNCTION_IN_FLIGHT = 1000
_FUNCTION_FLOW = FlowControl()
_INTERNAL = "is an internal topic (dead letters, audit, control ...) that only Headrace writes: name a topic of yours"
_KEPT_ELSEWHERE = "its backend keeps the group's offsets (backend.offsets_path), and a replay would move them"


class Surroundings(retry_path.Surroundings, Protocol):
    """What the process has made before, and all ways in use."""

    metrics: Metrics
    topics: TopicDirectory
    registry: SchemaRegistry
    codecs: Codecs
    audit: Audit | None


class WaysIn:
    """The services that consume, and what they need from the rest of the process."""

    def __init__(self, process: Surroundings, config: HeadraceConfig | None = None) -> None:
        """Make every service of the process's configuration, or of another; nothing is started, no one is contacted.

        Raises:
            ConfigError: A client property is not allowed.
            FunctionInvalid: A function file is not usable.
            PipelineInvalid: A pipeline file is not usable.
        """
        self.config = config or process.config
        self.clock = process.clock
        self.metrics = process.metrics
        self.admin = process.admin
        self.topics = process.topics
        self.inner_producer = process.inner_producer
        self.audit = process.audit
        self.registry = process.registry
        self.codecs = process.codecs
        self.other_clusters: dict[str, Admin] = {}
        """Clusters of functions that name brokers of their own, by those."""
        self.wanted_topics: dict[str, str] = {}
        """Topics of ours that must exist, and the topic each takes its replication from."""
        self.fits: dict[str, list[str]] = {}
        """Retry topics, and the topics whose records each must be able to take."""
        self.groups: dict[str, list[str]] = {}
        """Groups whose lag is watched, and the topics each reads in any case."""
        self.steered: list[Steered] = []
        """What can be steered while it runs."""
        self.targets: dict[tuple[str, str], Target] = {}
        """What records may be replayed to: `consumer` or `function`, and its name."""
        self.letter_consumers: dict[str, LetterConsumer] = {}
        """Reactive consumers by name, as their dead letters need them."""
        self._formats = {self.config.producer.key_format, self.config.producer.value_format}
        self.functions = [load_function(file) for file in self.config.functions]
        """What the function files say."""
        self.internal = InternalTopics(self.config, triggers_of(self.functions))
        """Topics that only Headrace writes."""
        pipelines = map(self._pipeline, load_pipelines(self.config.pipelines))
        consumers = [*self._reactive_consumers(), *self._functions(), *pipelines]
        others = [admin.reachability for admin in self.other_clusters.values()]
        self.services: list[Service] = [*others, *consumers]
        """Downstream first."""

    @property
    def need_registry(self) -> bool:
        """Whether a schema registry is used, so that readiness should tell of it."""
        by_schema = self._formats & {"avro", "jsonschema", "protobuf"}
        return bool(by_schema) or "schema_registry" in self.config.model_fields_set

    def _reactive_consumers(self) -> list[Service]:
        services: list[Service] = []
        for name, reactive in self.config.reactive_consumers.items():
            services += self._reactive_consumer(f"reactive {name}", reactive)
        return services

    def _reactive_consumer(self, name: str, reactive: ReactiveConsumerConfig) -> list[Service]:
        self._formats |= {reactive.key_format, reactive.value_format}
        keys, values = self.codecs.for_reading(reactive.key_format), self.codecs.for_reading(reactive.value_format)
        stored = Stored(keys, reactive.key_format, values, reactive.value_format)
        backend = reactive.backend
        tls = [BackendTlsFiles(f"{name} backend.tls", backend.tls, self.clock)] if backend.secure else []
        context = tls[0].context if tls else None
        destination = HttpDestination(f"{name} backend", backend, reactive.retry, stored, self.clock, context)
        letters = self._letters(reactive.dead_letter, reactive.topics)
        fits = self._fits(reactive)
        kept = KeptOffsets(destination.client, backend.offsets_path).ask if backend.offsets_path else None
        policy = ReadPolicy(reactive.auto_offset_reset, reactive.on_gap, fits is not None, reactive.consumer, kept)
        for warning in reactive.warnings(self.config.kafka.properties):
            log.warning("%s: %s", name, warning)
        if reactive.retry.tiers:
            path = retry_path.RetryPath(self, name, reactive, destination, letters)
            pump = self._pump(name, reactive.group, path.destination, path.writer, reactive)
            *retries, again = self._retries(f"{name} retries", path, reactive, pump)
            retries.append(self._held(again, destination, backend))
        else:
            retries, pump = [], self._pump(name, reactive.group, destination, letters, reactive)
        self.letter_consumers[name.removeprefix("reactive ")] = LetterConsumer(
            reactive, destination, letters, pump.witness, epoch_of=pump.epoch_of, slots=SharedSlots(pump.breaker.limit)
        )
        consumer = self._consumer(name, pump, self.config.kafka, reactive.topics, policy, reactive.flow)
        watch = Subscription(f"{name} topics", consumer, self.admin, self.clock, topics=reactive.topics, fits=fits)
        held = self._held(consumer, destination, backend)
        pumps = [pump, *(service for service in retries if isinstance(service, Pump))]
        called = name.removeprefix("reactive ")
        for delivers in pumps:
            self.metrics.watch_deliveries("reactive", called, delivers.numbers)
        self.steered.append(
            Steered(called, "reactive", pumps, reactive, reactive.topics, destination.client.place, self.admin, fits)
        )
        self.targets["consumer", name.removeprefix("reactive ")] = Target(
            reactive.topics,
            fits,
            letters,
            destination,
            reactive,
            reactive.flow,
            pump,
            self.config.kafka,
            self.admin,
            _KEPT_ELSEWHERE if kept else "",
        )
        return [*tls, destination, *retries, pump, held, watch]

    def _fits(self, reactive: ReactiveConsumerConfig) -> Callable[[str], bool] | None:
        return self.internal.fits_of(reactive)

    def _retries(
        self, name: str, path: retry_path.RetryPath, reactive: ReactiveConsumerConfig, beside: Pump
    ) -> list[Service]:
        if self.config.kafka.create_topics:
            self.wanted_topics.update(dict.fromkeys(path.topics, path.source))
            self.fits.update(dict.fromkeys(path.topics, reactive.topics))
        pump = path.pump(beside)
        policy = ReadPolicy("earliest", reactive.on_gap, member=reactive.consumer)
        consumer = self._consumer(name, pump, self.config.kafka, path.topics, policy, reactive.flow)
        followed = [path.followed] if path.followed else []
        return [*followed, *path.stale_entries(beside), pump, consumer]

    def _held(self, consumer: Service, destination: HttpDestination, backend: BackendConfig) -> Service:
        return AfterHealth(consumer, destination.client, backend.health, self.clock) if backend.health else consumer

    def _functions(self) -> list[Service]:
        services: list[Service] = []
        for spec in self.functions:
            for trigger in spec.triggers:
                services += self._function(spec, trigger)
        return services

    def _function(self, spec: FunctionSpec, trigger: KafkaTrigger) -> list[Service]:
        if self.internal.kind_of(trigger.output_topic):
            raise FunctionInvalid(f"{spec.name}.{trigger.name}: outputTopic {trigger.output_topic} {_INTERNAL}")
        self._formats |= {trigger.key_format, trigger.value_format}
        workers = FunctionService(spec, trigger, self.clock)
        destination = FunctionDestination(
            workers.serve,
            trigger,
            self.clock,
            produce=noted_produce(self.audit, self.inner_producer.produce, "STREAMING_PRODUCER"),
            schema_of=self._schema_of,
            partitions_of=self.topics.partitions_of,
            name=workers.name,
        )
        if trigger.output_topic and self.config.kafka.create_topics:
            self.wanted_topics[trigger.output_topic] = trigger.topics[0]
        delivery = DeliveryConfig(
            batch=_FUNCTION_BATCH,
            retry=trigger.retry,
            max_in_flight=_FUNCTION_IN_FLIGHT,
            ordering=trigger.ordering,
        )
        letters = self._letters(trigger.dead_letter, trigger.topics)
        pump = self._pump(workers.name, trigger.group, destination, letters, delivery)
        pump.on_drained = workers.call_drain_callbacks
        pump.witness = witness_of(self.audit, "STREAMING_CONSUMER", trigger.group)
        kafka, admin = self.config.kafka, self.admin
        if trigger.brokers:
            kafka = kafka.model_copy(update={"bootstrap_servers": ",".join(trigger.brokers)})
            reachability = Reachability(kafka, self.clock, f"kafka {kafka.bootstrap_servers}")
            admin = self.other_clusters.setdefault(kafka.bootstrap_servers, Admin(kafka, reachability))
        policy = ReadPolicy(trigger.auto_offset_reset, member=trigger.member)
        consumer = self._consumer(workers.name, pump, kafka, trigger.topics, policy, admin=admin)
        watch = Subscription(f"{workers.name} topics", consumer, admin, self.clock, topics=trigger.topics, fits=None)
        called = f"{spec.name}.{trigger.name}"
        self.metrics.watch_deliveries("function", called, pump.numbers)
        self.steered.append(Steered(called, "function", [pump], delivery, trigger.topics, spec.handler, admin))
        target = Target(trigger.topics, None, letters, destination, delivery, _FUNCTION_FLOW, pump, kafka, admin)
        self.targets["function", f"{spec.name}.{trigger.name}"] = target
        self.targets.setdefault(("function", spec.name), target)
        return [workers, pump, consumer, watch]

    def _pipeline(self, spec: PipelineSpec) -> Service:
        for topic in (flow.sink.topic for flow in spec.flows.values()):
            if self.internal.kind_of(topic):
                raise PipelineInvalid(f"pipeline {spec.name}: sink.topic {topic} {_INTERNAL}")
        folder = self.config.state_dir / "pipelines"
        run = PipelineRun(spec, self.config.kafka, folder, self.clock, self.admin)
        for flow, group in run.groups.items():
            self.groups[group] = []
            self.metrics.watch_deliveries("pipeline", f"{spec.name}.{flow}", functools.partial(run.counts, flow))
        return run

    def _letters(self, dead_letter: DeadLetterConfig, topics: Sequence[str]) -> DeadLetterTopic | None:
        if not dead_letter.enabled:
            return None
        creates = self.config.kafka.create_topics
        produce = noted_produce(self.audit, self.inner_producer.produce)
        letters = DeadLetterTopic(dead_letter.topic, produce, self.admin.ensure_topic_like if creates else None)
        if creates:
            self.wanted_topics.update({letters.topic_for(topic): topic for topic in topics})
        return letters

    def _pump(
        self,
        name: str,
        group: str,
        destination: Destination,
        letters: DeadLetterWriter | None,
        delivery: DeliveryConfig,
    ) -> Pump:
        pump = Pump(f"{name} delivery", group, destination, letters, delivery=delivery, clock=self.clock)
        pump.witness = witness_of(self.audit, "REACTIVE_CONSUMER", group)
        return pump

    def _consumer(
        self,
        name: str,
        pump: Pump,
        kafka: KafkaConfig,
        topics: Sequence[str],
        policy: ReadPolicy,
        flow: FlowControl = _FUNCTION_FLOW,
        admin: Admin | None = None,
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
        consumer.reachability = (admin or self.admin).reachability
        pump.source = pump.member = consumer
        self.groups.setdefault(pump.group, []).extend(topics)
        return consumer

    async def _schema_of(self, schema_id: int) -> wire.Schema:
        schema = await self.registry.by_id(schema_id)
        return wire.Schema(schema_id, schema.type, schema.text, await self.registry.texts_of(schema.references))
