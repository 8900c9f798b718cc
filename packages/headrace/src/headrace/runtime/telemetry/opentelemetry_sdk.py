"""The OpenTelemetry SDK as `tracing` and `otlp` need it. They import this module only if the variables ask for it."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import StatusCode

# `tracing` and `otlp` log each outage once, and the texts of the library may hold what the variables do.
logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


class Sdk:
    """A provider of spans with its sampler and its exporter."""

    def __init__(self, sampler: str, ratio: float, ended: Callable[[bool], None]) -> None:
        """Prepare; `ended` gets whether each export succeeded, in the exporter's thread."""
        self._ids = _DrawnIds()
        root: Sampler = ALWAYS_ON if ratio == 1 else TraceIdRatioBased(ratio)
        self._provider = TracerProvider(
            sampler=ParentBased(root) if sampler.startswith("parentbased_") else root,
            resource=resource_of({}),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_ReportingExporter(ended)))
        self._tracer = self._provider.get_tracer("headrace")
        self._propagator = TraceContextTextMapPropagator()
        self.failed = StatusCode.ERROR

    def shutdown(self) -> None:
        """Export what has ended, and stop."""
        self._provider.shutdown()

    def context_of(self, carried: Mapping[str, str]) -> Context | None:
        """Return the context of a caller; None if its headers are not valid."""
        context = self._propagator.extract(carried, Context())
        return context if get_current_span(context).get_span_context().is_valid else None

    def is_sampled(self, carried: Mapping[str, str]) -> bool:
        """Return whether a caller's trace is sampled."""
        context = self.context_of(carried)
        return context is not None and get_current_span(context).get_span_context().trace_flags.sampled

    def context_below(self, span: Span) -> Context:
        return set_span_in_context(span, Context())

    def start(
        self,
        name: str,
        kind: str,
        attributes: Mapping[str, Any],
        context: Context | None,
        trace_id: int,
        links: Sequence[Mapping[str, str]],
    ) -> Span:
        """Start a span; without a context it begins the trace with this id."""
        known = [found for each in links if (found := self.context_of(each))]
        linked = [Link(get_current_span(found).get_span_context()) for found in known]
        self._ids.drawn = trace_id
        return self._tracer.start_span(
            name, context or Context(), SpanKind[kind], attributes, linked, record_exception=False
        )

    def headers_of(self, span: Span) -> list[tuple[str, str]]:
        """Return the headers that carry the context of a span."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.context_below(span))
        return [*carrier.items()]


def resource_of(more: Mapping[str, str]) -> Resource:
    """Return what the variables say of who exports, with further attributes."""
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    name = {} if named else {"service.name": "headrace"}
    return Resource.create({"service.version": version("headrace"), **name, **more})


class _DrawnIds(RandomIdGenerator):
    """Gives a new trace the id that was drawn for it, because the id decides whether it is sampled."""

    drawn = 0

    def generate_trace_id(self) -> int:
        return self.drawn or super().generate_trace_id()


class HeadSession(requests.Session):
    """Reads the head of a response only: a body without an end would fill the memory, or block the exporter."""

    outcome = "no request was made"
    """Of the last request. Of an error it has the class only, because the text may have the URL with a secret."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        try:
            response = super().request(*args, **{**options, "stream": True})
        except (OSError, ValueError) as cause:
            # The system's own errors name a file.
            self.outcome = str(cause) if type(cause) is OSError else type(cause).__name__
            raise
        response.close()
        self.outcome = f"HTTP {response.status_code}"
        if 300 <= response.status_code < 400:  # the exporter would count it as a success
            raise requests.TooManyRedirects(f"the collector responds with {response.status_code}")
        return response


class _ReportingExporter(SpanExporter):
    """Exports by OTLP, and reports the results."""

    def __init__(self, ended: Callable[[bool], None]) -> None:
        self._exporter = OTLPSpanExporter(session=HeadSession())
        self._ended = ended

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self._ended(result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
