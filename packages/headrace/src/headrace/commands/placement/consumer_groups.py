"""Consumers that start and stop one by one while the process runs: registered or placed ones."""

from collections.abc import Callable, Sequence

from headrace.commands.consumer_control import ConsumerControl
from headrace.consumers.consumer_set import ConsumerSet
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.kafka import TopicCreator
from headrace.process_context import ProcessContext
from headrace.runtime import GroupSpec, Readiness, Service, ServiceGroups


class ConsumerGroups(ServiceGroups):
    """The services of each consumer, or of the triggers of a function, are a group."""

    def __init__(
        self, context: ProcessContext, parts: ConsumersParts, control: ConsumerControl, static: str, *, registered: bool
    ) -> None:
        """Prepare; `static` is the name of this process for static members, and empty without a placement.

        Registered consumers do not count for the readiness of the process.
        """
        metric = "headrace_registrations" if registered else "headrace_placed_consumers"
        name = "reactive" if registered else "placed consumers"
        super().__init__(name, context.clock, context.config.drain_seconds, metric)
        self._context, self._parts, self._control = context, parts, control
        self._counts = not registered
        self._static = static
        self.of_file: dict[str, GroupSpec] = {}
        """Those of the file by name; a placement chooses which of them run here."""

    def apply_placed(self, runs: Callable[[str], bool]) -> None:
        """Run those of the file that are placed here."""
        self.apply({name: spec for name, spec in self.of_file.items() if runs(name)})

    def readiness(self) -> Readiness:
        each = {name: self.readiness_of(name) for name in self.running} if self._counts else {}
        reasons = [f"{name}: {reason}" for name, (ready, reason) in each.items() if not ready]
        return Readiness(not reasons, "; ".join(reasons))

    def spec(self, label: str, make: Callable[[ConsumerSet], Sequence[Service]], version: int = 0) -> GroupSpec:
        """Return how the consumers of a group are made and forgotten; `make` adds them to a set."""
        context = self._context
        consumers = ConsumerSet(context)

        def made() -> Sequence[Service]:
            nonlocal consumers
            consumers = ConsumerSet(context, first=self._parts.consumers)
            consumers.static_name = self._static
            services = make(consumers)
            created = consumers.created_topics.values()
            creator = TopicCreator(context.admin, created, context.clock, f"{label} internal topics")
            return [creator, *consumers.cluster_services, *services]

        def on_stopped() -> None:
            for one in consumers.consumers:
                self._control.remove(one.name)
                context.metrics.forget_deliveries(one.kind, one.name)

        return GroupSpec(version, made, on_stopped)
