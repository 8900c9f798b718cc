"""Traces: spans by OpenTelemetry, exported by OTLP over HTTP. No other module imports opentelemetry.

OpenTelemetry's environment variables are the only settings. Without an endpoint there, `tracer` is None and the library
is not imported, so that a caller's only cost is this test. A span names topics, partitions, offsets, groups and errors.
It never has keys, values, headers or the texts of errors.

Source: OpenTelemetry specification 1.40, environment variables and sampling; its semantic conventions for HTTP and for
messaging; OpenTelemetry SDK for Python 1.45 (the processor with a bounded queue, and the sampler by trace id).
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, Literal, TypeVar

from headrace.errors import EnvironmentProblem
from headrace.records import Header
from headrace.runtime import chance, clock
from headrace.runtime.service import Service
from headrace.runtime.telemetry.otlp_variables import is_exported
from headrace.runtime.threads import OwnedThread

log = logging.getLogger(__name__)

T = TypeVar("T")
Kind = Literal["INTERNAL", "SERVER", "PRODUCER", "CONSUMER"]
Attributes = Mapping[str, str | int | float]
Carried = Mapping[str, str]
"""Trace headers by lower-case name."""

_DEFAULT_RATIO: Final = "0.01"
_SAMPLERS: Final = ("always_on", "always_off", "traceidratio")
_PARENT_BASED: Final = "parentbased_"
_NAMES: Final = ("traceparent", "tracestate")
_RAW_NAMES: Final = {name.encode(): name for name in _NAMES}
_LOW_BITS: Final = (1 << 64) - 1
_UNSAMPLED: Final = "-00"
_FLUSH_SECONDS: Final = 5.0
MOST_LINKS: Final = 128
"""Of one span, as in the SDK."""

current_span: "ContextVar[TraceSpan | None]" = ContextVar("current_span", default=None)
"""The span of the request or delivery that this task serves."""
tracer: "Tracer | None" = None
"""Makes spans; None while tracing is off."""


class TraceSpan:
    """One span, which is exported when it has ended."""

    __slots__ = ("_sdk", "_span", "span_id", "trace_id")

    def __init__(self, span: Any, sdk: Any) -> None:
        """Take a span of the `Sdk`."""
        self._span = span
        self._sdk = sdk
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.span_id = f"{context.span_id:016x}"

    def headers(self) -> list[tuple[str, str]]:
        """Return the trace headers of what this span sends or calls."""
        headers: list[tuple[str, str]] = self._sdk.headers_of(self._span)
        return headers

    def record_headers(self) -> list[Header]:
        return [(name, value.encode()) for name, value in self.headers()]

    def child(self, name: str, kind: Kind, attributes: Attributes, links: Sequence[Carried] = ()) -> "TraceSpan":
        """Start a span below this one."""
        context = self._sdk.context_below(self._span)
        return TraceSpan(self._sdk.start(name, kind, attributes, context, 0, links[:MOST_LINKS]), self._sdk)

    def set(self, attributes: Attributes, name: str = "") -> None:
        """Add attributes, and rename the span if a name is given."""
        self._span.set_attributes(attributes)
        if name:
            self._span.update_name(name)

    def fail(self, error: str) -> None:
        """Mark it as failed with a class of errors; the error's text may quote a record and is left out."""
        self._span.set_attribute("error.type", error)
        self._span.add_event("exception", {"exception.type": error})
        self._span.set_status(self._sdk.failed, error)

    def end(self) -> None:
        self._span.end()

    def end_between(self, start_ns: int, end_ns: int) -> None:
        """End it with the times that another process measured, in nanoseconds since the epoch."""
        self._span._start_time = start_ns
        self._span.end(end_ns)


