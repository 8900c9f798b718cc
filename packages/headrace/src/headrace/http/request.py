"""A request of a client, and its response: what a connection and an endpoint share.

Source: RFC 9112 section 6 (message bodies) and section 7 (chunked transfer coding).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.http.auth import Principal
    from headrace.runtime.telemetry.tracing import TraceSpan

Headers = Sequence[tuple[bytes, bytes]]

MAX_HEAD_BYTES: Final = 32_768
UNREAD_SECONDS: Final = 300.0
"""Longest time that the client of a stream may read nothing."""
ALWAYS_OPEN: Final = ("/health/", "/live", "/ready", "/metrics")
"""Paths that are served while draining, and on connections above the limit."""
_INVALID_NAME: Final = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_INVALID_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_WITHOUT_BODY: Final = (204, 304)
_NO_PARAMETERS: Final[Mapping[str, str]] = {}


STATUS_LINES: Final = {status: f"HTTP/1.1 {status} \r\n".encode() for status in range(100, 600)} | {
    known.value: f"HTTP/1.1 {known.value} {known.phrase}\r\n".encode() for known in HTTPStatus
}


_PLAIN: Final = STATUS_LINES[200] + b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n"
_CORRELATION_LINE: Final = b"x-correlation-id: %b\r\n"
_TRACEABILITY_LINE: Final = b"x-traceability-id: %b\r\n"


class RequestConnection(Protocol):
    """The connection of a request."""

    transport: asyncio.Transport
    flow: Any
    """See `Flow`."""
    shared: Any
    """See `Shared`."""
    client: tuple[str, int] | None
    certificate: Mapping[str, Any] | None

    def response_complete(self) -> None:
        """Serve the next request, or wait for one."""

    async def written(self, request: HttpRequest, patience_seconds: float | None) -> Any:
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


class HttpRequest:
    """One request of a client, and its response.

    An endpoint reads the body with `receive`. It responds with `send`, or with `start`, `write` and `end`. If the
    client is gone, these do nothing.
    """

    path = ""
    """Decoded path."""
    steps: Any = None
    """The `Steps` of its endpoint, if its head is a usual one."""
    of_head: Any = None
    """What these found in the head; the same for a request with the same head."""
    parameters: Mapping[str, str] = _NO_PARAMETERS
    """Path parameters, set by the router."""
    endpoint: Any = None
    """The `Endpoint`, set by the router."""
    principal: Principal | None = None
    """The caller; None without authentication, and for unknown callers of open endpoints."""
    is_anonymous = False
    """Whether authentication is on, and the caller of an open endpoint did not prove its identity."""
    is_counted = False
    """Whether it counts for the rate of its caller already."""
    is_entered = False
    """Whether it counts as in progress, so that a drain waits for it."""
    is_in_flight = False
    """Whether it counts for the requests in flight of its caller."""
    forwarded: Any = None
    """Set if another process forwarded the request."""
    correlation_id = b""
    """The id of the client if it is valid, else a new one."""
    traceability_id: bytes | None = None
    span: TraceSpan | None = None
    """The span of the request, if it is traced."""
    is_streaming = False
    """Set by an endpoint whose clients may send and read slowly."""
    has_long_head = False
    """Whether the head exceeds its limit although it arrived in one piece."""
    is_direct = False
    """Whether its response needs no task: it needs only its body, or what it needs is loaded."""
    last_bytes: Callable[[HeadraceError], bytes] | None = None
    """Returns the last bytes of a stream that an error ends."""
    judge: Callable[[], Awaitable[None]] | None = None
    """Set while credentials are to be judged again; raises if they have ended."""
    confirm: Callable[[float | None], Awaitable[Any]] | None = None
    """Replaces `written` for a request whose client is connected to another process."""
    has_more = True
    """Whether bytes of the body are still to come."""
    expects_continue = False
    """Whether the client waits for status 100 before it sends the body."""
    keep_alive = True
    """Whether the connection stays open after the response."""
    is_disconnected = False
    """Whether no response can be sent any more."""
    is_complete = False
    """Whether the response is complete."""
    unread_bytes = 0
    """Number of bytes in `chunks`; a request that needs no task does not count them."""
    status = 0
    """Of the response; 0 until it has begun."""
    sent_bytes = 0
    """Bytes of the response's body."""
    _is_chunked = False
    _remaining_bytes: int | None = 0
    """Bytes to send until Content-Length is reached; None until the connection ends."""
    _changed: asyncio.Event | None = None

    def __init__(
        self,
        connection: RequestConnection,
        method: str,
        target: bytes,
        query: bytes,
        fields: list[tuple[bytes, bytes]],
        version: str,
        headers: dict[bytes, bytes] | None = None,
    ) -> None:
        """Take a complete head.

        Args:
            connection: The connection that received it.
            method: In upper case.
            target: Path as sent, without query.
            query: Query string without `?`.
            fields: Headers in order; names are in lower case.
            version: HTTP version: `1.1` or `1.0`.
            headers: The same by name, if they are known already.
        """
        self.connection = connection
        self.method = method
        self.target = target
        self.query = query
        self.fields = fields
        self.version = version
        self.headers = dict(fields) if headers is None else headers
        """By name; the last one of a repeated header counts."""
        self.chunks: list[bytes] = []
        """Bytes of the body that no endpoint has received."""
        self.started_at = time.perf_counter()

    def again(self) -> HttpRequest:
        """Return the next request with the same head, which says the same."""
        request = HttpRequest(
            self.connection, self.method, self.target, self.query, self.fields, self.version, self.headers
        )
        request.path, request.endpoint, request.parameters = self.path, self.endpoint, self.parameters
        request.steps, request.of_head = self.steps, self.of_head
        return request

    @property
    def route(self) -> str:
        """The path of its endpoint, with names in place of parameters; `none` if it has no endpoint."""
        path: str = self.endpoint.path if self.endpoint else "none"
        return path

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        scheme: str = self.connection.shared.scheme
        return scheme

    @property
    def client_address(self) -> str:
        """IP address of the client; empty if unknown."""
        return self.connection.client[0] if self.connection.client else ""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The client's certificate."""
        return self.connection.certificate

    # The body

    async def receive(self) -> bytes:
        """Return the bytes of the body that have arrived; empty only at its end, when `has_more` is false.

        Raises:
            ClientGone: The client closed the connection.
            HeadraceError: The caller's credentials have ended.
        """
        while not self.chunks and self.has_more and not self.is_disconnected and not self.is_complete:
            await self._wait()
        if self.is_disconnected or (self.is_complete and self.has_more):
            raise ClientGone
        chunks, self.chunks = self.chunks, []
        self.unread_bytes = 0
        self.connection.flow.resume_reading()
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
        while not self.is_disconnected and not self.is_complete:
            self.chunks.clear()
            self.unread_bytes = 0
            await self._wait()

    async def _wait(self) -> None:
        if self.expects_continue and not self.connection.transport.is_closing():
            self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.expects_continue = False
        self.connection.flow.resume_reading()
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()
        self._changed.clear()
        if self.judge:
            await self.judge()

    def abandon(self) -> None:
        """Send no later response, and wake who waits for the client."""
        self.is_disconnected = True
        self.wake()

    def wake(self) -> None:
        """Wake who waits for the body or for the end of the connection."""
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.set()

    # The response

    async def send(self, response: WholeResponse) -> None:
        """Send a whole response."""
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
        head = b"" if self.is_disconnected else self._head(status, headers)
        self.status = status
        if self.is_disconnected:
            return
        self.expects_continue = False
        self.connection.transport.write(head + body)

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
        if response.is_plain and self.keep_alive and self.method != "HEAD":
            self.status = 200
            if not self.is_disconnected:
                head = _PLAIN % (self.connection.shared.date, len(body), self._id_lines())
                self.connection.transport.write(head + body)
                self._completed()
            return
        self._start(response.status, response.headers, body if self.method != "HEAD" else b"")
        if self.is_disconnected:
            return
        if self._is_chunked or self._remaining_bytes != len(body):
            raise ValueError("the response's Content-Length does not match its body")
        self._completed()

    async def _drained(self) -> None:
        connection = self.connection
        if connection.flow.write_paused and not self.is_disconnected:
            await connection.flow.drain()

    def _write(self, data: bytes, *, last: bool) -> None:
        self.sent_bytes += len(data)
        if self.is_disconnected:
            return
        if self.is_complete:
            raise RuntimeError("the response is complete already")
        transport = self.connection.transport
        if self.method == "HEAD":
            pass
        elif self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            transport.write(chunk + b"0\r\n\r\n" if last else chunk)
        else:
            if self._remaining_bytes is not None:
                self._remaining_bytes -= len(data)
                if self._remaining_bytes < 0 or (last and self._remaining_bytes):
                    raise RuntimeError("the response's Content-Length does not match its body")
            transport.write(data)
        if last:
            self._completed()

    def _completed(self) -> None:
        self.is_complete = True
        if self._changed:
            self._changed.set()
        if not self.keep_alive:
            self.connection.transport.close()
        self.connection.response_complete()

    def _head(self, status: int, headers: Headers) -> bytes:
        lines = [STATUS_LINES[status], self.connection.shared.date]
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
        lines.append(self._id_lines())
        if length is None and status not in _WITHOUT_BODY:
            if self.version == "1.0":  # the end of the connection is the end of the body
                self.keep_alive = False
                self._remaining_bytes = None
            elif self.method != "HEAD":
                self._is_chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        if length is not None:
            self._remaining_bytes = length
        lines.append(b"\r\n")
        return b"".join(lines)

    def _id_lines(self) -> bytes:
        """Return the headers of every response: the ids, which are valid."""
        lines = _CORRELATION_LINE % self.correlation_id if self.correlation_id else b""
        return lines if self.traceability_id is None else lines + _TRACEABILITY_LINE % self.traceability_id

    async def written(self, patience_seconds: float | None = None) -> Any:
        """Wait until the operating system has everything that was sent; None if the connection ended before.

        Args:
            patience_seconds: Longest time that the client may read nothing; by default that of a request.
        """
        if self.confirm:
            return await self.confirm(patience_seconds)
        return await self.connection.written(self, patience_seconds)
