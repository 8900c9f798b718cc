"""The span of one delivery. Source: OpenTelemetry's semantic conventions for messaging and for Kafka."""

from collections.abc import Awaitable, Sequence

from headrace.delivery.dead_letter import redriven_count
from headrace.delivery.outcomes import Delivery, Reply
from headrace.errors import DeliveryError
from headrace.records import Header, RecordBatch
from headrace.runtime.telemetry.tracing import Carried, Tracer, TraceSpan, current_span


def begin_delivery(tracer: Tracer, delivery: Delivery, records: RecordBatch) -> TraceSpan | None:
    """Start the span of a delivery; None if it is not sampled.

    The span of one record is below the span that its headers name. The span of several records has links to those that
    are sampled. So has the span of a redrive or a replay.
    """
    columns = records.headers
    carried = [found for each in columns if each and (found := tracer.of_record(each))] if columns else ()
    links, drawn = sampled(tracer, carried) if carried else [], 0
    # Most deliveries end here, so nothing else is prepared before.
    if not carried:
        if not tracer.would_draw():
            return None
        drawn = tracer.draw(must=True)
    elif not links and tracer.parent_based:
        return None
    parent = None
    if len(records) == 1 and not is_again(delivery, columns[0] if columns else None):
        parent, links = next(iter(carried), None), []
    attributes = delivery_attributes(delivery, records)
    name = f"process {delivery.partition.topic}"
    return tracer.start(name, "CONSUMER", attributes, parent=parent, links=links, trace_id=drawn)


def sampled(tracer: Tracer, carried: Sequence[Carried]) -> list[Carried]:
    """Return those trace headers whose trace is sampled, each trace once."""
    distinct = {tuple(each.items()): each for each in carried}
    return [each for each in distinct.values() if tracer.is_sampled(each)]


def is_again(delivery: Delivery, headers: Sequence[Header] | None) -> bool:
    """Return whether a redrive or a replay delivers the record with these headers."""
    return bool(delivery.replay or (headers and redriven_count(headers)))


def delivery_attributes(delivery: Delivery, records: RecordBatch) -> dict[str, str | int | float]:
    """Return the attributes of the span of some records of a delivery."""
    found: dict[str, str | int | float] = {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": delivery.partition.topic,
        "messaging.destination.partition.id": str(delivery.partition.partition),
        "messaging.consumer.group.name": delivery.group,
        "headrace.attempt": delivery.attempt,
    }
    if len(records) == 1:
        found["messaging.kafka.offset"] = records.offsets[0]
    else:
        found["messaging.batch.message_count"] = len(records)
        found["headrace.first_offset"] = records.offsets[0]
    if delivery.replay:
        found["headrace.replay"] = delivery.replay
    return found


async def deliver_in(span: TraceSpan, delivery: Awaitable[Sequence[Reply]]) -> Sequence[Reply]:
    """Await a delivery in a span, which ends with it."""
    outside = current_span.set(span)
    try:
        replies = await delivery
        if problem := next((reply.error for reply in replies if reply.error), ""):
            span.fail(problem)
        return replies
    except DeliveryError as cause:
        span.fail(type(cause).__name__)
        raise
    finally:
        current_span.reset(outside)
        span.end()
