"""A request of a client, and its response: what a connection and an endpoint share.

Source: RFC 9112 section 6 (message bodies) and section 7 (chunked transfer coding).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from headrace.errors import HeadraceError
from headrace.http.auth.principals import ANYONE, RequestCaller
from headrace.runtime import clock
from headrace.runtime.telemetry.correlation import new_correlation_id

if TYPE_CHECKING:
    from headrace.runtime.telemetry.tracing import TraceSpan

Headers = Sequence[tuple[bytes, bytes]]
Kind = Literal["requests", "reads"]
"""What a connection sends: reads, which may wait for records, or other requests."""

MAX_HEAD_BYTES: Final = 32_768
UNREAD_SECONDS: Final = 300.0
"""Longest time that the client of a stream may read nothing."""
ALWAYS_OPEN: Final = ("/health/", "/live", "/ready", "/metrics")
"""Paths that are served while draining, and on connections above the limit."""
CORRELATION: Final = b"x-correlation-id"
TRACEABILITY: Final = b"x-traceability-id"
TRACE_PARENT: Final = b"traceparent"
_ID: Final = re.compile(rb"[\x21-\x7e]{1,200}")
_INVALID_NAME: Final = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_INVALID_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_WITHOUT_BODY: Final = (204, 304)
_MOST_UNREAD_BYTES: Final = 65_536
"""Bytes of a body that may wait for the endpoint before the connection reads no more."""


STATUS_LINES: Final = {status: f"HTTP/1.1 {status} \r\n".encode() for status in range(100, 600)} | {
    known.value: f"HTTP/1.1 {known.value} {known.phrase}\r\n".encode() for known in HTTPStatus
}


_PLAIN: Final = STATUS_LINES[200] + b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b"
_CORRELATION_LINE: Final = b"x-correlation-id: %b\r\n"
_TRACEABILITY_LINE: Final = b"x-traceability-id: %b\r\n"


class RequestConnection(Protocol):
    """The connection of requests and of their parser."""

    transport: asyncio.Transport
    flow: Any
    """See `Flow`."""
    shared: Any
    """See `Shared`."""
    peer: Any
    """Address and certificate of the client."""
    requests: Any
    """See `RequestQueue`."""
    kind: Kind | None
    """The limit that it counts for; None until its first request other than health."""
    is_refused: bool
    """Whether no client gets a response any more."""

    def may_send(self, url: bytes) -> bool:
        """Return whether it may send a request to a URL; if not, the connection ends."""

    def refuse(self, error: HeadraceError) -> None:
        """End the connection with an error, after the responses that are due."""

    async def written(self, response: ResponseWriter, patience_seconds: float | None) -> Any:
        """Wait until the operating system has what was sent."""


class WholeResponse(Protocol):
    """A response of known length."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Headers: ...
    @property
    def body(self) -> bytes: ...
    @property
    def is_plain(self) -> bool: ...


class ClientGone(Exception):
    """The client closed its connection before its request was complete."""


class RequestHead:
    """What the head of a request says, and what was found by it. Requests with the same head share it."""

    def __init__(
        self,
        method: str,
        target: bytes,
        path: str,
        query: bytes,
        fields: list[tuple[bytes, bytes]],
        version: str,
        *,
        keep_alive: bool = True,
    ) -> None:
        # As it arrived
        self.method = method
        """In upper case."""
        self.target = target
        """Path as sent, without query."""
        self.path = path
        """Decoded path."""
        self.query = query
        """Query string without `?`."""
        self.fields = fields
        """Headers in order; names are in lower case."""
        self.headers = dict(fields)
        """By name; the last one of a repeated header counts."""
        self.version = version
        """HTTP version: `1.1` or `1.0`."""
        self.keep_alive = keep_alive
        """Whether the client wants the connection to stay open after the response."""
        self.expects_continue = version != "1.0" and self.headers.get(b"expect", b"").lower() == b"100-continue"
        """Whether the client waits for status 100 before it sends the body."""
        self.is_long = False
        """Whether it exceeds its limit although it arrived in one piece."""
        # Found once for all requests with it
        self.correlation_id = self.given_id(CORRELATION)
        self.traceability_id = self.given_id(TRACEABILITY)
        self.trace_parent = self.given_id(TRACE_PARENT)
        self.route: Any = None
        """The `Route`, once the router has found it."""
        self.parsed: Any = None
        """What the `Steps` of its endpoint have read in it."""

    @property
    def pattern(self) -> str:
        """The path of its endpoint, with names in place of parameters; `none` if it has no endpoint."""
        path: str = self.route.endpoint.path if self.route else "none"
        return path

    def given_id(self, name: bytes) -> bytes | None:
        """Return an id that the client sent in a header; None unless it is 1 to 200 visible ASCII characters."""
        value = self.headers.get(name)
        return value if value and _ID.fullmatch(value) else None


