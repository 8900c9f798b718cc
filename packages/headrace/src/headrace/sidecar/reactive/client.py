"""A client of one backend: one deadline per request, redirects are never followed, nothing is decompressed.

Source: RFC 9110, RFC 9112.
"""

import asyncio
import functools
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from headrace.config.backend import FRAMING, HEADER_NAME, BackendConfig, connection_problem, forbidden_address
from headrace.errors import DestinationUnavailable
from headrace.records import TopicPartition
from headrace.runtime import Clock
from headrace.sidecar.reactive.backend_connection import MAX_HEAD_BYTES, BackendResponse, Broken, Connection
from headrace.sidecar.reactive.token import Token, token_headers

log = logging.getLogger(__name__)

_NAMES: Final = 1000
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F)))
MAX_RESPONSE_BYTES: Final = 1_048_576
"""Largest response that is read if it echoes no records."""
_IDLE_SECONDS: Final = 30.0
_REST_SECONDS: Final = 0.008
"""A connection is used again after one to two times this: a second response to the same request arrives before."""
_MOST_RESTING: Final = 100
"""With more, the one that has rested longest is used: a server must not get connections without bound."""
_LONG_REST_SECONDS: Final = 0.1
"""The same for a server that has sent a second response within the last `_REPEAT_MEMORY_SECONDS`."""
_REPEAT_MEMORY_SECONDS: Final = 60.0
_FEW: Final = 8
"""Requests in flight up to which each is sent at once."""


class ConnectionPool:
    """Opens connections when they are needed, and keeps those that are fit for another request."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        *,
        max_response_bytes: int,
        forbidden: Callable[[str], str],
        unavailable: Callable[[Broken], DestinationUnavailable],
    ) -> None:
        """Prepare; no connection is opened.

        Args:
            host, port: The server.
            tls: Context of its connections; plain text when None.
            max_response_bytes: Largest body of a response.
            forbidden: Returns why an IP address must not be connected to, or nothing; called before every connection.
            unavailable: Makes the error of a request without a response.
        """
        self._address = host, port
        self._tls = tls
        self._max_response_bytes = max_response_bytes
        self._forbidden = forbidden
        self._unavailable = unavailable
        self._idle: deque[Connection] = deque()
        """Connections that may be used again, the one that was used last at the end."""
        self._resting: deque[Connection] = deque()
        """Connections whose rest has begun in this period."""
        self._rested: deque[Connection] = deque()
        """Connections whose rest ends with this period."""
        self._open: set[Connection] = set()
        self._is_polite = False
        """Whether a connection was silent before its first request."""
        self._long_rest_until = 0.0
        """Until when responses may come twice, on the loop's clock."""
        self._closed = False

    async def request(self, request: bytes, seconds: float) -> BackendResponse:
        """Return the response to a request, after at most `seconds`.

        The request is repeated at once only if a kept connection turns out to be closed, or its response is doubtful.

        Raises:
            DestinationUnavailable: No complete response arrived in time.
        """
        now = self._loop.time()
        end, kept = now + seconds, self._kept(now)
        while True:
            try:
                connection = kept or await self._new(end)
                try:
                    return await connection.send(request, end, at_once=self._may_send)
                finally:
                    self._release(connection)
            except Broken as cause:
                if kept is None or not cause.resend:
                    raise self._unavailable(cause) from cause
            kept = None

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()  # which makes a system call

    @property
    def _may_send(self) -> bool:
        """Whether a request is sent in this turn of the loop: few are in flight, and connections have a whole rest.

        Where many are in flight, those of one turn are sent together: each alone would wake the server.
        """
        resting = len(self._resting) + len(self._rested)
        return resting < _MOST_RESTING and len(self._open) - len(self._idle) - resting <= _FEW

    async def _new(self, end: float) -> Connection:
        connection = await self._connect(end)
        if not self._is_polite:
            try:
                await asyncio.sleep(_REST_SECONDS)
            except asyncio.CancelledError:
                self._release(connection)  # it has had no request, so it is closed
                raise
            self._is_polite = not connection.refusal
        return connection

    def close(self) -> None:
        """Close every connection; requests in flight and later ones fail."""
        self._closed = True
        for connection in [*self._open]:
            connection.abort()
        self._open.clear()
        for kept in (self._idle, self._resting, self._rested):
            kept.clear()

    def _release(self, connection: Connection) -> None:
        """Let a connection rest that may be used again, and close another one."""
        if not connection.reusable:
            connection.abort()
            self._open.discard(connection)
            return
        self._resting.append(connection)
        if len(self._resting) == 1 and not self._rested:
            self._rest()

    def _rest(self) -> None:
        seconds = _LONG_REST_SECONDS if self._loop.time() < self._long_rest_until else _REST_SECONDS
        self._loop.call_later(seconds, self._period_over)

    def _period_over(self) -> None:
        """Put back the connections that were silent for a whole period, after the loop has read what arrived in it."""
        self._loop.call_soon(self._loop.call_soon, self._idle.extend, self._rested)
        self._rested = self._resting
        self._resting = deque()
        if self._rested:
            self._rest()

    def _kept(self, now: float) -> Connection | None:
        """Return the connection that has been idle longest."""
        while self._idle or (len(self._resting) + len(self._rested) > _MOST_RESTING and now >= self._long_rest_until):
            longest = self._idle or self._rested or self._resting
            if longest is self._resting and longest[0].idle_since >= now:
                return None  # all responses arrived in this turn of the loop, which may have more bytes of them
            connection = longest.popleft()
            if connection.reusable and now - connection.idle_since <= _IDLE_SECONDS:
                return connection
            connection.abort()
            self._open.discard(connection)
        return None

    def _rest_longer(self) -> None:
        """Let connections rest longer: the server has sent more than one response to a request."""
        now = self._loop.time()
        if now >= self._long_rest_until:
            log.warning(
                "%s:%d sent bytes that belong to no request; closed the connection. Send one response per request",
                *self._address,
            )
        self._long_rest_until = now + _REPEAT_MEMORY_SECONDS

    async def _connect(self, end: float) -> Connection:
        if self._closed:
            raise Broken("the client is closed")
        loop = asyncio.get_running_loop()
        problem: OSError | None = None
        try:
            async with asyncio.timeout_at(end):
                found = await loop.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
            for index, address in enumerate(addresses):
                if why := self._forbidden(address):
                    raise Broken(f"its name resolves to an address that is not allowed: {why}")
                # An address that never responds must leave the others their share of the time.
                share = (end - loop.time()) / (len(addresses) - index)
                try:
                    async with asyncio.timeout(share):
                        return await self._open_to(address)
                except OSError as cause:
                    problem = cause
        except OSError as cause:
            problem = cause
        raise Broken(connection_problem(problem)) from problem

    async def _open_to(self, address: str) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._max_response_bytes, self._rest_longer),
            address,
            self._address[1],
            ssl=self._tls,
            server_hostname=self._address[0] if self._tls else None,
        )
        self._open.add(connection)
        return connection


