"""What remains of a request: its span, and its line in the access log.

Source: OpenTelemetry's semantic conventions for HTTP spans. Status 499 is nginx's for a client that left.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from headrace.http.request import HttpRequest
from headrace.runtime.telemetry import tracing
from headrace.runtime.telemetry.tracing import TraceSpan, current_span

_CLIENT_LEFT: Final = 499
_SERVER_ERROR: Final = 500
_PATH_CHARACTERS: Final = 500
_MOST_NAMES: Final = 20

access = logging.getLogger("headrace.access")


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


def end_span(span: TraceSpan, request: HttpRequest, principal: str) -> None:
    """End the span of a request of a caller; an empty name is unknown."""
    status = request.response.status or _CLIENT_LEFT
    attributes: dict[str, str | int | float] = {
        "http.route": request.head.pattern,
        "http.response.status_code": status,
        "headrace.correlation_id": request.correlation_id.decode(),
    }
    if principal:
        attributes["enduser.id"] = principal
    span.set(attributes, f"{request.head.method} {request.head.pattern}")
    if status >= _SERVER_ERROR:
        span.fail(str(status))
    span.end()


def log_access(request: HttpRequest, seconds: float, principal: str) -> None:
    """Write the line of a request."""
    if not access.isEnabledFor(logging.INFO):
        return
    path = request.head.target.decode("latin-1")[:_PATH_CHARACTERS] + _names_of(request.head.query)
    status, milliseconds = request.response.status or _CLIENT_LEFT, round(seconds * 1000, 3)
    fields: dict[str, Any] = {
        "method": request.head.method,
        "route": request.head.pattern,
        "path": path,
        "status": status,
        "bytes": request.response.sent_bytes,
        "milliseconds": milliseconds,
        "address": request.client_address,
        "correlationId": request.correlation_id.decode(),
    }
    traceability = (request.traceability_id or b"").decode()
    for name, value in (("principal", principal), ("traceabilityId", traceability)):
        if value:
            fields[name] = value
    outside = current_span.set(request.span)  # for the line's trace id; outside of a task it is not set
    text = (request.head.method, path, status, request.response.sent_bytes, milliseconds)
    access.info("%s %s %d %d bytes %g ms", *text, extra={"as_json": fields})
    current_span.reset(outside)


def _names_of(query: bytes) -> str:
    """Return a query with its names and without its values; a part without `=` is all value."""
    if not query:
        return ""
    parts = query.decode("latin-1").split("&", _MOST_NAMES)[:_MOST_NAMES]
    shown = [f"{name}=*" if equals else "*" for name, equals, _ in (part.partition("=") for part in parts)]
    return f"?{'&'.join(shown)}"[:_PATH_CHARACTERS]
