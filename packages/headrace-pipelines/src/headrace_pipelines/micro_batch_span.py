"""The span of a micro-batch, from what Spark reports of it."""

from datetime import datetime

from headrace.runtime.telemetry import tracing
from headrace_pipelines.driver_protocol import FlowProgress


def trace_micro_batch(pipeline: str, progress: FlowProgress) -> None:
    """Trace a micro-batch that has completed, if it is sampled; a report without records is none."""
    if tracing.tracer is None or progress.batch_seconds is None or not progress.began:
        return
    attributes: dict[str, str | int | float] = {
        "headrace.pipeline": pipeline,
        "headrace.flow": progress.flow,
        "headrace.micro_batch": progress.batch_id,
        "headrace.input_records": progress.input_records,
        "headrace.corrupt_records": progress.corrupt_records,
        "headrace.dropped_rows": progress.dropped_rows,
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.destination.name": ", ".join(sorted(progress.positions)),
    }
    if span := tracing.tracer.start(f"micro-batch {pipeline}.{progress.flow}", "CONSUMER", attributes):
        began_ns = int(datetime.fromisoformat(progress.began).timestamp() * 1e9)
        span.end_between(began_ns, began_ns + int(progress.batch_seconds * 1e9))