class RequestBody(msgspec.Struct, eq=False):
    """The part of a request's body that has arrived and that no endpoint has received; waits for the client."""

    # This connection
    _connection: RequestConnection
    # This request
    _response: ResponseWriter
    expects_continue: bool
    """Whether the client waits for status 100 before it sends the rest."""
    chunks: list[bytes]
    size_bytes: int
    """Of all that has arrived."""
    has_more: bool
    """Whether bytes are still to come."""
    is_direct: bool
    """Whether no task waits for a part: it is served at its end."""
    judge: Callable[[], Awaitable[None]] | None = None
    """Set while credentials are to be judged again; raises if they have ended."""
    _unread_bytes: int = 0

    def arrived(self, data: bytes) -> None:
        """Take a part; if too much waits for the endpoint, the connection reads no more."""
        self.chunks.append(data)
        self.size_bytes += len(data)
        if self.is_direct:
            return
        self._unread_bytes += len(data)
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self._connection.flow.pause_reading()
        self._response.wake()

    async def receive(self) -> bytes:
        """Return the bytes that have arrived; empty only at the end, when `has_more` is false.

        Raises:
            ClientGone: The client closed the connection.
            HeadraceError: The caller's credentials have ended.
        """
        response = self._response
        while not self.chunks and self.has_more and not response.is_disconnected and not response.is_complete:
            await self._wait()
        if response.is_disconnected or (response.is_complete and self.has_more):
            raise ClientGone
        chunks, self.chunks = self.chunks, []
        self._unread_bytes = 0
        self._connection.flow.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def throw_away(self) -> None:
        """Read until the end of the body, or of the connection."""
        try:
            while self.has_more:
                await self.receive()
        except ClientGone:
            return

    async def closed(self) -> None:
        """Wait until the client has closed its connection, or the response is complete.

        Raises:
            HeadraceError: The caller's credentials have ended.
        """
        while not self._response.is_disconnected and not self._response.is_complete:
            self.chunks.clear()
            self._unread_bytes = 0
            await self._wait()

    async def _wait(self) -> None:
        transport = self._connection.transport
        if self.expects_continue and not self._response.status and not transport.is_closing():
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.expects_continue = False
        self._connection.flow.resume_reading()
        await self._response.changed()
        if self.judge:
            await self.judge()


class _Framing:
    """How a client finds the end of a body: by chunks, by Content-Length, or by the end of the connection."""

    def __init__(self, *, is_chunked: bool = False, remaining_bytes: int | None = 0) -> None:
        self._is_chunked = is_chunked
        self._remaining_bytes = remaining_bytes
        """Bytes until Content-Length is reached; None until the connection ends."""

    def has_length(self, size: int) -> bool:
        """Return whether the response announced a body of this size."""
        return not self._is_chunked and self._remaining_bytes == size

    def part(self, data: bytes, *, last: bool) -> bytes:
        """Return a part of the body as it is sent."""
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            return chunk + b"0\r\n\r\n" if last else chunk
        if self._remaining_bytes is not None:
            self._remaining_bytes -= len(data)
            if self._remaining_bytes < 0 or (last and self._remaining_bytes):
                raise RuntimeError("the response's Content-Length does not match its body")
        return data


