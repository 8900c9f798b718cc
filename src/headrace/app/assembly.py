"""Makes the consumers of a configuration: reactive consumers, functions and pipelines, with the services they need."""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.app.context import ProcessContext, inner_settings, transactional_id
from headrace.app.retry_path import RetryPath
from headrace.config.backend import BackendConfig
from headrace.config.consumers import BatchConfig, DeadLetterConfig, DeliveryConfig, FlowControl, ReactiveConsumerConfig
from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import warnings_of
from headrace.config.model import HeadraceConfig
from headrace.control.health.lag import GroupTopics
from headrace.control.running_consumer import RunningConsumer
from headrace.delivery.dead_letter import DeadLetterTopic
from headrace.delivery.explicit_acks import AckRules
from headrace.delivery.outcomes import Destination
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import PumpHooks
from headrace.errors import ConfigError, FunctionInvalid, PipelineInvalid
from headrace.functions.destination import FunctionDestination, RecordSizeLimit
from headrace.functions.exactly_once import TransactionalPump
from headrace.functions.held_outputs import HeldOutputs
from headrace.functions.load import load_function
from headrace.functions.reload import FunctionReload
from headrace.functions.spec import FunctionSpec, triggers_of
from headrace.functions.triggers.http import HttpTrigger
from headrace.functions.triggers.kafka import KafkaTrigger
from headrace.functions.triggers.trigger import Trigger
from headrace.functions.workers import Acknowledge, FunctionService
from headrace.kafka import Admin, Consumer, GroupTransactions, InternalTopic, Reachability, ReadPolicy, Subscription
from headrace.kafka.internal_topics import InternalTopics
from headrace.kafka.topic_directory import TopicDirectory
from headrace.pipelines.driver_process import check_heaps
from headrace.pipelines.load import load_pipelines
from headrace.pipelines.runs import PipelineRun
from headrace.pipelines.sinks import KafkaSink
from headrace.pipelines.spec import PipelineSpec
from headrace.records import TopicPartition
from headrace.runtime import RestartedServices, Service
from headrace.runtime.tls import ClientTlsFiles
from headrace.sidecar.reactive.client import get_offset
from headrace.sidecar.reactive.healthy_start import StartWhenHealthy
from headrace.sidecar.reactive.http_destination import HttpDestination
from headrace.sidecar.reactive.payload_decoder import PayloadDecoder

log = logging.getLogger(__name__)

_FUNCTION_BATCH = BatchConfig(max_records=2000, max_bytes=1_048_576)
"""A delivery to a function at most; fewer records if its handler is slow. To a batch handler it is one batch."""
_FUNCTION_IN_FLIGHT = 1000
_FUNCTION_FLOW = FlowControl()
_INTERNAL = "is an internal topic (dead letters, audit, control ...) that only Headrace writes: name a topic of yours"
_RETRY_TOPICS_OF_ANOTHER_CLUSTER = (
    "retry.topics are topics of the cluster of headrace.yaml, and this trigger reads another one or its own login: "
    "remove them, or raise retry.max_delay_seconds"
)
_IN_TRANSACTIONS = (
    "its outputs and its group's offsets are committed together (delivery: exactly_once), and a replay commits none"
)
_PUSH_OF_OTHER_CLUSTER = "sink.backend needs the brokers and the login of headrace.yaml: remove kafka, or backend"
_OFFSETS_IN_BACKEND = "its backend keeps the group's offsets (backend.offsets_path), and a replay would move them"


