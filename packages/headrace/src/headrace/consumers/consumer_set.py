"""What reactive consumers and functions share: pumps, dead letters, topics to create, clusters, restarts."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from weakref import WeakSet

from headrace.config.consumers import DeadLetterConfig, DeliveryConfig, FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.config.membership import ConsumerConfig
from headrace.config.model import HeadraceConfig
from headrace.consumers.lag import GroupTopics
from headrace.consumers.preconditions import TopicRequirement
from headrace.consumers.retry_path import RetryPath
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.dead_letter import DeadLetterTopic
from headrace.delivery.outcomes import Destination
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import CommitPace, PumpHooks
from headrace.errors import ConfigError
from headrace.kafka import Admin, Consumer, InternalTopic, Reachability, ReadPolicy
from headrace.kafka.topic_directory import TopicDirectory
from headrace.process_context import ProcessContext
from headrace.records import Produce
from headrace.runtime import RestartedServices, Service

INTERNAL = "is an internal topic (dead letters, audit, control ...) that only Headrace writes: use another topic"
_FLOW = FlowControl()
_STATIC: Final = "group.instance.id"


class ConsumerSet:
    """Makes the parts of consumers, and keeps the consumers that are made."""

    def __init__(self, context: ProcessContext, *, first: "ConsumerSet | None" = None) -> None:
        """Prepare; `first` is the first set of the process, if this is another one."""
        self._context = context
        self._pumps: WeakSet[Pump] = first._pumps if first else WeakSet()
        self._other_clusters: list[TopicDirectory] = []
        """Topics of clusters and logins that only functions and pipelines use."""
        self.static_name = ""
        """If it is set, consumers are static members by this name and theirs, so that a restart moves no partition."""
        self.consumers: list[RunningConsumer] = []
        self.on_made: Callable[[RunningConsumer], None] = first.on_made if first else lambda consumer: None
        """Called with each consumer when it is made, and when it is made again."""
        self.created_topics: dict[str, InternalTopic] = {}
        """Topics to create, by name."""
        self.other_groups: dict[str, GroupTopics] = {}
        """Groups of pipelines."""
        self.formats: set[str] = set()
        """Formats of keys and values."""
        self.requirements: list[tuple[KafkaConfig, TopicRequirement]] = []
        """The topics that the consumers and tables need, with the cluster of each."""
        self.filters: dict[str, Callable[[Destination], Destination]] = first.filters if first else {}
        """By consumer: what precedes its destination, which then gets rows in place of records."""
        self.reload_checks: list[Callable[[HeadraceConfig], None]] = []
        """What raises ConfigError if a new configuration of reactive consumers needs a restart of the process."""

    @property
    def cluster_services(self) -> list[Service]:
        """The services of other clusters."""
        return [service for topics in self._other_clusters for service in (topics.admin.reachability, topics)]

    def restarted(self, kind: str, name: str, make: Callable[[], Sequence[Service]]) -> Sequence[Service]:
        """Make the services of a consumer. When one of them dies, only these are made again."""

        def again() -> Sequence[Service]:
            self.consumers = [consumer for consumer in self.consumers if consumer.name != name]
            self._context.metrics.forget_deliveries(kind, name)
            return make()

        drain_seconds = self._context.config.drain_seconds
        return [RestartedServices(f"{kind} {name}", make(), again, self._context.clock, drain_seconds)]

    def topics_of(self, kafka: KafkaConfig, trigger: str) -> TopicDirectory:
        """Return the topic directory of a cluster and login, which all triggers with the same two share."""
        if kafka is self._context.config.kafka:
            return self._context.topics
        for known in self._other_clusters:
            # Compares fields and files, because models also have the reloaded credentials of their clients.
            other = known.admin.config
            if other.security.files == kafka.security.files and other.model_dump() == kafka.model_dump():
                return known
        servers = [each.admin.servers for each in (self._context.topics, *self._other_clusters)]
        name = f"kafka {kafka.bootstrap_servers}"
        name += f" as {trigger}" if kafka.bootstrap_servers in servers else ""
        admin = Admin(kafka, Reachability(kafka, self._context.clock, name))
        self._other_clusters.append(TopicDirectory(admin, self._context.clock, f"topics of {name}"))
        return self._other_clusters[-1]

    def add(self, consumer: RunningConsumer) -> None:
        """Add a consumer that was made, and show its counts in the metrics.

        Raises:
            ConfigError: Another consumer has its name.
        """
        other = next((each for each in self.consumers if each.name == consumer.name), None)
        if other:
            kinds = {"reactive": "a reactive consumer", "function": "a trigger of a function"}
            raise ConfigError(
                f"{consumer.name} names {kinds[other.kind]} and {kinds[consumer.kind]}, so commands could not tell "
                "them apart: rename one"
            )
        self.consumers.append(consumer)
        for pump in consumer.pumps:
            self._pumps.add(pump)
            self._context.metrics.watch_deliveries(consumer.kind, consumer.name, pump.numbers)
        self.on_made(consumer)

    def dead_letters(
        self, dead_letter: DeadLetterConfig, like: Mapping[str, str], write: Produce | None = None
    ) -> DeadLetterTopic | None:
        """Make the writer of dead letters.

        Each source in `like` has the topic that its dead letter topic is created like; empty for another cluster.
        `write` writes them in place of the inner producer.
        """
        if not dead_letter.enabled:
            return None
        creates, context = self._context.config.kafka.create_topics, self._context
        ensure = context.admin.ensure_topic_like if creates and all(like.values()) else None
        dead_letters = DeadLetterTopic(dead_letter.topic, write or context.audited_produce(), ensure)
        if creates:
            created = [InternalTopic(dead_letters.topic_for(topic), other) for topic, other in like.items()]
            self.created_topics.update({topic.name: topic for topic in created})
        return dead_letters

    def pumps(  # noqa: PLR0913 every part that the pumps connect
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
        flow: FlowControl = _FLOW,
        when: Callable[[Consumer], Service] = lambda consumer: consumer,
        make: Callable[..., Pump] = Pump,
    ) -> tuple[Pump, Pump | None, list[Service]]:
        """Make the pump of a consumer.

        With retry topics, also make their pump and its services. `policy` is for reading them, and `when` returns the
        service that starts their consumer.
        """
        make = functools.partial(make, f"{label} delivery", group, delivery=delivery, clock=self._context.clock)
        interval = policy.member.properties.get("auto.commit.interval.ms")
        commits = hooks.commits._replace(partitions=self._partitions)
        hooks = hooks._replace(commits=CommitPace(int(str(interval)) / 1000) if interval else commits)
        if not delivery.retry.topics:
            return make(destination, dead_letters, hooks=hooks), None, []
        path = RetryPath(self._context, label, group, topics, delivery, destination, dead_letters)
        if self._context.config.kafka.create_topics:
            created = {name: InternalTopic(name, path.source, fits=topics) for name in path.topics}
            self.created_topics.update(created)
        pump = make(path.destination, path.writer, hooks=hooks._replace(blocked_keys=path.writer))
        retry_pump = path.pump(pump)
        early = policy._replace(reset="earliest")
        consumer = self.consumer(
            f"{label} retries", retry_pump, path.topics, early, flow=flow, admin=self._context.admin
        )
        tables = [path.blocked_keys] if path.blocked_keys else []
        return pump, retry_pump, [*tables, *path.stale_entries(pump), retry_pump, when(consumer)]

    def _partitions(self) -> int:
        return sum(len(pump.lanes) for pump in self._pumps)

    def consumer(
        self, label: str, pump: Pump, topics: Sequence[str], policy: ReadPolicy, *, flow: FlowControl, admin: Admin
    ) -> Consumer:
        """Make the Kafka consumer of a pump."""
        properties = policy.member.properties
        if self.static_name and not properties.get(_STATIC):
            static = re.sub(r"[^A-Za-z0-9._-]", "_", f"{self.static_name}.{label}")
            policy = policy._replace(member=ConsumerConfig(properties={**properties, _STATIC: static}))
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