class ResponseWriter(msgspec.Struct, eq=False):
    """The response to one request: `send` or `respond` write it whole, `start`, `write` and `end` in parts.

    If the client is gone, these do nothing.
    """

    # This connection
    _connection: RequestConnection
    # This request
    head: RequestHead
    # This response
    keep_alive: bool
    """Whether the connection stays open after it."""
    ids: bytes = b""
    """Header lines of every response: the ids of the request, which are valid."""
    status: int = 0
    """0 until it has begun."""
    sent_bytes: int = 0
    """Bytes of its body."""
    is_complete: bool = False
    is_disconnected: bool = False
    """Whether nothing can be sent any more."""
    last_bytes: Callable[[HeadraceError], bytes] | None = None
    """Returns the last bytes of a stream that an error ends."""
    confirm: Callable[[float | None], Awaitable[Any]] | None = None
    """Waits in place of the connection for a request whose client is connected to another process."""
    _framing: _Framing | None = None
    _changed: asyncio.Event | None = None

    def wake(self) -> None:
        """Wake who waits for the client: for the body, for the end of the connection or of this response."""
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.set()

    async def changed(self) -> None:
        """Wait for `wake`, and for the end of this response."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()
        self._changed.clear()

    async def send(self, response: WholeResponse) -> None:
        await self._drained()
        self.respond(response)

    async def start(self, status: int, headers: Headers) -> None:
        """Begin a response, whose length may be unknown.

        Raises:
            ValueError: A header is not valid.
        """
        await self._drained()
        self._start(status, headers)

    def _start(self, status: int, headers: Headers, body: bytes = b"") -> None:
        head = b"" if self.is_disconnected else self._encode_head(status, headers)
        self.status = status
        if not self.is_disconnected:
            self._connection.transport.write(head + body)

    async def write(self, data: bytes) -> None:
        """Send a part of the response's body; wait while the client does not read."""
        await self._drained()
        self._write(data, last=False)

    async def end(self, data: bytes = b"") -> None:
        """Send the last part of the response's body."""
        await self._drained()
        self._write(data, last=True)

    def respond(self, response: WholeResponse) -> None:
        """Send a whole response without waiting.

        Raises:
            ValueError: A header is not valid.
        """
        body = response.body
        self.sent_bytes += len(body)
        if response.is_plain and self.keep_alive and self.head.method != "HEAD":
            self.status = 200
            if not self.is_disconnected:
                connection = self._connection
                connection.transport.write(_PLAIN % (connection.shared.date, len(body), self.ids, body))
                self._completed()
            return
        self._start(response.status, response.headers, body if self.head.method != "HEAD" else b"")
        if self.is_disconnected:
            return
        if not (self._framing and self._framing.has_length(len(body))):
            raise ValueError("the response's Content-Length does not match its body")
        self._completed()

    async def _drained(self) -> None:
        flow = self._connection.flow
        if flow.write_paused and not self.is_disconnected:
            await flow.drain()

    def _write(self, data: bytes, *, last: bool) -> None:
        self.sent_bytes += len(data)
        if self.is_disconnected:
            return
        if self.is_complete:
            raise RuntimeError("the response is complete already")
        if self._framing is None:
            raise RuntimeError("the response has not begun")
        if self.head.method != "HEAD":
            self._connection.transport.write(self._framing.part(data, last=last))
        if last:
            self._completed()

    def _completed(self) -> None:
        self.is_complete = True
        if self._changed:
            self._changed.set()
        if not self.keep_alive:
            self._connection.transport.close()
        self._connection.requests.response_complete()

    def _encode_head(self, status: int, headers: Headers) -> bytes:
        lines = [STATUS_LINES[status], self._connection.shared.date]
        length = None
        closes = False
        for name, value in headers:
            if _INVALID_NAME.search(name) or _INVALID_VALUE.search(value):
                raise ValueError(f"the response's header {name[:60]!r} is not valid")
            name = name.lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
                closes = True
            lines.append(b"%b: %b\r\n" % (name, value))
        lines.append(self.ids)
        self._framing = _Framing(remaining_bytes=length or 0)
        if length is None and status not in _WITHOUT_BODY:
            if self.head.version == "1.0":  # the end of the connection is the end of the body
                self.keep_alive = False
                self._framing = _Framing(remaining_bytes=None)
            elif self.head.method != "HEAD":
                self._framing = _Framing(is_chunked=True)
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    async def write_through(self, data: bytes, patience_seconds: float | None = None) -> Any:
        """Send a part of the body, and wait until the operating system has it; None if the connection ended before.

        For `patience_seconds` the client may read nothing; by default as long as a request may take.
        """
        await self.write(data)
        if self.confirm:
            return await self.confirm(patience_seconds)
        return await self._connection.written(self, patience_seconds)


class HttpRequest(msgspec.Struct, eq=False):
    """One request of a client: its head, its body, its response, and what is known of it while it is served."""

    # This connection
    connection: RequestConnection
    # This request
    head: RequestHead
    response: ResponseWriter
    body: RequestBody
    started_at: float
    is_streaming: bool = False
    """Set by an endpoint whose clients may send and read slowly."""
    # While it is served
    caller: RequestCaller = ANYONE
    correlation_id: bytes = b""
    """The id of the client if it is valid, else a new one."""
    traceability_id: bytes | None = None
    span: TraceSpan | None = None
    """The span of the request, if it is traced."""
    is_entered: bool = False
    """Whether it counts as in progress, so that a drain waits for it."""

    @staticmethod
    def of(connection: RequestConnection, head: RequestHead, whole: bytes | None = None) -> HttpRequest:
        """Take a complete head from the connection that received it, and the whole body if it has arrived with it."""
        response = ResponseWriter(connection, head, head.keep_alive)
        if whole is None:
            body = RequestBody(connection, response, head.expects_continue, [], 0, True, False)
        else:
            body = RequestBody(connection, response, head.expects_continue, [whole], len(whole), False, True)
        return HttpRequest(connection, head, response, body, clock.perf_counter())

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        scheme: str = self.connection.shared.scheme
        return scheme

    @property
    def client_address(self) -> str:
        """IP address of the client; empty if unknown."""
        address: tuple[str, int] | None = self.connection.peer.address
        return address[0] if address else ""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The client's certificate."""
        certificate: Mapping[str, Any] | None = self.connection.peer.certificate
        return certificate

    def identify(self) -> None:
        """Give it its ids, which its response returns: those of the client if they are valid."""
        self.correlation_id = self.head.correlation_id or new_correlation_id()
        self.traceability_id = traceability_id = self.head.traceability_id
        ids = _CORRELATION_LINE % self.correlation_id
        self.response.ids = ids if traceability_id is None else ids + _TRACEABILITY_LINE % traceability_id

    def abandon(self) -> None:
        """Send no later response, and wake who waits for the client."""
        self.response.is_disconnected = True
        self.response.wake()
