"""Requests in the worker: the event of a request, and the response from the handler's result."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

from headrace.errors import DecodeError
from headrace.formats.plain import JsonCodec
from headrace.functions import protocol
from headrace.functions.sdk import Event, EventSource
from headrace.functions.worker.handler import Responses, check_is_data, parts_of, text_of, to_json

_JSON = "application/json"
_OWN_HEADERS = ("content-type", "content-length", "transfer-encoding", "connection")
"""Headers that a handler cannot set."""
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


class RequestResponses(Responses):
    """Turns what a handler returns into the response to a request, by Nuclio's rules."""

    nothing = object()  # None is a response too

    def result_of(self, response: Any) -> protocol.Result:
        """Return the result of a request; raise `ValueError` for a response that HTTP does not allow."""
        response = response[0] if type(response) is list and response else response
        is_response, (status, body, headers) = hasattr(response, "status_code"), parts_of(response)
        check_is_data(body)
        is_json = isinstance(body, dict) or not (is_response or isinstance(body, str) or body is response)
        kind = _JSON if is_json else (is_response and response.content_type) or "text/plain"
        data = b"" if is_json else body if isinstance(body, bytes) else text_of(body).encode()
        if is_json:
            data = to_json(repr(body) if isinstance(body, bytes) else body)
        if not (isinstance(status, int) and 200 <= status <= 599):
            raise ValueError(f"the handler returned status {status!r}: return a number from 200 to 599")
        own = [(str(name).lower(), value or b"") for name, value in headers]
        sent = [("content-type", str(kind).encode()), *(each for each in own if each[0] not in _OWN_HEADERS)]
        if wrong := [name for name, value in sent if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value))]:
            raise ValueError(f"the handler returned header {wrong[0]!r}, whose name or value HTTP does not allow")
        output = protocol.Output(data, [(":status", b"%d" % status), *sent])
        return protocol.Result([output], error=f"status {status}" if status >= 400 else "")

    def complete(
        self, event: Event, *, decode: Callable[[Event], protocol.Result | None] | None, typed: bool
    ) -> protocol.Result | None:
        """Make the event of a record that of a request, and decode it; without `typed` JSON is decoded here."""
        from urllib.parse import parse_qsl, unquote  # here, so that functions without requests start without it

        pairs: Any = event._headers or ()
        body = event.body or b""
        (_, method), (_, target), *rest = [(name.title(), (value or b"").decode("latin-1")) for name, value in pairs]
        headers: dict[str, Any] = dict(rest)
        (path, _, query), kind = target.partition("?"), headers.get("Content-Type", "")
        event.body = body
        event.size = len(body)
        event._headers = headers
        event._origin = EventSource(trigger=event.trigger)
        event.method, event.url, event.content_type = method, target, kind
        event.path, event.fields = unquote(path), dict(parse_qsl(query, keep_blank_values=True))
        event.id = (event.key or b"").decode()
        event.key = None
        if kind == _JSON and not typed:
            with contextlib.suppress(DecodeError):
                event.body = JsonCodec.decode_python(body)
        return decode(event) if decode else None