class Assembly:
    """The consumers of a configuration and their services."""

    def __init__(
        self,
        context: ProcessContext,
        config: HeadraceConfig,
        internal: InternalTopics | None = None,
        *,
        owner: str = "",
        may_read: Callable[[str], bool] | None = None,
        restarts: bool = True,
    ) -> None:
        """Make every consumer; nothing is started or contacted.

        `owner` is empty for those of the file. Without `may_read`, patterns match every topic that is not internal.
        Without `restarts`, who starts the services also starts them again.

        Raises:
            ConfigError: A client property is not allowed, or two consumers have the same name.
            FunctionInvalid: A function file is not usable.
            PipelineInvalid: A pipeline file is not usable.
        """
        self._context, self._config, self._owner, self._may_read = context, config, owner, may_read
        self._restarts = restarts
        self.functions = [load_function(file, config) for file in config.functions]
        self.internal = internal or InternalTopics(config, triggers_of(self.functions))
        self.consumers: list[RunningConsumer] = []
        self.other_groups: dict[str, GroupTopics] = {}
        """Groups of pipelines, and of functions that other processes run."""
        self.created_topics: dict[str, InternalTopic] = {}
        """Topics to create, by name."""
        self.formats: set[str] = set()
        """Formats of keys and values."""
        self._other_clusters: list[TopicDirectory] = []
        """Of functions and pipelines with brokers or a login of their own."""
        self.on_made: Callable[[RunningConsumer], None] = lambda consumer: None
        """Called with a consumer that was made again."""
        made: list[Service] = []
        for name, reactive in config.reactive_consumers.items():
            made += self._restarted("reactive", name, functools.partial(self._reactive_consumer, name, reactive))
        self.listening: list[tuple[FunctionService, HttpTrigger, FunctionDestination]] = []
        """Functions that answer requests, and by which trigger."""
        self.reloads: dict[str, FunctionReload] = {}
        """What replaces the workers of each function."""
        for file, spec in zip(config.functions, self.functions, strict=True):
            made += self._function(spec, file)
        self.known_functions = [*self.functions, *map(self._watched_function, config.watched_functions)]
        """Those that this process runs or watches."""
        made += itertools.chain(*map(self._pipeline, check_heaps(load_pipelines(config.pipelines))))
        others = (service for topics in self._other_clusters for service in (topics.admin.reachability, topics))
        self.services: list[Service] = [*others, *made]
        """Downstream first."""

    def _restarted(self, kind: str, name: str, make: Callable[[], Sequence[Service]]) -> Sequence[Service]:
        """Make the services of a consumer, and make them again when one of them has died; nothing else stops then."""
        if not self._restarts:
            return make()

        def again() -> Sequence[Service]:
            self.consumers = [consumer for consumer in self.consumers if consumer.name != name]
            self._context.metrics.forget_deliveries(kind, name)
            services = make()
            self.on_made(next(consumer for consumer in self.consumers if consumer.name == name))
            return services

        return [RestartedServices(f"{kind} {name}", make(), again, self._context.clock, self._config.drain_seconds)]

    # Reactive consumers ----------------------------------------------------------------------------------------------

    def _reactive_consumer(self, name: str, reactive: ReactiveConsumerConfig) -> list[Service]:
        context, label, backend = self._context, f"reactive {name}", reactive.backend
        self.formats |= {reactive.key_format, reactive.value_format}
        for warning in reactive.warnings(self._config.kafka.properties):
            log.warning("%s: %s", label, warning)
        tls, destination = self._backend(label, reactive)
        dead_letters = self._dead_letters(reactive.dead_letter, {topic: topic for topic in reactive.topics})
        matches = self._matches(reactive)
        offsets_of = (
            functools.partial(get_offset, destination.client, backend.offsets_path) if backend.offsets_path else None
        )
        hooks = PumpHooks(on_completed=context.on_completed("REACTIVE_CONSUMER", reactive.group))
        pump, retry_pump, retries = self._pumps(
            label,
            reactive.group,
            reactive.topics,
            reactive,
            destination,
            dead_letters,
            hooks,
            policy=ReadPolicy(on_gap=reactive.on_gap, member=reactive.consumer),
            flow=reactive.flow,
            when=lambda consumer: self._when_healthy(consumer, destination, backend),
        )
        policy = ReadPolicy(
            reactive.auto_offset_reset, reactive.on_gap, matches is not None, reactive.consumer, offsets_of
        )
        consumer = self._consumer(label, pump, reactive.topics, policy, flow=reactive.flow, admin=context.admin)
        watch = Subscription(
            f"{label} topics", consumer, context.admin, context.clock, topics=reactive.topics, fits=matches
        )
        running = RunningConsumer(
            name=name,
            kind="reactive",
            delivery=reactive,
            topics=reactive.topics,
            matches=matches,
            destination=destination,
            destination_name=destination.client.url,
            dead_letter=reactive.dead_letter,
            dead_letters=dead_letters,
            pump=pump,
            retry_pump=retry_pump,
            flow=reactive.flow,
            admin=context.admin,
            no_replay=_OFFSETS_IN_BACKEND if offsets_of else "",
            owner=self._owner,
        )
        self._add(running)
        return [*tls, destination, *retries, pump, self._when_healthy(consumer, destination, backend), watch]

    def _backend(self, label: str, reactive: ReactiveConsumerConfig) -> tuple[list[ClientTlsFiles], HttpDestination]:
        backend, codecs, clock = reactive.backend, self._context.codecs, self._context.clock
        keys, values = codecs.for_reading(reactive.key_format), codecs.for_reading(reactive.value_format)
        payloads = PayloadDecoder(keys, reactive.key_format, values, reactive.value_format)
        tls = [ClientTlsFiles(f"{label} backend.tls", backend.tls, clock)] if backend.secure else []
        tls_context = tls[0].context if tls else None
        return tls, HttpDestination(
            f"{label} backend", backend, reactive.retry, payloads, clock, tls_context, reactive.max_response_bytes
        )

    def _when_healthy(self, consumer: Service, destination: HttpDestination, backend: BackendConfig) -> Service:
        if backend.health is None:
            return consumer
        return StartWhenHealthy(consumer, destination.client, backend.health, self._context.clock)

    def _matches(self, reactive: ReactiveConsumerConfig) -> Callable[[str], bool] | None:
        matches, may_read = self.internal.fits_of(reactive), self._may_read
        if matches is None or may_read is None:
            return matches
        return lambda topic: matches(topic) and may_read(topic)

    # Functions -------------------------------------------------------------------------------------------------------

    def _function(self, spec: FunctionSpec, file: Path) -> list[Service]:
        made: list[Service] = []
        acknowledgers: dict[str, Acknowledge] = {}
        deliver_again: dict[str, Callable[[TopicPartition], None]] = {}
        clock = self._context.clock
        pools = [FunctionService(spec, triggers, clock, acknowledgers, deliver_again) for triggers in spec.worker_pools]
        for workers in pools:
            made.append(workers)
            for trigger in workers.triggers:
                if isinstance(trigger, KafkaTrigger):
                    make = functools.partial(
                        self._acknowledged_trigger, spec, trigger, workers, acknowledgers, deliver_again
                    )
                    made += self._restarted("function", f"{spec.name}.{trigger.name}", make)
                elif isinstance(trigger, HttpTrigger):
                    self.listening.append((workers, trigger, self._destination(trigger, workers)))
        self.reloads[spec.name] = FunctionReload(file, self._config, pools, self._context.clock)
        return [*made, self.reloads[spec.name]]

    def _watched_function(self, file: Path) -> FunctionSpec:
        spec = load_function(file, self._config)
        for trigger in spec.kafka_triggers:
            admin = self._topics_of(trigger.kafka.cluster(self._config.kafka), trigger.group).admin
            self.other_groups[trigger.group] = GroupTopics(admin, trigger.topics)
        return spec

    def _acknowledged_trigger(
        self,
        spec: FunctionSpec,
        trigger: KafkaTrigger,
        workers: FunctionService,
        acknowledgers: dict[str, Acknowledge],
        deliver_again: dict[str, Callable[[TopicPartition], None]],
    ) -> list[Service]:
        """Make a trigger, and take its explicit acknowledgements to its pump."""
        services = self._trigger(spec, trigger, workers)
        if trigger.explicit_ack_mode != "disable":
            pump, up_to = self.consumers[-1].pump, trigger.explicit_ack_ends == "upTo"
            acknowledgers.update(dict.fromkeys(trigger.topics, functools.partial(pump.acknowledge, up_to=up_to)))
            deliver_again.update(dict.fromkeys(trigger.topics, pump.seeks.deliver_again))
        return services

    def _trigger(self, spec: FunctionSpec, trigger: KafkaTrigger, workers: FunctionService) -> list[Service]:
        context, config, kafka, topics = self._context, self._config, trigger.kafka, trigger.topics
        name, group = f"{spec.name}.{trigger.name}", trigger.group
        label = f"function {name}"
        if self.internal.kind_of(trigger.output_topic):
            raise FunctionInvalid(f"{name}: outputTopic {trigger.output_topic} {_INTERNAL}")
        self.formats |= {trigger.key_format, trigger.value_format}
        compressed = config.producer.client_properties["compression.type"] != "none"
        held = HeldOutputs(compressed=compressed) if trigger.delivery == "exactly_once" else None
        destination, hooks = self._workers_of(trigger, workers, held)
        like = {topic: topic if config.kafka.is_at(kafka.brokers) else "" for topic in topics}
        if trigger.output_topic and config.kafka.create_topics:
            self.created_topics[trigger.output_topic] = InternalTopic(trigger.output_topic, like[topics[0]])
        whole = {"max_records": trigger.batch.batch_size, "linger_seconds": trigger.batch.timeout}
        batch = _FUNCTION_BATCH.model_copy(update=whole if trigger.batch.mode == "enable" else {})
        delivery = DeliveryConfig(
            batch=batch, retry=trigger.retry, max_in_flight=_FUNCTION_IN_FLIGHT, ordering=trigger.ordering
        )
        dead_letters = self._dead_letters(trigger.dead_letters, like, held)
        admin = self._topics_of(kafka.cluster(config.kafka), name).admin
        if trigger.retry.topics and (kafka.security or not all(like.values())):
            raise FunctionInvalid(f"{name}: {_RETRY_TOPICS_OF_ANOTHER_CLUSTER}")
        policy = ReadPolicy(kafka.auto_offset_reset, member=kafka.member, drain_seconds=kafka.max_wait_handler)
        policy = policy._replace(transactional=held is not None)
        make, transactions = self._exactly_once(name, group, held) if held else (Pump, [])
        pump, retry_pump, retries = self._pumps(
            label, group, topics, delivery, destination, dead_letters, hooks, policy=policy, make=make
        )
        policy = policy._replace(max_processing_seconds=kafka.max_processing_time)
        consumer = self._consumer(label, pump, topics, policy, flow=_FUNCTION_FLOW, admin=admin)
        watch = Subscription(f"{label} topics", consumer, admin, context.clock, topics=topics, fits=None)
        running = RunningConsumer(
            name=name,
            kind="function",
            function=spec.name,
            delivery=delivery,
            topics=topics,
            destination=destination,
            destination_name=spec.handler,
            dead_letter=trigger.dead_letters,
            dead_letters=dead_letters,
            pump=pump,
            retry_pump=retry_pump,
            flow=_FUNCTION_FLOW,
            admin=admin,
            no_replay=_IN_TRANSACTIONS if held else "",
        )
        self._add(running)
        return [*transactions, *retries, pump, consumer, watch]

    def _exactly_once(self, name: str, group: str, held: HeldOutputs) -> tuple[Callable[..., Pump], list[Service]]:
        """Return what makes a pump that commits outputs and offsets together, and its producer."""
        audit, settings = self._context.audit, inner_settings(self._config)
        producer_id = f"{transactional_id(self._config)}-{group}-{name}"
        transactions = GroupTransactions(self._context.admin, settings, producer_id, f"function {name}")
        on_written = functools.partial(audit.produced, audit_type="STREAMING_PRODUCER") if audit else None
        make = functools.partial(TransactionalPump, held=held, transactions=transactions, on_written=on_written)
        return make, [transactions]

    def _destination(
        self, trigger: Trigger, workers: FunctionService, held: HeldOutputs | None = None
    ) -> FunctionDestination:
        context, topics = self._context, self._context.topics
        if isinstance(trigger, KafkaTrigger):
            topics = self._topics_of(trigger.kafka.cluster(self._config.kafka), f"{workers.spec.name}.{trigger.name}")
        return FunctionDestination(
            workers,
            trigger,
            context.clock,
            produce=context.audited_produce("STREAMING_PRODUCER", in_order=True),
            registry=context.registry,
            topics=topics,
            kind_of=self.internal.kind_of,
            held=held,
        )

    def _workers_of(
        self, trigger: KafkaTrigger, workers: FunctionService, held: HeldOutputs | None
    ) -> tuple[Destination, PumpHooks]:
        """Make the destination of a trigger, and what its pump calls."""
        context, limit = self._context, trigger.kafka.fetch_max
        function = self._destination(trigger, workers, held)
        hooks = PumpHooks(
            on_completed=context.on_completed("STREAMING_CONSUMER", trigger.group),
            partitions=function,
            most_records=None if trigger.batch.mode == "enable" else lambda: function.frame_records,
            commit_seconds=trigger.kafka.commit_interval,
            acks=AckRules(
                trigger.kafka.ack_window_size,
                trigger.explicit_ack_wait if trigger.explicit_ack_mode != "disable" else 0.0,
            ),
        )
        return RecordSizeLimit(function, limit) if limit else function, hooks

    def _topics_of(self, kafka: KafkaConfig, trigger: str) -> TopicDirectory:
        """Return the topics of a cluster with a login: one directory for all triggers with the same of both."""
        if kafka is self._config.kafka:
            return self._context.topics
        for known in self._other_clusters:
            # The fields and files are compared, and not the models, which also hold what their clients use now.
            other = known.admin.config
            if other.security.files == kafka.security.files and other.model_dump() == kafka.model_dump():
                return known
        servers = [each.admin.servers for each in (self._context.topics, *self._other_clusters)]
        name = f"kafka {kafka.bootstrap_servers}"
        name += f" as {trigger}" if kafka.bootstrap_servers in servers else ""
        admin = Admin(kafka, Reachability(kafka, self._context.clock, name))
        self._other_clusters.append(TopicDirectory(admin, self._context.clock, f"topics of {name}"))
        return self._other_clusters[-1]

    @property
    def pipelines(self) -> dict[str, PipelineRun]:
        """The runs of pipelines by name."""
        return {run.report().name: run for run in self.services if isinstance(run, PipelineRun)}

    # Pipelines -------------------------------------------------------------------------------------------------------

    def _pipeline(self, spec: PipelineSpec) -> list[Service]:
        for topic in (topic for flow in spec.flows.values() for topic in flow.sink.topics):
            if self.internal.kind_of(topic):
                raise PipelineInvalid(f"pipeline {spec.name}: sink.topic {topic} {_INTERNAL}")
        context, config = self._context, self._config
        for warning in warnings_of(spec.kafka.security) if spec.kafka.security else ():
            log.warning("pipeline %s: %s", spec.name, warning)
        admin = self._topics_of(spec.cluster(config.kafka), f"pipeline {spec.name}").admin
        folder, registry = config.state_dir / "pipelines", config.schema_registry
        run = PipelineRun(spec, admin.config, folder, context.clock, admin, registry)
        for flow, group in run.groups.items():
            self.other_groups[group] = GroupTopics(admin, [])
            counts = functools.partial(run.counts, flow)
            context.metrics.watch_deliveries("pipeline", f"{spec.name}.{flow}", counts)
        pushing: list[Service] = []
        for name, flow_spec in spec.flows.items():
            sink = flow_spec.sink
            if isinstance(sink, KafkaSink) and (reactive := sink.consumer(f"{spec.group(name)}.push")):
                if admin is not context.admin:
                    raise PipelineInvalid(f"pipeline {spec.name}, flow {name}: {_PUSH_OF_OTHER_CLUSTER}")
                push = f"{spec.name}.{name}"
                make = functools.partial(self._reactive_consumer, push, reactive)
                pushing += self._restarted("reactive", push, make)
        return [*pushing, run]

    # Both kinds of consumers -----------------------------------------------------------------------------------------

    def _add(self, consumer: RunningConsumer) -> None:
        if other := next((each for each in self.consumers if each.name == consumer.name), None):
            kinds = {"reactive": "a reactive consumer", "function": "a trigger of a function"}
            raise ConfigError(
                f"{consumer.name} names {kinds[other.kind]} and {kinds[consumer.kind]}, and commands go by that name: "
                "rename one of them"
            )
        self.consumers.append(consumer)
        for pump in consumer.pumps:
            self._context.metrics.watch_deliveries(consumer.kind, consumer.name, pump.numbers)

    def _dead_letters(
        self, dead_letter: DeadLetterConfig, like: Mapping[str, str], held: HeldOutputs | None = None
    ) -> DeadLetterTopic | None:
        """Make what writes dead letters of topics, in topics like others; like an empty name is like no other."""
        if not dead_letter.enabled:
            return None
        creates, context = self._config.kafka.create_topics, self._context
        ensure = context.admin.ensure_topic_like if creates and all(like.values()) else None
        dead_letters = DeadLetterTopic(dead_letter.topic, held.produce if held else context.audited_produce(), ensure)
        if held:
            held.dead_letters = dead_letters
        if creates:
            created = [InternalTopic(dead_letters.topic_for(topic), other) for topic, other in like.items()]
            self.created_topics.update({topic.name: topic for topic in created})
        return dead_letters

    def _pumps(  # noqa: PLR0913 every part that the pumps connect
        self,
        label: str,
        group: str,
        topics: Sequence[str],
        delivery: DeliveryConfig,
        destination: Destination,
        dead_letters: DeadLetterTopic | None,
        hooks: PumpHooks,
        *,
        policy: ReadPolicy,
        flow: FlowControl = _FUNCTION_FLOW,
        when: Callable[[Consumer], Service] = lambda consumer: consumer,
        make: Callable[..., Pump] = Pump,
    ) -> tuple[Pump, Pump | None, list[Service]]:
        """Make the pump of a consumer.

        With retry topics also make the pump of those, and what else they need; `policy` is how they are read, and
        `when` returns the service that starts their consumer.
        """
        make = functools.partial(make, f"{label} delivery", group, delivery=delivery, clock=self._context.clock)
        if not delivery.retry.topics:
            return make(destination, dead_letters, hooks=hooks), None, []
        path = RetryPath(self._context, label, group, topics, delivery, destination, dead_letters)
        if self._config.kafka.create_topics:
            created = {name: InternalTopic(name, path.source, fits=topics) for name in path.topics}
            self.created_topics.update(created)
        pump = make(path.destination, path.writer, hooks=hooks._replace(blocked_keys=path.writer))
        retry_pump = path.pump(pump)
        early = policy._replace(reset="earliest")
        consumer = self._consumer(
            f"{label} retries", retry_pump, path.topics, early, flow=flow, admin=self._context.admin
        )
        tables = [path.blocked_keys] if path.blocked_keys else []
        return pump, retry_pump, [*tables, *path.stale_entries(pump), retry_pump, when(consumer)]

    def _consumer(
        self, label: str, pump: Pump, topics: Sequence[str], policy: ReadPolicy, *, flow: FlowControl, admin: Admin
    ) -> Consumer:
        consumer = Consumer(
            admin,
            name=f"{label} consumer",
            group=pump.group,
            topics=topics,
            listener=pump,
            flow=flow,
            clock=self._context.clock,
            policy=policy,
        )
        pump.connect(consumer, consumer)
        return consumer
