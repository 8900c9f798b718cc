"""Reactive consumers that start and stop one by one while the process runs: registered or placed ones."""

import re
from collections.abc import Callable, Sequence
from typing import Final

from headrace.commands.command_parts import CommandParts
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.membership import ConsumerConfig
from headrace.consumers.consumer_set import ConsumerSet
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.kafka import TopicCreator
from headrace.process_context import ProcessContext
from headrace.runtime import GroupSpec, Readiness, Service, ServiceGroups
from headrace.sidecar.reactive.reactive_consumers import ReactiveConsumers

_STATIC: Final = "group.instance.id"


class ConsumerGroups(ServiceGroups):
    """The services of each consumer are a group."""

    def __init__(
        self, context: ProcessContext, parts: ConsumersParts, commands: CommandParts, *, registered: bool
    ) -> None:
        """Prepare; registered consumers do not count for the readiness of the process."""
        metric = "headrace_registrations" if registered else "headrace_placed_consumers"
        name = "reactive" if registered else "placed reactive"
        super().__init__(name, context.clock, context.config.drain_seconds, metric)
        self._context, self._parts, self._commands = context, parts, commands
        self._counts = not registered

    def readiness(self) -> Readiness:
        each = {name: self.readiness_of(name) for name in self.running} if self._counts else {}
        reasons = [f"{name}: {reason}" for name, (ready, reason) in each.items() if not ready]
        return Readiness(not reasons, "; ".join(reasons))

    def spec(
        self,
        name: str,
        settings: ReactiveConsumerConfig,
        version: int = 0,
        owner: str = "",
        may_read: Callable[[str], bool] | None = None,
    ) -> GroupSpec:
        """Return how a consumer is made and forgotten."""
        context, control = self._context, self._commands.control

        def make() -> Sequence[Service]:
            consumers = ConsumerSet(context, first=self._parts.consumers)
            consumers.on_made = control.add
            maker = ReactiveConsumers(context, consumers, self._parts.internal, owner=owner, may_read=may_read)
            made = maker.make(name, self._static(name, settings))
            created = consumers.created_topics.values()
            creator = TopicCreator(context.admin, created, context.clock, f"reactive {name} internal topics")
            return [creator, *consumers.cluster_services, *made]

        def on_stopped() -> None:
            control.remove(name)
            context.metrics.forget_deliveries("reactive", name)

        return GroupSpec(version, make, on_stopped)

    def _static(self, name: str, settings: ReactiveConsumerConfig) -> ReactiveConsumerConfig:
        """Return the settings of a static member, if consumers are placed: a restart then moves no partition."""
        placements, properties = self._commands.placements, settings.consumer.properties
        if not placements or _STATIC in properties:
            return settings
        member = re.sub(r"[^A-Za-z0-9._-]", "_", f"{placements.process}.{name}")
        static = ConsumerConfig(properties={**properties, _STATIC: member})
        return settings.model_copy(update={"consumer": static})
