"""What remains of a request: its span, and its line in the access log.

Source: OpenTelemetry's semantic conventions for HTTP spans. Status 499 is nginx's for a client that left.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from headrace.runtime.telemetry import tracing
from headrace.runtime.telemetry.tracing import TraceSpan, current_span

_CLIENT_LEFT: Final = 499
_SERVER_ERROR: Final = 500
_PATH_CHARACTERS: Final = 500
_MOST_NAMES: Final = 20

access = logging.getLogger("headrace.access")


class ServedRequest(NamedTuple):
    """A request with a response."""

    scope: Mapping[str, Any]
    """Has `raw_path`, `query_string` and `client`."""
    method: str
    route: str
    """The path of its endpoint, with names in place of parameters; `none` if it has no endpoint."""
    status: int
    """0 if the client left before a response."""
    size_bytes: int
    """Bytes of the response's body."""
    seconds: float
    correlation_id: str
    traceability_id: str
    principal: str


def server_span(method: str, headers: Mapping[bytes, bytes]) -> TraceSpan | None:
    """Start the span of a request; None if it is not sampled."""
    tracer = tracing.tracer
    if tracer is None:
        return None
    carried = tracer.of_request(headers)
    if not (carried or tracer.would_draw()):
        return None  # most requests
    drawn = 0 if carried else tracer.draw(must=True)
    return tracer.start(method, "SERVER", {"http.request.method": method}, parent=carried, trace_id=drawn)


def end_span(span: TraceSpan, served: ServedRequest) -> None:
    """End the span of a request."""
    status = served.status or _CLIENT_LEFT
    attributes: dict[str, str | int | float] = {
        "http.route": served.route,
        "http.response.status_code": status,
        "headrace.correlation_id": served.correlation_id,
    }
    if served.principal:
        attributes["enduser.id"] = served.principal
    span.set(attributes, f"{served.method} {served.route}")
    if status >= _SERVER_ERROR:
        span.fail(str(status))
    span.end()


def log_access(served: ServedRequest, span: TraceSpan | None) -> None:
    """Write the line of a request."""
    if not access.isEnabledFor(logging.INFO):
        return
    scope = served.scope
    raw: bytes = scope.get("raw_path") or b""
    path = raw.partition(b"?")[0].decode("latin-1")[:_PATH_CHARACTERS] + _names_of(scope["query_string"])
    status, milliseconds = served.status or _CLIENT_LEFT, round(served.seconds * 1000, 3)
    client = scope.get("client")
    fields: dict[str, Any] = {
        "method": served.method,
        "route": served.route,
        "path": path,
        "status": status,
        "bytes": served.size_bytes,
        "milliseconds": milliseconds,
        "address": client[0] if client else "",
        "correlationId": served.correlation_id,
    }
    for name, value in (("principal", served.principal), ("traceabilityId", served.traceability_id)):
        if value:
            fields[name] = value
    outside = current_span.set(span)  # for the line's trace id; on the fast path it is not set
    text = (served.method, path, status, served.size_bytes, milliseconds)
    access.info("%s %s %d %d bytes %g ms", *text, extra={"as_json": fields})
    current_span.reset(outside)


def _names_of(query: bytes) -> str:
    """Return a query with its names and without its values; a part without `=` is all value."""
    if not query:
        return ""
    parts = query.decode("latin-1").split("&", _MOST_NAMES)[:_MOST_NAMES]
    shown = [f"{name}=*" if equals else "*" for name, equals, _ in (part.partition("=") for part in parts)]
    return f"?{'&'.join(shown)}"[:_PATH_CHARACTERS]
