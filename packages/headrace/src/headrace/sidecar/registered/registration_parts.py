"""The registrations of one process, if its configuration allows any."""

from collections.abc import Sequence

from headrace.commands.command_parts import CommandParts
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.process_context import ProcessContext
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace.sidecar.registered.registered_consumers import RegisteredConsumers


class RegistrationParts(Parts):
    """The registered consumers and their endpoints."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._registered: RegisteredConsumers | None = None
        if context.config.registrations.backends:
            self._registered = RegisteredConsumers(context, needed.of(ConsumersParts), needed.of(CommandParts))
            self.endpoints = [self._registered.endpoints]

    def services(self) -> Sequence[Service]:
        return self._registered.services if self._registered else ()
