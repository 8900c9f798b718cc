"""The endpoints of the light-4j sidecar in one process, made of the parts of the core that do their work."""

from headrace.process_context import ProcessContext
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace_dialects.light4j.audit_routes import AuditEndpoints


class LightParts(Parts):
    """Endpoints only: no service belongs to them."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self.endpoints = [AuditEndpoints(context.audit, context.config.http.max_records)]
