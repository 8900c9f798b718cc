"""The registrations of one process, if its configuration allows any."""

from collections.abc import Sequence

from headrace.commands.command_parts import CommandParts
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.process_context import ProcessContext
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts, Parts


class RegistrationParts(Parts):
    """The registered consumers and their endpoints."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._services: Sequence[Service] = ()
        if context.config.registrations.backends:
            from headrace.sidecar.registered.registered_consumers import RegisteredConsumers

            registered = RegisteredConsumers(context, needed.of(ConsumersParts), needed.of(CommandParts))
            self._services = registered.services
            self.endpoints = [registered.endpoints]

    def services(self) -> Sequence[Service]:
        return self._services
