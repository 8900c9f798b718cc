"""Requests for the administration of a backend, `X-Adm-PassThrough` of light-4j.

The backend is one of `admin.pass_through`; neither the caller's credentials nor any other of its headers are sent on.
"""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from headrace.config.registrations import refused_address
from headrace.errors import DestinationRefused, InvalidRequest
from headrace.http.endpoint import JSON, Call, CallEvent
from headrace.http.messages import HttpResponse
from headrace.http.request import HttpRequest
from headrace.runtime.telemetry.correlation import correlation_id

HEADER: Final = "X-Adm-PassThrough"
_PASSED_ON: Final = ("/adm/server/info", "/adm/logger", "/adm/logger/content", "/adm/modules")
_SECONDS: Final = 10.0
_MAX_BYTES: Final = 1_048_576
_SHOWN: Final = 100


class _Response(Protocol):
    @property
    def status(self) -> int: ...
    @property
    def body(self) -> bytes: ...


class _Client(Protocol):
    def get(self, path: str) -> Awaitable[_Response]: ...
    def post(self, body: bytes, lines: bytes = b"") -> Awaitable[_Response]: ...
    def close(self) -> None: ...


class PassThrough:
    """Sends requests on to the administration of the allowed backends."""

    def __init__(self, allowed: Sequence[str], client_of: Callable[..., _Client]) -> None:
        """Prepare; nothing is contacted.

        Args:
            allowed: Base URLs of backends.
            client_of: Makes a client of a URL, which follows no redirect.
        """
        self._allowed = [url.rstrip("/") for url in allowed]
        self._client_of = client_of

    async def answer(self, call: Call[Any, Any]) -> HttpResponse | None:
        """Return the response of the backend that a request asks for; None if it asks for none.

        Raises:
            InvalidRequest: The settings allow no such backend, or the request is for this process alone.
            DestinationUnavailable: It did not respond completely, within the limits of time and size.
            DestinationRefused: It responded with an error, a redirect, or something other than JSON.
        """
        request = call.request
        if request.head.path not in _PASSED_ON:
            self.refuse(call)
        base = self._requested(call)
        if not base:
            return None
        url, query = base + request.head.path, request.head.query.decode("latin-1")
        call.event = CallEvent(base, detail=f"passed through: {request.head.method} {request.head.path}")
        client = self._client_of(
            f"{url}?{query}" if query else url,
            timeout_seconds=_SECONDS,
            max_response_bytes=_MAX_BYTES,
            headers={"X-Correlation-Id": correlation_id.get()},
            forbidden=functools.partial(refused_address, base),
        )
        try:
            if request.head.method == "POST":
                response = await client.post(call.body, f"Content-Type: {JSON}\r\n".encode())
            else:
                path = urlsplit(url).path
                response = await client.get(f"{path}?{query}" if query else path)
        finally:
            client.close()
        return HttpResponse(_content(url, response), 200, JSON.encode())

    def refuse(self, call: Call[Any, Any]) -> None:
        """Raise InvalidRequest if a request for this process alone asks for a backend."""
        if _value(call.request):
            raise InvalidRequest(f"{HEADER} is not supported here: send the request to the backend itself")

    def _requested(self, call: Call[Any, Any]) -> str:
        value = _value(call.request)
        if not value:
            return ""
        if not self._allowed:
            raise InvalidRequest(f"{HEADER} is off: list the backend in admin.pass_through, or ask the backend itself")
        requested = self._allowed[0] if value.lower() == "true" else value.rstrip("/")
        if requested not in self._allowed:
            raise InvalidRequest(f"{HEADER} names {value[:_SHOWN]!r}, which admin.pass_through does not list")
        return requested


def _value(request: HttpRequest) -> str:
    text = request.head.headers.get(HEADER.lower().encode(), b"").strip().decode("latin-1")
    return "" if text.lower() == "false" else text


def _content(url: str, response: _Response) -> bytes:
    """Return the JSON of a response."""
    if not 200 <= response.status < 300:
        raise DestinationRefused(f"{url} responds with HTTP {response.status}")
    content = response.body or b"null"
    try:
        msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise DestinationRefused(f"{url} responds with something other than JSON") from cause
    return content
