"""The consumers of one process, whichever feature makes them, and what all of them need before they start."""

from collections.abc import Sequence

from headrace.config.format_list import SCHEMA_TYPES
from headrace.consumers.consumer_set import ConsumerSet
from headrace.consumers.lag import LagMonitor
from headrace.consumers.running_consumer import RunningConsumer, groups_of
from headrace.kafka import InternalTopic, TopicCreator
from headrace.kafka.internal_topics import InternalTopics
from headrace.process_context import ProcessContext
from headrace.runtime import ServerWatch, Service
from headrace.runtime.feature_parts import NeededParts, Parts


class ConsumersParts(Parts):
    """The consumers, their internal topics and their lag."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._context = context
        self.consumers = ConsumerSet(context)
        """Those of the configuration."""
        self.internal = InternalTopics(context.config)
        """What no caller may write."""
        self.running: dict[str, RunningConsumer] = {}
        """Those that run now by name, registered ones included."""
        self.lag = LagMonitor(lambda: groups_of(self.running.values(), self.consumers.other_groups), context.clock)
        """The lag of each group."""
        context.metrics.lag_of = self.lag.all

    def services(self) -> Sequence[Service]:
        context, config = self._context, self._context.config
        services: list[Service] = []
        formats = {config.producer.key_format, config.producer.value_format, *self.consumers.formats}
        if formats & SCHEMA_TYPES.keys() or "schema_registry" in config.model_fields_set:
            services.append(ServerWatch("schema registry", context.registry, context.clock))
        created = self.consumers.created_topics
        if config.audit.to == "topic" and config.kafka.create_topics:
            created = {config.audit.topic: InternalTopic(config.audit.topic), **created}
        if created:
            services.append(TopicCreator(context.admin, created.values(), context.clock))
        return [*services, *self.consumers.cluster_services, self.lag]
