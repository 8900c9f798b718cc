"""Spans of a function's calls: made by the parent, with the time that the worker has measured of their frame."""

from collections.abc import Sequence

import msgspec

from headrace.delivery.delivery_span import delivery_attributes, is_again, sampled
from headrace.delivery.outcomes import Delivery
from headrace.functions import protocol
from headrace.records import Header, OutgoingRecord, RecordBatch
from headrace.runtime import clock
from headrace.runtime.telemetry.tracing import Carried, Tracer, TraceSpan


class CallSpans:
    """The spans of one frame: one per sampled record, or one per call with several records."""

    def __init__(
        self, tracer: Tracer, function: str, delivery: Delivery, records: RecordBatch, batch_size: int
    ) -> None:
        """Start the spans of what is sampled; `batch_size` is 0 if each call has one record."""
        self._tracer = tracer
        self._function = function
        self._delivery = delivery
        self._records = records
        self._batch_size = batch_size
        self._spans: dict[int, TraceSpan] = {}
        """By the index of the first record of the call."""
        size = batch_size or 1
        columns = records.headers or [None] * len(records)
        for index in range(0, len(records), size):  # this runs for every record, so most of them end here
            carried = [found for each in columns[index : index + size] if each and (found := tracer.of_record(each))]
            if carried or tracer.would_draw():
                self._start(index, records[index : index + size], carried)

    def _start(self, index: int, called: RecordBatch, carried: Sequence[Carried]) -> None:
        """Start the span of a call, unless it is not sampled."""
        tracer, headers = self._tracer, called.headers[0] if called.headers else None
        attributes = {**delivery_attributes(self._delivery, called), "faas.name": self._function}
        name, parent, links = f"process {self._delivery.partition.topic}", None, sampled(tracer, carried)
        if len(called) == 1 and not is_again(self._delivery, headers):
            parent, links = next(iter(carried), None), []
        elif carried and not links:
            return
        drawn = 0 if carried else tracer.draw(must=True)
        span = tracer.start(name, "CONSUMER", attributes, parent=parent, links=links, trace_id=drawn)
        if span:
            self._spans[index] = span

    def headers(self) -> list[list[Header] | None] | None:
        """Return the headers of the events: those of a call with one record carry the context of its span."""
        columns = self._records.headers
        if self._batch_size or not self._spans:
            return columns
        changed = [*(columns or [None] * len(self._records))]
        for index, span in self._spans.items():
            changed[index] = [*self._tracer.without(changed[index]), *span.record_headers()]
        return changed

    def end(self, response: protocol.Done | protocol.Results) -> None:
        results = response.results if isinstance(response, protocol.Results) else ()
        ended_ns = clock.time_ns()
        began_ns = ended_ns - int(response.seconds * 1e9)
        for index, span in self._spans.items():
            if index >= len(results) and isinstance(response, protocol.Results):
                continue  # its record was released
            result = results[index] if results else None
            if isinstance(result, protocol.Result) and result.error:
                span.fail(result.error)
            span.end_between(began_ns, ended_ns)

    def lost(self, begun: int) -> None:
        """End the span of the call at which the worker died."""
        if span := self._spans.get(begun - 1):
            span.fail("WorkerLost")
            span.end()

    def traced(self, owners: Sequence[int], outgoing: Sequence[OutgoingRecord]) -> list[OutgoingRecord]:
        """Return outputs with the context of their call, unless they carry one."""
        found = [*outgoing]
        for number, (index, record) in enumerate(zip(owners, outgoing, strict=True)):
            span = self._spans.get(index)
            if span and not self._tracer.of_record(record.headers):
                found[number] = msgspec.structs.replace(
                    record, headers=[*(record.headers or ()), *span.record_headers()]
                )
        return found