class BackendClient:
    """Sends requests to one server, over connections that are opened when needed and kept."""

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float,
        max_response_bytes: int,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        token: Token | None = None,
        forbidden: Callable[[str], str] = forbidden_address,
        what: str = "backend",
    ) -> None:
        """Prepare; no connection is opened.

        Args:
            timeout_seconds: Limit of a whole request, including the opening of a connection.
            max_response_bytes: Largest body of a response.
            tls: Context of `https` connections; the system's authorities when None.
            token: Sent with every request; one that is refused (401) is replaced once, and the request repeated.
            forbidden: Returns why an IP address must not be connected to, or nothing; called before every connection.
        """
        parts = urlsplit(url)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}"
        """The URL without its query, which may hold secrets."""
        is_https = parts.scheme == "https"
        self._connections = ConnectionPool(
            parts.hostname or "",
            parts.port or (443 if is_https else 80),
            (tls or ssl.create_default_context()) if is_https else None,
            max_response_bytes=max_response_bytes,
            forbidden=forbidden,
            unavailable=self.unavailable,
        )
        self._timeout_seconds = timeout_seconds
        self._token = token
        self._send = functools.partial(self._send_with, token) if token else self._connections.request
        """Sends a request, and returns the response within this many seconds."""
        self._what = what
        self._starts: dict[str, str] = {}
        """How the line of a header begins, by its name; see `_start_of`."""
        fixed = headers or {}
        self._fixed = f"Host: {parts.netloc}\r\nAccept-Encoding: identity\r\n".encode() + self.lines([*fixed.items()])
        self._starts = {name.lower(): "" for name in [*fixed, *(["authorization"] if token else [])]}
        self._post = b"POST %b HTTP/1.1\r\n%b" % (_target(parts.path, parts.query), self._fixed)
        """How the head of every POST begins."""

    def post(self, body: bytes, lines: bytes = b"") -> Coroutine[Any, Any, BackendResponse]:
        """Return the response to a POST; it is repeated at once only if a kept connection turns out to be closed.

        Args:
            lines: Headers of this request, from `lines`.

        Raises:
            DestinationUnavailable: No complete response arrived within the limits of time and size.
        """
        request = b"%b%bContent-Length: %d\r\n\r\n%b" % (self._post, lines, len(body), body)
        return self._send(request, self._timeout_seconds)

    def get(self, path: str) -> Coroutine[Any, Any, BackendResponse]:
        """Return the response to `GET path` of the same server, with or without a query.

        Raises:
            DestinationUnavailable: No complete response arrived within the limits of time and size.
        """
        name, _, query = path.partition("?")
        return self._send(b"GET %b HTTP/1.1\r\n%b\r\n" % (_target(name, query), self._fixed), self._timeout_seconds)

    def options(self) -> Coroutine[Any, Any, BackendResponse]:
        """Return the response to an OPTIONS request for the URL, which changes nothing; raises like `get`."""
        return self._send(b"OPTIONS%b\r\n" % self._post.removeprefix(b"POST"), self._timeout_seconds)

    def close(self) -> None:
        """Close every connection; requests in flight and later ones fail as unavailable."""
        self._connections.close()
        if self._token:
            self._token.close()

    def unavailable(self, cause: Broken) -> DestinationUnavailable:
        """Return the error of a request without a response."""
        text = f"waiting for the {self._what} {self.url}: {cause}"
        return DestinationUnavailable(text, url=self.url, broken_off=cause.closed)

    async def _send_with(self, token: Token, request: bytes, seconds: float) -> BackendResponse:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        for again in (False, True):
            try:
                async with asyncio.timeout_at(end):
                    value = await token.value()
            except TimeoutError as cause:
                raise self.unavailable(Broken("no token arrived in time (timeout_seconds)")) from cause
            authorized = request.replace(b"\r\n", f"\r\nAuthorization: Bearer {value}\r\n".encode(), 1)
            response = await self._connections.request(authorized, end - loop.time())
            if response.status != 401 or again:
                break
            token.forget(value)
        return response

    def lines(self, headers: Sequence[tuple[str, str]]) -> bytes:
        """Return the lines of headers of a request.

        In values, control characters and those outside ASCII are percent-encoded. A header is left out if its name is
        not valid, frames the request, or is set for every request.
        """
        values = "".join([value for _, value in headers])
        if not (values.isascii() and values.isprintable()):  # all at once, since nearly all are
            headers = [(name, quote(value, _PRINTABLE, errors="replace")) for name, value in headers]
        found = self._starts.get
        return "".join(
            [f"{start}{value}\r\n" for name, value in headers if (start := found(name) or self._start_of(name))]
        ).encode()

    def _start_of(self, name: str) -> str:
        """Return how a header's line begins, or nothing if it must not be sent; kept, since names are few."""
        lower = name.lower()
        usable = HEADER_NAME.fullmatch(name) and not FRAMING.fullmatch(lower) and self._starts.get(lower) != ""
        start = f"{name}: " if usable else ""
        if len(self._starts) < _NAMES:
            self._starts[name] = start
        return start


