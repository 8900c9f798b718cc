"""Which deliveries are traced, below which span, and with which links; the fields of log lines about records."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.delivery.delivery_span import begin_delivery, deliver_in
from headrace.delivery.outcomes import Delivery, Reply
from headrace.errors import DestinationUnavailable
from headrace.functions import protocol
from headrace.functions.call_spans import CallSpans
from headrace.records import Header, Record, RecordBatch, TopicPartition
from headrace.runtime.telemetry import tracing
from headrace.runtime.telemetry.log_fields import record_fields
from headrace.runtime.telemetry.logs import JsonFormatter
from headrace_pipelines.micro_batch_span import trace_micro_batch
from tests.pipeline_harness import progress
from tests.trace_collector import Collector, collecting

TRACE, PARENT, AT = "a" * 32, "d" * 16, TopicPartition("t", 0)
YES, NO = [[("traceparent", f"00-{TRACE}-{PARENT}-{flags}".encode())] for flags in ("01", "00")]
REDRIVEN: list[Header] = [("headrace.redrive.count", b"1"), ("headrace.redrive.of", b"t:0:1")]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector of this process's spans; of new traces one in a million is sampled."""
    with collecting() as found:
        for name, value in found.env("parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.000001").items():
            monkeypatch.setenv(name, value)
        tracing.configure_tracing()
        yield found
        assert tracing.tracer
        tracing.tracer.shutdown()
        monkeypatch.setattr(tracing, "tracer", None)


def batch(*headers: list[Header] | None) -> RecordBatch:
    return RecordBatch.from_rows(AT, [(n, 0, None, b"v", each, 1) for n, each in enumerate(headers)])


def traced(records: RecordBatch, replay: str = "") -> str:
    """Deliver in a span, and return the id of its trace; empty if it is not sampled."""
    assert tracing.tracer
    span = begin_delivery(tracing.tracer, Delivery("g", AT, 1, records, 1, replay), records)
    if span is None:
        return ""
    lines = []

    async def deliver() -> list[Reply]:
        lines.append(JsonFormatter().format(logging.LogRecord("x", logging.INFO, "", 1, "said", (), None)))
        return [Reply("HTTP 400", "a secret")]

    assert len(asyncio.run(deliver_in(span, deliver()))) == 1
    assert json.loads(lines[0])["traceId"] == span.trace_id
    return span.trace_id


@pytest.mark.parametrize(
    ("headers", "replay", "below", "links"),
    [
        ([YES], "", True, 0),
        ([YES, NO, None, YES], "", False, 1),
        ([YES], "job-1", False, 1),
        ([[*YES, *REDRIVEN]], "", False, 1),
    ],
    ids=["one record", "several", "a replay", "a redrive"],
)
def test_a_span_is_below_one_record_or_has_links(
    collector: Collector, headers: Any, replay: str, below: bool, links: int
) -> None:
    """A batch with a record of a sampled trace is sampled whatever the ratio; errors are named without their text."""
    trace = traced(batch(*headers), replay)
    assert (trace == TRACE) is below
    (span,) = collector.wait("process t", messaging__consumer__group__name="g")
    assert (span.trace, span.parent, span.links) == (trace, PARENT if below else "", [PARENT] * links)
    assert (span.error, span.attributes["error.type"], b"secret" in collector.raw) == ("HTTP 400", "HTTP 400", False)


@pytest.mark.parametrize("headers", [[NO], [NO, None], [None], [None, None]])
def test_what_is_not_sampled_has_no_span(collector: Collector, headers: Any) -> None:
    assert traced(batch(*headers)) == ""


def test_a_destination_that_is_unavailable_ends_the_span(collector: Collector) -> None:
    records = batch(YES)
    assert tracing.tracer
    begun = begin_delivery(tracing.tracer, Delivery("g", AT, 1, records, 2), records)
    assert begun

    async def deliver() -> list[Reply]:
        raise DestinationUnavailable("a secret")

    with pytest.raises(DestinationUnavailable):
        asyncio.run(deliver_in(begun, deliver()))
    (span,) = collector.wait("process t", headrace__attempt=2)
    assert (span.error, tracing.current_span.get()) == ("DestinationUnavailable", None)


def test_log_fields_have_what_is_known_of_a_record() -> None:
    found = Record("t", 3, 7, 0, None, b"v", lambda: [("X-Traceability-Id", b"t-1")])
    fields = record_fields("g", found.topic_partition, record=found, consumer="orders")["as_json"]
    known = {"group": "g", "topic": "t", "partition": 3, "offset": 7, "traceabilityId": "t-1", "consumer": "orders"}
    assert fields == known


def test_calls_with_several_records_have_a_span_each(collector: Collector) -> None:
    """With the time of their frame, the error of the first record, and links; a call that was not made has none."""
    assert tracing.tracer
    records = batch(YES, None, YES, NO, YES)
    spans = CallSpans(tracing.tracer, "work", Delivery("g", AT, 1, records, 1), records, 2)
    assert spans.headers() == records.headers
    bad, good = protocol.Result(error="ValueError"), protocol.Result()
    spans.end(protocol.Results([bad, good, good, good], 2))
    first, second = collector.wait("process t", 2, faas__name="work", messaging__batch__message_count=2)
    assert (first.seconds, first.error, first.links, first.parent) == (2, "ValueError", [PARENT], "")
    assert (second.seconds, second.error, len(collector.spans)) == (2, "", 2)


def test_a_micro_batch_has_the_time_that_spark_took(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without records is none."""
    monkeypatch.setattr(tracing.tracer, "draw", lambda must=False: 1 << 64)
    for began in ("", "2026-01-01T00:00:00Z"):
        trace_micro_batch("p", progress(7, began=began, batch_seconds=2.5))
    (span,) = collector.wait("micro-batch p.by_carrier", headrace__micro_batch=7, headrace__input_records=10)
    assert (span.seconds, span.parent, span.attributes["messaging.destination.name"]) == (2.5, "", "flights")
