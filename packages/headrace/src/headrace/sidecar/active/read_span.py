"""The span of a read. Source: OpenTelemetry's semantic conventions for messaging."""

import time
from collections.abc import Sequence

from headrace.records import RecordBatch
from headrace.runtime.telemetry import tracing
from headrace.runtime.telemetry.tracing import current_span


def trace_read(group: str, batches: Sequence[RecordBatch], began_ns: int) -> None:
    """Trace a read within a sampled request: from `began_ns`, nanoseconds since the epoch, until now."""
    request = current_span.get()
    if tracing.tracer is None or request is None:
        return
    headers = [own for batch in batches for own in batch.headers or ()]
    found = [carried for own in headers if (carried := tracing.tracer.of_record(own))]
    attributes: dict[str, str | int | float] = {
        "messaging.system": "kafka",
        "messaging.operation.type": "receive",
        "messaging.operation.name": "receive",
        "messaging.consumer.group.name": group,
        "messaging.batch.message_count": sum(map(len, batches)),
        "messaging.destination.name": ", ".join(sorted({batch.topic_partition.topic for batch in batches})),
    }
    request.child("receive", "CONSUMER", attributes, found).end_between(began_ns, time.time_ns())
