"""What measures one process: spans, delays of the event loop, pushes of metrics."""

import os

from headrace.process_context import ProcessContext
from headrace.runtime import Service
from headrace.runtime.telemetry.loop_delay import LoopDelay
from headrace.runtime.telemetry.otlp_variables import is_exported
from headrace.runtime.telemetry.tracing import configure_tracing


def measuring(context: ProcessContext) -> list[Service]:
    """Return the services that send spans, measure the event loop and push metrics."""
    services = [*configure_tracing(), LoopDelay()]
    if is_exported("METRICS", os.environ):
        from headrace.runtime.telemetry.otlp import OtlpPush  # here, because the library is large

        services.append(OtlpPush(context.metrics, context.clock, f"{context.host}:{context.config.http.port}"))
    return services
