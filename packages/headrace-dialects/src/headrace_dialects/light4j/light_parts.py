"""The endpoints of the light-4j sidecar in one process, made of the parts of the core that do their work."""

from headrace.commands.command_parts import CommandParts
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.process_context import ProcessContext
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace.sidecar.active.active_parts import ActiveParts
from headrace.sidecar.active.instances import ActiveInstances
from headrace_dialects.light4j.audit_routes import AuditEndpoints
from headrace_dialects.light4j.dead_letter_routes import INSTANCE, ActiveDeadLetterEndpoints


class LightParts(Parts):
    """Endpoints only: no service belongs to them."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self.endpoints: list[object] = [AuditEndpoints(context.audit, context.config.http.max_records)]
        if instances := needed.of(ActiveParts).instances:
            self.endpoints.append(_active_dead_letters(context, needed, instances))


def _active_dead_letters(
    context: ProcessContext, needed: NeededParts, instances: ActiveInstances
) -> ActiveDeadLetterEndpoints:
    config, running = context.config, needed.of(ConsumersParts).running
    # Each process has an instance of its own in the group, so that no call depends on another process.
    name = f"{INSTANCE}-{context.host}-{config.http.port}" if needed.of(CommandParts).owners else INSTANCE
    return ActiveDeadLetterEndpoints(
        config.active_consumers,
        instances,
        context.admin,
        context.codecs,
        running,
        context.audited_produce(),
        context.admin.ensure_topic_like if config.kafka.create_topics else None,
        name,
    )
