"""The endpoints for Dapr applications in one process, made of what the core's own endpoint of producing uses."""

from headrace.process_context import ProcessContext
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace.sidecar.produce.produce_parts import ProduceParts
from headrace_dialects.dapr.dapr_sections import DaprSections
from headrace_dialects.dapr.publish_routes import PublishRoute


class DaprParts(Parts):
    """The endpoints."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        pubsubs, service = context.config.section(DaprSections).dapr.pubsubs, needed.of(ProduceParts).service
        self.endpoints = [PublishRoute(pubsubs, service, context.metrics, context.clock, context.config.http)]
