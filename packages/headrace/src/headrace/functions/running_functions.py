"""Makes the functions of a configuration: their workers, and what serves each kind of trigger."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.config.consumers import BatchConfig, DeliveryConfig, FlowControl, condition_of
from headrace.consumers.consumer_set import INTERNAL, ConsumerSet
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.checked_destination import CheckedDestination, not_larger_than, younger_than
from headrace.delivery.explicit_acks import AckRules
from headrace.delivery.outcomes import Destination
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import CommitPace, PumpHooks
from headrace.errors import FunctionInvalid
from headrace.functions.destination import FunctionDestination
from headrace.functions.exactly_once import TransactionalPump
from headrace.functions.held_outputs import HeldOutputs
from headrace.functions.reload import FunctionReload
from headrace.functions.spec import FunctionSpec
from headrace.functions.triggers.http_trigger import HttpTrigger
from headrace.functions.triggers.kafka_trigger import KafkaTrigger
from headrace.functions.triggers.trigger import Trigger, TriggerParts
from headrace.functions.workers import Acknowledge, FunctionService
from headrace.kafka import Admin, GroupTransactions, InternalTopic, MissingPartitions, ReadPolicy, Subscription
from headrace.kafka.internal_topics import InternalTopics
from headrace.process_context import ProcessContext, inner_settings, transactional_id
from headrace.records import TopicPartition
from headrace.runtime import Service

_BATCH = BatchConfig(max_records=2000, max_bytes=1_048_576)
"""The largest delivery to a function; a slow handler gets fewer records. For a batch handler it is one batch."""
_IN_FLIGHT = 1000
_COMMITS = CommitPace(1.0)
"""As often as in Nuclio."""
_FLOW = FlowControl(max_records=60_000)
"""With a backlog in eight partitions, each has a full frame and more: with fewer records frames had 1,200."""
_RETRY_TOPICS_OF_ANOTHER_CLUSTER = (
    "retry.topics are on the cluster of headrace.yaml, but this trigger has another cluster or login: remove them, or "
    "raise retry.max_delay_seconds"
)
_IN_TRANSACTIONS = (
    "its outputs and its group's offsets are committed together (delivery: exactly_once), and a replay commits none"
)


class RunningFunctions:
    """The functions of a configuration and their services."""

    def __init__(
        self,
        context: ProcessContext,
        consumers: ConsumerSet,
        specs: Sequence[tuple[Path, FunctionSpec]],
        internal: InternalTopics,
    ) -> None:
        """Make functions of the configuration, each of its file; nothing is started or contacted.

        Raises:
            FunctionInvalid: A function file is not usable.
        """
        self._context = context
        self._config = context.config
        self._consumers = consumers
        self._internal = internal
        self.listening: list[tuple[FunctionService, HttpTrigger, FunctionDestination]] = []
        """Functions that answer requests, with their triggers."""
        self.reloads: dict[str, FunctionReload] = {}
        """The service that replaces the workers of each function."""
        self.services: list[Service] = []
        """Downstream first."""
        for file, spec in specs:
            self.services += self._function(spec, file)

    def _function(self, spec: FunctionSpec, file: Path) -> list[Service]:
        made: list[Service] = []
        acknowledgers: dict[str, Acknowledge] = {}
        deliver_again: dict[str, Callable[[TopicPartition], None]] = {}
        clock = self._context.clock
        pools = [FunctionService(spec, triggers, clock, acknowledgers, deliver_again) for triggers in spec.worker_pools]
        for workers in pools:
            made.append(workers)
            for trigger in workers.triggers:
                made += trigger.serve(self._serving(workers, acknowledgers, deliver_again))
        self.reloads[spec.name] = FunctionReload(file, self._config, pools, self._context.clock)
        return [*made, self.reloads[spec.name]]

    def _serving(
        self,
        workers: FunctionService,
        acknowledgers: dict[str, Acknowledge],
        deliver_again: dict[str, Callable[[TopicPartition], None]],
    ) -> TriggerParts[Service]:
        """Return what a trigger of these workers is served by."""
        spec = workers.spec

        def consume(trigger: KafkaTrigger) -> Sequence[Service]:
            make = functools.partial(self._acknowledged_trigger, spec, trigger, workers, acknowledgers, deliver_again)
            return self._consumers.restarted("function", f"{spec.name}.{trigger.name}", make)

        def listen(trigger: HttpTrigger) -> None:
            self.listening.append((workers, trigger, self._destination(trigger, workers)))

        return TriggerParts(consume, listen, functools.partial(self._destination, workers=workers))

    def _acknowledged_trigger(
        self,
        spec: FunctionSpec,
        trigger: KafkaTrigger,
        workers: FunctionService,
        acknowledgers: dict[str, Acknowledge],
        deliver_again: dict[str, Callable[[TopicPartition], None]],
    ) -> list[Service]:
        """Make a trigger whose pump gets its explicit acknowledgements."""
        services = self._trigger(spec, trigger, workers)
        if trigger.explicit_ack_mode != "disable":
            pump = self._consumers.consumers[-1].pump
            up_to = trigger.allocation != "key"  # else it would complete records of other workers
            acknowledgers.update(dict.fromkeys(trigger.topics, functools.partial(pump.acknowledge, up_to=up_to)))
            deliver_again.update(dict.fromkeys(trigger.topics, pump.seeks.deliver_again))
        return services

    def _trigger(self, spec: FunctionSpec, trigger: KafkaTrigger, workers: FunctionService) -> list[Service]:
        config = self._config
        kafka, topics, group = trigger.kafka, trigger.topics, trigger.group
        name = f"{spec.name}.{trigger.name}"
        label = f"function {name}"
        if self._internal.kind_of(trigger.output_topic):
            raise FunctionInvalid(f"{name}: outputTopic {trigger.output_topic} {INTERNAL}")
        self._consumers.formats |= {trigger.key_format, trigger.value_format}
        compressed = config.producer.client_properties["compression.type"] != "none"
        held = HeldOutputs(compressed=compressed) if trigger.delivery == "exactly_once" else None
        destination, hooks = self._workers_of(trigger, workers, held)
        like = {topic: topic if config.kafka.is_at(kafka.brokers) else "" for topic in topics}
        if trigger.output_topic and config.kafka.create_topics:
            self._consumers.created_topics[trigger.output_topic] = InternalTopic(trigger.output_topic, like[topics[0]])
        whole = {"max_records": trigger.batch.batch_size, "linger_seconds": trigger.batch.timeout}
        batch = _BATCH.model_copy(update=whole if trigger.batch.mode == "enable" else {})
        delivery = DeliveryConfig(batch=batch, retry=trigger.retry, max_in_flight=_IN_FLIGHT, ordering=trigger.ordering)
        dead_letters = self._consumers.dead_letters(trigger.dead_letters, like, held.produce if held else None)
        if held:
            held.dead_letters = dead_letters
        admin = self._consumers.topics_of(kafka.cluster(config.kafka), name).admin
        if trigger.retry.topics and (kafka.security or not all(like.values())):
            raise FunctionInvalid(f"{name}: {_RETRY_TOPICS_OF_ANOTHER_CLUSTER}")
        policy = ReadPolicy(kafka.auto_offset_reset, member=kafka.member, drain_seconds=kafka.max_wait_handler)
        policy = policy._replace(transactional=held is not None)
        make, transactions = self._exactly_once(name, group, held) if held else (Pump, [])
        pump, retry_pump, retries = self._consumers.pumps(
            label, group, topics, delivery, destination, dead_letters, hooks, policy=policy, make=make
        )
        policy = policy._replace(max_processing_seconds=kafka.max_processing_time)
        running = RunningConsumer(
            name=name,
            kind="function",
            function=spec.name,
            delivery=delivery,
            topics=topics,
            partitions=kafka.partitions,
            destination=destination,
            destination_name=spec.handler,
            dead_letter=trigger.dead_letters,
            dead_letters=dead_letters,
            pump=pump,
            retry_pump=retry_pump,
            flow=_FLOW,
            admin=admin,
            no_replay=_IN_TRANSACTIONS if held else "",
        )
        self._consumers.add(running)
        return [*transactions, *retries, pump, *self._source(trigger, label, pump, policy, admin)]

    def _source(self, trigger: KafkaTrigger, label: str, pump: Pump, policy: ReadPolicy, admin: Admin) -> list[Service]:
        """Make the consumer of a trigger, and what watches its topics."""
        clock, topics = self._context.clock, trigger.topics
        own = [TopicPartition(topic, number) for topic in topics for number in trigger.kafka.partitions]
        consumer = self._consumers.consumer(label, pump, [] if own else topics, policy, flow=_FLOW, admin=admin)
        watch = Subscription(f"{label} topics", consumer, admin, clock, topics=topics, fits=None)
        if not own:
            return [consumer, watch]
        consumer.assign(own)
        return [consumer, watch, MissingPartitions(f"{label} partitions", admin, clock, own)]

    def _exactly_once(self, name: str, group: str, held: HeldOutputs) -> tuple[Callable[..., Pump], list[Service]]:
        """Return a maker of pumps that commit outputs and offsets together, and the transactional producer."""
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
            topics = self._consumers.topics_of(
                trigger.kafka.cluster(self._config.kafka), f"{workers.spec.name}.{trigger.name}"
            )
        return FunctionDestination(
            workers,
            trigger,
            context.clock,
            produce=context.audited_produce("STREAMING_PRODUCER", in_order=True),
            registry=context.registry,
            topics=topics,
            kind_of=self._internal.kind_of,
            held=held,
        )

    def _workers_of(
        self, trigger: KafkaTrigger, workers: FunctionService, held: HeldOutputs | None
    ) -> tuple[Destination, PumpHooks]:
        """Make the destination of a trigger, and the hooks of its pump."""
        context, kafka = self._context, trigger.kafka
        function = self._destination(trigger, workers, held)
        hooks = PumpHooks(
            on_completed=context.on_completed("STREAMING_CONSUMER", trigger.group),
            partitions=function,
            most_records=None if trigger.batch.mode == "enable" else lambda: function.frame_records,
            commits=_COMMITS,
            acks=AckRules(
                trigger.kafka.ack_window_size,
                trigger.explicit_ack_wait if trigger.explicit_ack_mode != "disable" else 0.0,
            ),
        )
        checks = [condition_of(kafka.where)] if kafka.where else []
        checks += [not_larger_than(kafka.fetch_max)] if kafka.fetch_max else []
        checks += [younger_than(kafka.max_age, context.clock)] if kafka.max_age else []
        return CheckedDestination(function, checks) if checks else function, hooks