def client_of(
    backend: BackendConfig,
    clock: Clock,
    tls: ssl.SSLContext | None = None,
    max_response_bytes: int = MAX_RESPONSE_BYTES,
) -> BackendClient:
    """Return a client of a configured backend, and of its token server if it has one."""
    client = functools.partial(BackendClient, timeout_seconds=backend.timeout_seconds, tls=tls)
    token = None
    if oauth := backend.oauth:
        server = client(
            oauth.token_url,
            max_response_bytes=MAX_HEAD_BYTES,
            headers=token_headers(oauth),
            forbidden=functools.partial(backend.refuses, oauth.token_url),
            what="token server",
        )
        token = Token(oauth, server.post, server.close, clock)
    return client(
        backend.url,
        max_response_bytes=max_response_bytes,
        headers=backend.headers,
        forbidden=functools.partial(backend.refuses, backend.url),
        token=token,
    )


def _target(path: str, query: str) -> bytes:
    """Return path and query as a request line has them."""
    text = quote(path or "/", safe="/%:@!$&'()*+,;=-._~")
    return (f"{text}?{quote(query, safe='/?%:@!$&()*+,;=-._~')}" if query else text).encode()


class _StoredOffset(msgspec.Struct):
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None


async def get_offset(client: BackendClient, path: str, group: str, partition: TopicPartition, epoch: int) -> int | None:
    """Return where a partition resumes, from a backend that stores the offsets of the group; None if it has none.

    The request is `GET path?group=&topic=&partition=&epoch=`, and the response `{"offset": n}`, with null for none.

    Raises:
        DestinationUnavailable: The backend did not return an offset.
    """
    query = {"group": group, "topic": partition.topic, "partition": partition.partition, "epoch": epoch}
    response = await client.get(f"{path}?{urlencode(query)}")
    try:
        if response.status == 200:
            return msgspec.json.decode(response.body, type=_StoredOffset).offset
        why = f"HTTP {response.status}"
    except (msgspec.MsgspecError, RecursionError) as cause:
        why = f'a body that is not {{"offset": n}}: {cause}'
    raise DestinationUnavailable(f"GET {path} of {client.url} returned {why}")