class Tracer:
    """Makes spans. It decides by itself what is not sampled, because the SDK needs several microseconds for it."""

    def __init__(self, settings: "_Settings") -> None:
        """Import the SDK and start its exporter; nothing is contacted before a span has ended."""
        from headrace.runtime.telemetry import opentelemetry_sdk

        self._sdk = opentelemetry_sdk.Sdk(settings.sampler, settings.ratio, _ExportLog().ended)
        self._bound, self._ratio = settings.bound, settings.ratio
        self.parent_based = settings.parent_based
        """Whether a caller that is not sampled decides."""
        self.shutdown: Callable[[], None] = self._sdk.shutdown
        """Export what has ended, and stop; may take long."""

    def of_request(self, headers: Mapping[bytes, bytes]) -> Carried:
        """Return the trace headers of an HTTP request."""
        if _RAW_NAMES.keys().isdisjoint(headers):
            return {}
        return {name: headers[raw].decode("latin-1") for raw, name in _RAW_NAMES.items() if raw in headers}

    def of_record(self, headers: Iterable[Header] | None) -> Carried:
        """Return the trace headers of a record; in Kafka their names are in lower case."""
        return {name: value.decode("latin-1") for name, value in headers or () if value and name in _NAMES}

    def is_sampled(self, carried: Carried) -> bool:
        """Return whether these trace headers are of a trace that is exported."""
        if not carried or (self.parent_based and carried.get("traceparent", _UNSAMPLED).endswith(_UNSAMPLED)):
            return False
        return self._sdk.is_sampled(carried)

    def would_draw(self) -> bool:
        """Return whether a new trace is sampled; then `draw` with `must` makes its id."""
        return chance.random() < self._ratio

    def draw(self, *, must: bool = False) -> int:
        """Return the id of a new trace if it is sampled, else 0.

        Args:
            must: Sample it although the ratio says no, unless the ratio is 0: a trace that it links to is sampled.
        """
        found = chance.getrandbits(128)
        if found & _LOW_BITS < self._bound:
            return found
        return (found & ~_LOW_BITS) | chance.randrange(self._bound) if must and self._bound else 0

    def start(
        self,
        name: str,
        kind: Kind,
        attributes: Attributes,
        *,
        parent: Carried | None = None,
        links: Sequence[Carried] = (),
        trace_id: int = 0,
    ) -> TraceSpan | None:
        """Start a span below a caller's, or of a new trace; None if it is not sampled.

        Args:
            parent: Trace headers of the caller.
            links: Trace headers of other spans, which are sampled.
            trace_id: From `draw`, if the caller has drawn already.
        """
        if parent and self.parent_based and parent.get("traceparent", "").endswith(_UNSAMPLED):
            return None
        context = self._sdk.context_of(parent) if parent else None
        if context is None:
            trace_id = trace_id or self.draw(must=bool(links))
            if not trace_id:
                return None
        span = self._sdk.start(name, kind, attributes, context, trace_id, links[:MOST_LINKS])
        return TraceSpan(span, self._sdk) if span.is_recording() else None

    def without(self, headers: Iterable[tuple[str, T]] | None) -> list[tuple[str, T]]:
        """Return headers without those of a trace."""
        return [header for header in headers or () if header[0].lower() not in _NAMES]


class _ExportLog:
    """Logs when exports begin to fail, and when they succeed again."""

    def __init__(self) -> None:
        self._failing_since: float | None = None

    def ended(self, exported: bool) -> None:
        """Take the result of one export; called in the exporter's thread."""
        if not exported and self._failing_since is None:
            self._failing_since = clock.monotonic()
            log.warning("failed to export spans, dropping them: the collector is unreachable or rejects them")
        elif exported and self._failing_since is not None:
            log.info("exporting spans again after %.0f s", clock.monotonic() - self._failing_since)
            self._failing_since = None


class _Settings:
    """The environment variables of OpenTelemetry that Headrace reads itself."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Read them; EnvironmentProblem if one is not usable."""
        sampler = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()
        ratio = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or ("1" if sampler else _DEFAULT_RATIO)
        self.sampler = sampler or f"{_PARENT_BASED}traceidratio"
        self.parent_based = self.sampler.startswith(_PARENT_BASED)
        root = self.sampler.removeprefix(_PARENT_BASED)
        if root not in _SAMPLERS:
            known = ", ".join([*_SAMPLERS, *(_PARENT_BASED + each for each in _SAMPLERS)])
            raise EnvironmentProblem(f"OTEL_TRACES_SAMPLER is {sampler[:40]!r}: use one of {known}")
        self.ratio = {"always_on": 1.0, "always_off": 0.0}.get(root, -1.0)
        if self.ratio < 0:
            self.ratio = _ratio(ratio)
        self.bound = round(self.ratio * (_LOW_BITS + 1))
        """Trace ids whose low 64 bits are below it are sampled."""
        for name in environ.get("OTEL_PROPAGATORS", "").lower().split(","):
            if name.strip() not in ("", "tracecontext", "baggage"):
                raise EnvironmentProblem(
                    f"OTEL_PROPAGATORS has {name.strip()[:40]!r}: Headrace passes on tracecontext (traceparent) only; "
                    "remove the others, and have the callers send traceparent"
                )


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1
    if not 0 <= ratio <= 1:
        raise EnvironmentProblem(f"OTEL_TRACES_SAMPLER_ARG is {text[:40]!r}: use a number from 0 to 1, such as 0.01")
    return ratio


class Tracing(Service):
    """Keeps tracing on while it runs. The first service to start and the last to stop."""

    async def start(self) -> None:
        """Nothing to do: the tracer is made before any service."""

    async def stop(self) -> None:
        """Export the last spans, for at most 5 s."""
        global tracer
        stopped, tracer = tracer, None
        if stopped:
            thread = OwnedThread("last spans", lambda _: stopped.shutdown(), lambda _: None)
            thread.start()
            if not await thread.stop(_FLUSH_SECONDS):
                log.warning("dropped the last spans: the collector did not take them within %g s", _FLUSH_SECONDS)
        await super().stop()


def configure_tracing(environ: Mapping[str, str] = os.environ) -> list[Service]:
    """Turn tracing on if the environment has an endpoint for traces; return the service that ends it.

    Raises:
        EnvironmentProblem: A package is missing, or a variable is not usable.
    """
    global tracer
    if not is_exported("TRACES", environ):
        return []
    settings = _Settings(environ)
    try:
        tracer = Tracer(settings)
    except ValueError as cause:  # the SDK reads other variables itself
        raise EnvironmentProblem(f"OpenTelemetry rejects a variable (OTEL_...): {cause}; correct it") from cause
    return [Tracing("tracing")]
