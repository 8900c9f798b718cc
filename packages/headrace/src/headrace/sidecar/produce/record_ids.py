"""What a request passes on to its records: its ids, the headers of its trace, and the span of the write.

Source: OpenTelemetry's semantic conventions for Kafka.
"""

from collections.abc import Sequence

from headrace.http.request import CORRELATION, TRACE_PARENT, HttpRequest
from headrace.records import Produced
from headrace.runtime.telemetry.tracing import TraceSpan
from headrace.sidecar.produce.produce import RequestIds
from headrace.sidecar.produce.produce_response import Result


def record_ids(request: HttpRequest, topic: str = "", *, each: bool = False) -> RequestIds:
    """Return the ids of a request for its records.

    Args:
        request: Records get its correlation id, and the context of its span; without one, that of its caller.
        topic: All records are for it, and a span of the write begins.
        each: Whether each record gets an id if the client gave none.
    """
    correlation = request.head.headers.get(CORRELATION, b"") if each else request.correlation_id
    if correlation != request.correlation_id:
        correlation = b""  # it is not valid
    if span := request.span:
        write = _begin_write(span, topic) if topic else None
        return RequestIds(correlation, request.traceability_id, (write or span).record_headers(), write)
    trace = request.head.trace_parent
    return RequestIds(correlation, request.traceability_id, [(TRACE_PARENT.decode(), trace)] if trace else ())


def _begin_write(request: TraceSpan, topic: str) -> TraceSpan:
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
