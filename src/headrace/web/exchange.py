"""Reading requests and writing answers on the bare ASGI interface.

Source: ASGI specification 3.0, HTTP connection scope.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.config.http import HttpConfig
from headrace.errors import (
    AmbiguousRequest,
    ContentTypeMismatch,
    Draining,
    EncodingRefused,
    HeadersTooLarge,
    HeadraceError,
    InvalidRequest,
    PayloadTooLarge,
    ServerBusy,
    TransferCodingUnknown,
    Unauthenticated,
)

JSON: Final = b"application/json"
Headers = Sequence[tuple[bytes, bytes]]
_JSON: Final = (b"content-type", JSON)
_LINGER_SECONDS: Final = 1.0
_ENDS_CONNECTION: Final = (
    AmbiguousRequest,
    Draining,
    HeadersTooLarge,
    PayloadTooLarge,
    ServerBusy,
    TransferCodingUnknown,
)


def unknown_name(what: str, name: str, known: Iterable[str]) -> InvalidRequest:
    """Return the error for a name that is not one of ours, with the nearest that is."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"known here are {', '.join(known)}"
    return InvalidRequest(f"{what} {name[:60]!r} is not known: {hint}")


class ClientGone(Exception):
    """The client closed its connection before its request was complete; nobody is left to be answered."""


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return the request's headers by lower-case name; of a repeated one the last."""
    return dict(scope["headers"])


async def read_json(receive: Receive, headers: dict[bytes, bytes], settings: HttpConfig) -> bytes:
    """Return the body of a request that must be JSON.

    Raises:
        ContentTypeMismatch: There is a body, and Content-Type does not say JSON.
        EncodingRefused, PayloadTooLarge, ClientGone: As `read_body`.
    """
    body = await read_body(receive, headers, settings)
    if body and media_type(headers) != JSON:
        kind = headers.get(b"content-type")
        named = f"is {kind[:60].decode('latin-1')!r}" if kind else "is missing"
        raise ContentTypeMismatch(f"Content-Type {named}: send JSON with Content-Type application/json")
    return body


def media_type(headers: dict[bytes, bytes]) -> bytes:
    """Return what the request says its body is, in lower case and without parameters; empty if it says nothing."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


async def read_body(receive: Receive, headers: dict[bytes, bytes], settings: HttpConfig) -> bytes:
    """Return a request's whole body, unpacked.

    Raises:
        EncodingRefused: It is compressed, and that is not taken.
        PayloadTooLarge: It is larger than the limit; the rest was not read.
        ClientGone: The client went away.
    """
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding == b"identity":
        return await _read_body(receive, headers, settings.max_body_bytes)
    if encoding.lower() != b"gzip" or not settings.gzip_requests:
        raise encoding_refused(encoding, "gzip is taken" if settings.gzip_requests else "http.gzip_requests is off")
    return _unpacked(await _read_body(receive, headers, settings.max_body_bytes), settings.max_body_bytes)


def encoding_refused(encoding: bytes, why: str) -> EncodingRefused:
    """Return the error for a body that is compressed."""
    return EncodingRefused(
        f"Content-Encoding is {encoding[:40].decode('latin-1')!r}, and {why}: send the body as it is"
    )


def _unpacked(packed: bytes, limit_bytes: int) -> bytes:
    unpacking = zlib.decompressobj(16 + zlib.MAX_WBITS)  # 16: gzip and nothing else
    try:
        body = unpacking.decompress(packed, limit_bytes + 1)
    except zlib.error as cause:
        raise InvalidRequest(f"the body is no gzip, as Content-Encoding says: {cause}") from cause
    if len(body) > limit_bytes:
        raise _too_large(limit_bytes)
    if not unpacking.eof or unpacking.unused_data:
        raise InvalidRequest("the body is cut off, or there is more behind its gzip")
    return body


async def _read_body(receive: Receive, headers: dict[bytes, bytes], limit_bytes: int) -> bytes:
    announced = headers.get(b"content-length")
    if announced and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        chunk: bytes = message["body"]
        size += len(chunk)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        chunks.append(chunk)
        if not message["more_body"]:
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body is larger than {limit_bytes} bytes: send the records in several requests, "
        "or raise http.max_body_bytes",
        limit_bytes=limit_bytes,
    )


async def answer_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """Send a whole answer whose body is JSON text."""
    await send({"type": "http.response.start", "status": status, "headers": _start(body, headers)})
    await send({"type": "http.response.body", "body": body})


async def answer_error(receive: Receive, send: Send, error: HeadraceError) -> None:
    """Send the one error body; where the request was not read or nothing more is taken, the connection ends with it."""
    headers: list[tuple[bytes, bytes]] = list(retry_after(error.retry_after_seconds))
    if allow := error.parameters.get("allow"):
        headers.append((b"allow", allow.encode()))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, _ENDS_CONNECTION):
        headers.append((b"connection", b"close"))
    body = msgspec.json.encode(error.body())
    if not isinstance(error, PayloadTooLarge):
        await answer_json(send, error.status, body, headers)
        return
    await send({"type": "http.response.start", "status": error.status, "headers": _start(body, headers)})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    # Closing on bytes that were not read resets the connection, and the client may lose the answer. So what comes
    # within a second is thrown away first.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(throw_away(receive), _LINGER_SECONDS)
    await send({"type": "http.response.body", "body": b""})


def retry_after(seconds: int | None) -> Headers:
    """Return the header that says when to come again, if there is such a time."""
    return () if seconds is None else ((b"retry-after", str(seconds).encode()),)


def _start(body: bytes, headers: Headers) -> Headers:
    return [_JSON, (b"content-length", str(len(body)).encode()), *headers]


async def throw_away(receive: Receive) -> None:
    """Read until the end of the request, or of the connection."""
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message["more_body"]:
            return
