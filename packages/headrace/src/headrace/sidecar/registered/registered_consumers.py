"""Registered consumers in one process: made like those of the file, but started and stopped one by one."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.commands.consumer_control import ConsumerControl
from headrace.commands.registration_routes import RegistrationEndpoints
from headrace.commands.registration_table import Registration, RegistrationRules, Registrations
from headrace.consumers.consumer_set import ConsumerSet
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.kafka import CompactedTable, TopicCreator
from headrace.process_context import ProcessContext
from headrace.runtime import GroupSpec, Service, ServiceGroups
from headrace.sidecar.reactive.reactive_consumers import ReactiveConsumers


class RegisteredConsumers:
    """Runs the registered consumers."""

    def __init__(
        self, context: ProcessContext, parts: ConsumersParts, table: CompactedTable[Any], control: ConsumerControl
    ) -> None:
        """Make the services; nothing is started. `parts` has the consumers of the file."""
        config = context.config
        self._context, self._internal, self._control = context, parts.internal, control
        self._groups = ServiceGroups("reactive", context.clock, config.drain_seconds)
        rules = RegistrationRules(
            config.registrations,
            config.kafka.properties,
            {consumer.name for consumer in parts.consumers.consumers},
            [required for _, required in parts.consumers.requirements],
            lambda topic: topic.startswith("_") or bool(self._internal.kind_of(topic)),
        )
        # A removed consumer stays paused while it drains; otherwise it would resume for that time.
        self._registrations = Registrations(table, rules, context.clock, self._apply, control.remove)
        self.services: Sequence[Service] = [self._groups, self._registrations]
        """Downstream first; after the table and the producers."""
        self.endpoints = RegistrationEndpoints(self._registrations, self._groups.readiness_of)

    def _apply(self, required: Mapping[str, Registration]) -> None:
        self._internal.register(one.settings for one in required.values() if one.settings)
        self._groups.apply({name: self._group_of(one) for name, one in required.items()})

    def _group_of(self, one: Registration) -> GroupSpec:
        context = self._context

        def make() -> Sequence[Service]:
            consumers = ConsumerSet(context, restarts=False)
            consumers.on_made = self._control.add
            maker = ReactiveConsumers(
                context,
                consumers,
                self._internal,
                owner=one.owner,
                may_read=lambda topic: not topic.startswith("_") and one.may_read(topic),
            )
            assert one.settings
            made = maker.make(one.name, one.settings)
            creator = TopicCreator(
                context.admin, consumers.created_topics.values(), context.clock, f"reactive {one.name} internal topics"
            )
            return [creator, *consumers.cluster_services, *made]

        def on_stopped() -> None:
            self._control.remove(one.name)
            context.metrics.forget_deliveries("reactive", one.name)

        return GroupSpec(one.version, make, on_stopped)
