"""The span of one delivery. Source: OpenTelemetry's semantic conventions for messaging and for Kafka."""

import contextlib
from collections.abc import Iterator, Sequence

from headrace.delivery.dead_letter import redriven_count
from headrace.delivery.outcomes import Delivery, Reply
from headrace.errors import DeliveryError
from headrace.records import Header, RecordBatch
from headrace.runtime.telemetry import tracing
from headrace.runtime.telemetry.tracing import Carried, Tracer, TraceSpan, current_span


def begin_delivery(tracer: Tracer, delivery: Delivery, records: RecordBatch) -> TraceSpan | None:
    """Start the span of a delivery; None if it is not sampled.

    The span of one record is below the span that its headers name. The span of several records has links to those that
    are sampled. So has the span of a redrive or a replay.
    """
    carried = [found for each in records.headers or () if each and (found := tracer.of_record(each))]
    attributes = delivery_attributes(delivery, records)
    name = f"process {delivery.partition.topic}"
    if len(records) == 1 and not is_again(delivery, records.headers[0] if records.headers else None):
        return tracer.start(name, "CONSUMER", attributes, parent=next(iter(carried), None))
    links = sampled(tracer, carried)
    return None if carried and not links else tracer.start(name, "CONSUMER", attributes, links=links)


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


class Replies:
    """Takes the replies of a delivery for its span."""

    def __init__(self) -> None:
        self.found: Sequence[Reply] = ()


@contextlib.contextmanager
def delivery_span(delivery: Delivery, records: RecordBatch) -> Iterator[Replies]:
    """Trace the deliveries in this block, if they are sampled; the block sets the replies."""
    replies = Replies()
    tracer = tracing.tracer
    span = begin_delivery(tracer, delivery, records) if tracer else None
    if span is None:
        yield replies
        return
    outside = current_span.set(span)
    try:
        yield replies
        if problem := next((reply.error for reply in replies.found if reply.error), ""):
            span.fail(problem)
    except DeliveryError as cause:
        span.fail(type(cause).__name__)
        raise
    finally:
        current_span.reset(outside)
        span.end()
