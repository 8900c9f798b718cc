"""Registered consumers in one process: made like those of the file, but started and stopped one by one."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.app.assembly import Assembly
from headrace.app.topic_requirements import topic_requirements
from headrace.commands.consumer_control import ConsumerControl
from headrace.commands.registration_routes import RegistrationEndpoints
from headrace.commands.registrations import Registration, RegistrationRules, Registrations
from headrace.consumers.process_context import ProcessContext
from headrace.kafka import CompactedTable, TopicCreator
from headrace.runtime import GroupSpec, Service, ServiceGroups


class RegisteredConsumers:
    """Runs the registered consumers."""

    def __init__(
        self, context: ProcessContext, assembly: Assembly, table: CompactedTable[Any], control: ConsumerControl
    ) -> None:
        """Make the services; nothing is started. `assembly` has the consumers of the file."""
        config = context.config
        self._context, self._internal, self._control = context, assembly.internal, control
        self._groups = ServiceGroups("reactive", context.clock, config.drain_seconds)
        required = topic_requirements(config, assembly.function_specs)
        rules = RegistrationRules(
            config.registrations,
            config.kafka.properties,
            {consumer.name for consumer in assembly.parts.consumers},
            [each for _, of_cluster in required for each in of_cluster],
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
        context, config = self._context, self._context.config

        def make() -> Sequence[Service]:
            alone = {"reactive_consumers": {one.name: one.settings}, "functions": [], "watched_functions": []}
            alone["pipelines"] = []
            made = Assembly(
                context,
                config.model_copy(update=alone),
                self._internal,
                owner=one.owner,
                may_read=lambda topic: not topic.startswith("_") and one.may_read(topic),
                restarts=False,
            )
            for consumer in made.parts.consumers:
                self._control.add(consumer)
            creator = TopicCreator(
                context.admin, made.parts.created_topics.values(), context.clock, f"reactive {one.name} internal topics"
            )
            return [creator, *made.services]

        def on_stopped() -> None:
            self._control.remove(one.name)
            context.metrics.forget_deliveries("reactive", one.name)

        return GroupSpec(one.version, make, on_stopped)
