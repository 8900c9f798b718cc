"""Reads requests and writes responses."""

import asyncio
import contextlib
import re
from collections.abc import Iterable
from typing import Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from headrace import errors
from headrace.config.http import BODY_LIMIT, HttpConfig
from headrace.config.spelling import hint
from headrace.http.request import Headers, HttpRequest
from headrace.runtime.telemetry.correlation import new_correlation_id

T = TypeVar("T")

JSON: Final = b"application/json"
_UNKNOWN_FIELD: Final = re.compile("contains unknown field `(.*?)`")
_TOO_LONG: Final = "`array` of length <="
_CAUSE_CHARACTERS: Final = 200
_LINGER_SECONDS: Final = 1.0
_NO_CONTENT: Final = (204, 304)


def unknown_name(what: str, name: str, known: Iterable[str]) -> errors.InvalidRequest:
    """Return the error for an unknown name, with the nearest known one."""
    return errors.InvalidRequest(f"{what} {name[:60]!r} is not known: {hint(name, sorted(known))}")


async def read_json(request: HttpRequest, settings: HttpConfig) -> bytes:
    """Return the body of a request that must be JSON.

    Raises:
        ContentTypeMismatch: There is a body and its Content-Type is not JSON.
        EncodingRefused, PayloadTooLarge, ClientGone: See `read_body`.
    """
    body = await read_body(request, settings)
    if body and media_type(request.head.headers) != JSON:
        kind = request.head.headers.get(b"content-type")
        named = f"is {kind[:60].decode('latin-1')!r}" if kind else "is missing"
        raise errors.ContentTypeMismatch(f"Content-Type {named}: send JSON with Content-Type application/json")
    return body


def decode_body(body: bytes, kind: type[T], *, strict: bool = True) -> T:
    """Return a JSON body as a type that forbids unknown fields. An empty body counts as `{}`.

    Unless `strict`, numbers and booleans may be text, and an integer may be a float without a fraction.

    Raises:
        InvalidRequest: It does not match; the error suggests the nearest name for an unknown one.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind, strict=strict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise _mismatch("the body", kind, cause) from cause


def query_of(request: HttpRequest) -> dict[str, str]:
    """Return the query parameters of a request. The last one of a repeated name counts."""
    return dict(parse_qsl(request.head.query.decode("latin-1"), keep_blank_values=True))


def decode_query(request: HttpRequest, kind: type[T]) -> T:
    """Return the query of a request as a type.

    Raises:
        InvalidRequest: It does not match; the error suggests the nearest name for an unknown one.
    """
    try:
        return msgspec.convert(query_of(request), kind, strict=False)
    except msgspec.ValidationError as cause:
        raise _mismatch("the query", kind, cause) from cause


def _mismatch(what: str, kind: type, cause: Exception) -> errors.InvalidRequest:
    text = str(cause)[:_CAUSE_CHARACTERS]  # it may quote the body
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    advice = ": send fewer in one request" if _TOO_LONG in text else ""
    if unknown := _UNKNOWN_FIELD.search(text):
        advice = f": {hint(unknown[1], names)}"
    return errors.InvalidRequest(f"{what} is not valid for this endpoint: {text}{advice}")


def media_type(headers: dict[bytes, bytes]) -> bytes:
    """Return the media type of a body, in lower case and without parameters; empty if there is none."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


async def read_body(request: HttpRequest, settings: HttpConfig) -> bytes:
    """Return a request's whole body.

    Raises:
        EncodingRefused: It is compressed.
        PayloadTooLarge: It is larger than the limit. The rest was not read.
        ClientGone: The client closed the connection.
    """
    encoding = request.head.headers.get(b"content-encoding", b"identity")
    if encoding != b"identity":
        raise encoding_refused(encoding, "compressed bodies are not supported")
    return await read_encoded_body(request, settings)


def encoding_refused(encoding: bytes, why: str) -> errors.EncodingRefused:
    """Return the error for a compressed body."""
    return errors.EncodingRefused(
        f"Content-Encoding is {encoding[:40].decode('latin-1')!r}, and {why}: send the body uncompressed"
    )


async def read_encoded_body(request: HttpRequest, settings: HttpConfig) -> bytes:
    """Return a request's whole body as it is, also if it is compressed.

    Raises:
        PayloadTooLarge, ClientGone: See `read_body`.
    """
    limit_bytes = settings.max_body_bytes
    announced = request.head.headers.get(b"content-length")
    if announced and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        chunk = await request.body.receive()
        size += len(chunk)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        chunks.append(chunk)
        if not request.body.has_more:
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit_bytes: int) -> errors.PayloadTooLarge:
    return errors.PayloadTooLarge(
        f"the body is larger than {limit_bytes} bytes: send less in one request, or raise {BODY_LIMIT}",
        limit_bytes=limit_bytes,
    )


class HttpResponse:
    """A whole response. Bytes are sent unchanged, other bodies as JSON; status 204 and 304 have no content."""

    def __init__(self, body: object, status: int = 200, content_type: bytes = JSON, headers: Headers = ()) -> None:
        self.status = status
        self.body = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self.is_plain = status == 200 and not headers and content_type is JSON
        """Whether it is successful JSON without other headers, as most are."""
        self._content_type = content_type
        self._more = headers

    @property
    def headers(self) -> Headers:
        """All headers; an empty content type is left out."""
        kind = self._content_type
        if kind.startswith(b"text/") and b"charset" not in kind:
            kind += b"; charset=utf-8"
        content = [(b"content-type", kind)] if kind else []
        content.append((b"content-length", b"%d" % len(self.body)))
        return [*(content if self.status not in _NO_CONTENT else ()), *self._more]


def error_response(error: errors.HeadraceError) -> HttpResponse:
    """Return the error body."""
    headers: list[tuple[bytes, bytes]] = list(retry_after(error.retry_after_seconds))
    if allow := error.parameters.get("allow"):
        headers.append((b"allow", allow.encode()))
    if isinstance(error, errors.Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if error.ends_connection:
        headers.append((b"connection", b"close"))
    return HttpResponse(error.body(), error.status, headers=headers)


def last_response(error: errors.HeadraceError) -> bytes:
    """Return the bytes of a response without a request, which ends its connection."""
    body = msgspec.json.encode(error.body())
    head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    head += "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in retry_after(error.retry_after_seconds))
    head += f"connection: close\r\nx-correlation-id: {new_correlation_id().decode()}\r\n\r\n"
    return head.encode() + body


async def respond_error(request: HttpRequest, error: errors.HeadraceError) -> None:
    """Send the error body. If the request was not read completely, the connection ends after it."""
    response = error_response(error)
    if not (isinstance(error, errors.PayloadTooLarge) and error.ends_connection):
        await request.response.send(response)
        return
    await request.response.start(response.status, response.headers)
    await request.response.write(response.body)
    # Closing with unread bytes resets the connection, and the client may lose the response. So first discard the bytes
    # that arrive within a second.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(request.body.throw_away(), _LINGER_SECONDS)
    await request.response.end()


def retry_after(seconds: int | None) -> Headers:
    """Return the header Retry-After; no header for None."""
    return () if seconds is None else ((b"retry-after", str(seconds).encode()),)
