"""The span of a write to one topic. Source: OpenTelemetry's semantic conventions for Kafka."""

from collections.abc import Sequence

from headrace.records import Produced
from headrace.runtime.telemetry.tracing import TraceSpan
from headrace.sidecar.produce.produce_response import Result


def begin_write(request: TraceSpan, topic: str) -> TraceSpan:
    """Start the span of a write below that of its request."""
    attributes = {
        "messaging.system": "kafka",
        "messaging.operation.type": "send",
        "messaging.operation.name": "send",
        "messaging.destination.name": topic,
    }
    return request.child(f"send {topic}", "PRODUCER", attributes)


def end_write(span: TraceSpan, results: Sequence[Result]) -> None:
    """End it with the results of its records: one record's position, or the number of records."""
    problem = next((each for each in results if not isinstance(each, Produced)), None)
    if len(results) == 1 and isinstance(results[0], Produced):
        span.set({"messaging.destination.partition.id": str(results[0].partition)})
        span.set({"messaging.kafka.offset": results[0].offset})
    else:
        span.set({"messaging.batch.message_count": len(results)})
    if problem:
        span.fail(type(problem).__name__)
    span.end()
