"""Registered consumers in one process: made like those of the file, but started and stopped one by one."""

from collections.abc import Mapping, Sequence

from headrace.commands.command_parts import CommandParts
from headrace.commands.placement.consumer_groups import ConsumerGroups
from headrace.commands.registration_routes import RegistrationEndpoints
from headrace.commands.registration_table import Registration, RegistrationRules, Registrations
from headrace.consumers.consumer_set import ConsumerSet
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.process_context import ProcessContext
from headrace.runtime import GroupSpec, Readiness, Service
from headrace.sidecar.reactive.reactive_consumers import ReactiveConsumers


class RegisteredConsumers:
    """Runs the registered consumers."""

    def __init__(self, context: ProcessContext, parts: ConsumersParts, commands: CommandParts) -> None:
        """Make the services; nothing is started. `parts` has the consumers of the file."""
        config = context.config
        self._context, self._internal, self._placements = context, parts.internal, commands.placements
        static = commands.placements.process if commands.placements else ""
        self._groups = ConsumerGroups(context, parts, commands.control, static, registered=True)
        self._required: Mapping[str, Registration] = {}
        rules = RegistrationRules(
            config.registrations,
            config.kafka.properties,
            {consumer.name for consumer in parts.consumers.consumers}.union(config.reactive_consumers),
            [required for _, required in parts.consumers.requirements],
            lambda topic: topic.startswith("_") or bool(self._internal.kind_of(topic)),
        )
        # A removed consumer stays paused while it drains; otherwise it would resume for that time.
        forget = commands.control.remove
        self._registrations = Registrations(commands.table, rules, context.clock, self._apply, forget)
        if self._placements:
            self._placements.follow("registered", lambda: self._required, self._start)
        self.services: Sequence[Service] = [self._groups, self._registrations]
        """Downstream first; after the table and the producers."""
        self.endpoints = RegistrationEndpoints(self._registrations, self._readiness_of)

    def _apply(self, required: Mapping[str, Registration]) -> None:
        self._internal.register(one.settings for one in required.values() if one.settings)
        self._required = required
        if self._placements:
            self._placements.wake()
        self._start()

    def _start(self) -> None:
        here = self._required
        if placements := self._placements:
            here = {name: one for name, one in here.items() if placements.runs(name)}
        self._groups.apply({name: self._group_of(one) for name, one in here.items()})

    def _readiness_of(self, name: str) -> Readiness:
        if (placements := self._placements) and (others := placements.other_processes(name)):
            return Readiness(True, f"runs in {', '.join(others)}")
        return self._groups.readiness_of(name)

    def _group_of(self, one: Registration) -> GroupSpec:
        def may_read(topic: str) -> bool:
            return not topic.startswith("_") and one.may_read(topic)

        def make(consumers: ConsumerSet) -> Sequence[Service]:
            assert one.settings
            made = ReactiveConsumers(self._context, consumers, self._internal, owner=one.owner, may_read=may_read)
            return made.make(one.name, one.settings)

        return self._groups.spec(f"reactive {one.name}", make, one.version)
