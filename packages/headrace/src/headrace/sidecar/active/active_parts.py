"""The active consumers of one process, and the endpoints that read topics."""

import itertools
from collections.abc import Sequence
from typing import Any

from headrace.commands.command_parts import CommandParts
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.consumers.running_consumer import groups_of
from headrace.process_context import ProcessContext
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace.sidecar.active.instances import ActiveInstances
from headrace.sidecar.active.routes import ActiveEndpoints
from headrace.sidecar.active.status_routes import ActiveStatusEndpoints
from headrace.sidecar.active.topic_routes import TopicEndpoints


class ActiveParts(Parts):
    """The instances, if active consumers are on, and the endpoints."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        settings, parts = context.config.active_consumers, needed.of(ConsumersParts)
        owners = needed.of(CommandParts).owners
        self._owner_services = needed.of(CommandParts).owner_services
        self.instances: ActiveInstances | None = None
        """None if active consumers are off."""
        self.endpoints: list[object] = [
            TopicEndpoints(settings, context.admin, context.codecs, parts.internal.kind_of, context.audit)
        ]
        if not settings.enabled:
            return
        shared = (owners.claim, owners.release) if owners else None
        instances = ActiveInstances(settings, context.admin, context.codecs, context.clock, context.audit, shared)
        instances.own_groups = lambda: groups_of(parts.running.values(), parts.consumers.other_groups)
        self.instances = instances
        monitor, consumers = instances.monitor, context.metrics.lag_of
        context.metrics.lag_of = lambda: itertools.chain(consumers(), monitor.lags())
        self.endpoints += [
            ActiveEndpoints(settings, instances, context.admin),
            ActiveStatusEndpoints(monitor, context.member, context.process.others),
        ]

    def services(self) -> Sequence[Service]:
        return [*self._owner_services, *([self.instances.monitor, self.instances] if self.instances else [])]

    def on_listener(self, web: Any) -> None:
        if self.instances:
            web.before_drain.append(self.instances.end_reads)
