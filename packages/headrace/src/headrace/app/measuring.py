"""What measures one process: spans, delays of the event loop, pushes of metrics."""

import os

from headrace.process_context import ProcessContext
from headrace.runtime import Service
from headrace.runtime.telemetry.influxdb import InfluxDb
from headrace.runtime.telemetry.loop_delay import LoopDelay
from headrace.runtime.telemetry.otlp import otlp_target
from headrace.runtime.telemetry.periodic_push import MetricsPush, PushTarget
from headrace.runtime.telemetry.tracing import configure_tracing


def measuring(context: ProcessContext) -> list[Service]:
    """Return the services that send spans, measure the event loop and push metrics."""
    config, metrics = context.config, context.metrics
    targets: list[PushTarget] = [*filter(None, [otlp_target(os.environ, f"{context.host}:{config.http.port}")])]
    if config.metrics.influxdb:
        database = InfluxDb(config.metrics.influxdb, config.audit.service_id, context.host)
        metrics.on_request = database.request
        targets.append(database)
    return [*configure_tracing(), LoopDelay(), *(MetricsPush(target, metrics, context.clock) for target in targets)]
