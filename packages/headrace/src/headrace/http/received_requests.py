"""What a connection receives: its bytes become requests, which are served in their order.

httptools parses. A request that needs only its body is done on the connection; for every other one, a task loads what
it needs.

Source: RFC 9112, HTTP/1.1; RFC 9110 section 7.8 (Upgrade).
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Final
from urllib.parse import unquote

import httptools

from headrace import errors
from headrace.errors import AmbiguousRequest, HeadersTooLarge, HeadraceError, ServerBusy, TooManyRequests
from headrace.http.request import MAX_HEAD_BYTES, HttpRequest, RequestConnection, RequestHead
from headrace.http.request_checks import MAX_HEADERS

_MOST_PIPELINED: Final = 16
"""Requests of one connection that may wait while an earlier one is served."""
_ORDINARY_REQUESTS: Final = 15
"""After a request that could not be served without a task, this many are not tried: they are likely to be similar."""
_MOST_REPEATED_BYTES: Final = 16_384
"""Longest request whose head is kept."""
_MOST_RECEIVING_BYTES: Final = 67_108_864
_AUTHORITY: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_PLAIN_PATH: Final = re.compile(rb"(?:/[A-Za-z0-9._~-]+)+")
"""A usual path, which is decoded already and has no query."""


class RequestQueue:
    """The requests of one connection, in their order: one is served, and later ones wait."""

    def __init__(self, connection: RequestConnection) -> None:
        # This connection
        self._connection = connection
        self._waiting: deque[HttpRequest] = deque()
        self._ordinary = 0
        self._held_bytes = 0
        """Bytes of an incomplete body, which count for all connections."""
        self.is_idle = False
        """Whether nothing has arrived since the last response."""
        # This request
        self.latest: HttpRequest | None = None
        """The latest to arrive; it may wait for an earlier one."""
        self._serving: HttpRequest | None = None

    @property
    def is_answering(self) -> bool:
        """Whether a response is due."""
        return self.latest is not None and not self.latest.response.is_complete

    @property
    def is_full(self) -> bool:
        """Whether no further request may wait."""
        return len(self._waiting) >= _MOST_PIPELINED

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, request: HttpRequest) -> None:
        """Serve a request with a complete head, as soon as the earlier ones have their responses."""
        waits = self.is_answering
        self.latest = request
        flow = self._connection.flow
        if waits:
            flow.pause_reading()
            self._waiting.append(request)
            return
        self._serving = request
        if self._ordinary:
            self._ordinary -= 1
        elif not flow.write_paused and not self._connection.shared.application.needs(request):
            request.body.is_direct = True
            return
        self._run(request)

    def add_repeated(self, head: RequestHead, body: bytes) -> bool:
        """Serve a whole request with an earlier head; return False if it needs more than its body."""
        connection = self._connection
        request = HttpRequest.of(connection, head, body)
        if connection.shared.application.needs(request):
            return False
        self.latest = self._serving = request
        return True

    def do(self) -> bool:
        """Do the latest request, whose body is complete; return False if a task must load what it needs."""
        request = self.latest
        assert request
        shared = self._connection.shared
        if shared.application.do(request):
            request.body.chunks = []
            return True
        request.body.is_direct = False
        self._ordinary = _ORDINARY_REQUESTS
        shared.slices.count(request.body.size_bytes)
        self._run(request)
        return False

    def _run(self, request: HttpRequest) -> None:
        self._serving = request
        connection = self._connection
        connection.shared.slices.count(0)
        connection.shared.spawn(self._load(connection, request), "request")

    async def _load(self, connection: RequestConnection, request: HttpRequest) -> None:
        responds_later = False
        try:
            await connection.flow.drain()  # a client that does not read gets no further response
            responds_later = await connection.shared.application.load(request)
        except Exception:  # noqa: BLE001 boundary: the application logs each failure once
            pass
        finally:
            if not (request.response.is_complete or request.response.is_disconnected or responds_later):
                connection.transport.close()

    def response_complete(self) -> None:
        """Serve the next request, or wait for one."""
        connection = self._connection
        if connection.transport.is_closing():
            return
        if connection.flow.read_paused:
            connection.flow.resume_reading()
        if self._waiting:
            self._run(self._waiting.popleft())
        else:
            self.is_idle = True

    def hold(self, size: int) -> None:
        """Count received bytes of an incomplete body; once it is complete, none of them count."""
        request, connection = self.latest, self._connection
        shared = connection.shared
        waits = request and request.body.has_more and not request.response.is_complete and not request.is_streaming
        held = self._held_bytes + size if waits else 0
        shared.receiving_bytes += held - self._held_bytes
        self._held_bytes = held
        if held and shared.receiving_bytes > _MOST_RECEIVING_BYTES and not connection.is_refused:
            busy = ServerBusy(f"incomplete requests use more than {_MOST_RECEIVING_BYTES} bytes")
            text = f"the body is larger than {_MOST_RECEIVING_BYTES} bytes: send less in one request"
            connection.refuse(errors.PayloadTooLarge(text) if held > _MOST_RECEIVING_BYTES else busy)
            if request and request.body.is_direct:
                request.body.chunks.clear()
            self._release()  # at once, so that other requests are not rejected

    @property
    def is_holding(self) -> bool:
        """Whether an incomplete body counts."""
        request = self.latest
        return bool(self._held_bytes) or (request is not None and request.body.has_more)

    def _release(self) -> None:
        self._connection.shared.receiving_bytes -= self._held_bytes
        self._held_bytes = 0

    def refuse_latest(self) -> bool:
        """Take no further request; return whether the error is the next response."""
        request = self.latest
        if not request or request.response.is_complete:
            return True
        response = request.response
        if not request.body.has_more or response.status:
            response.keep_alive = False  # the earlier request is served, and the connection ends after it
            if request.body.has_more:  # the rest of a stream cannot be read
                self._connection.transport.close()
            return False
        request.abandon()
        if not self._waiting:
            return True
        self._waiting.pop()  # a response now would count as that of an earlier request
        last = self._waiting[-1] if self._waiting else self._serving
        if last:
            last.response.keep_alive = False
        return False

    def lost(self) -> None:
        """Abandon all requests: the connection is closed."""
        for request in (self._serving, self.latest):
            if request and not request.response.is_complete:
                request.abandon()
        self._release()
        # Each refers to the connection: a cycle that only a collection would free.
        self.latest = self._serving = None
        self._waiting.clear()
        del self._connection


class _PartialHead:
    """A head whose end has not been parsed."""

    def __init__(self) -> None:
        self.url = b""
        self.fields: list[tuple[bytes, bytes]] = []

    @property
    def is_long(self) -> bool:
        """Whether it is above the limit."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.fields) > MAX_HEAD_BYTES

    @property
    def names_its_host(self) -> bool:
        """Whether the authority of an absolute-form target equals Host (RFC 9112 section 3.2.2)."""
        found = self.url[:1] != b"/" and _AUTHORITY.match(self.url)
        return not found or found[1].lower() == dict(self.fields).get(b"host", b"").lower()

    def complete(self, parser: Any) -> RequestHead:
        method, version = parser.get_method().decode("ascii"), parser.get_http_version()
        keep_alive = version != "1.0" and parser.should_keep_alive()
        url = self.url
        if _PLAIN_PATH.fullmatch(url):
            return RequestHead(method, url, url.decode("ascii"), b"", self.fields, version, keep_alive=keep_alive)
        parts = httptools.parse_url(url)
        target = parts.path or b"/"
        path = unquote(target.decode("ascii"))
        return RequestHead(method, target, path, parts.query or b"", self.fields, version, keep_alive=keep_alive)

    def without_upgrade(self, parser: Any) -> bytes:
        """Return the text of it, at which a parser stopped, without `Upgrade`. A server may ignore that header.

        Raises:
            AmbiguousRequest: It is a head of CONNECT, at which a parser always stops.
            HeadersTooLarge: It is above a limit with that header.
        """
        method = parser.get_method()
        if method == b"CONNECT":
            raise AmbiguousRequest("CONNECT asks for a tunnel, and Headrace is not a proxy")
        if len(self.fields) > MAX_HEADERS or self.is_long:
            raise HeadersTooLarge(f"the head is above {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers: send less")
        lines = [b"%b: %b\r\n" % field for field in self.fields if field[0] != b"upgrade"]
        version = parser.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines))


class RequestParser:
    """Parses the bytes of one connection, and limits heads, trailers and what lies between parts of a body."""

    def __init__(self, connection: RequestConnection) -> None:
        # This connection
        self._connection = connection
        self._parser = _parser(self)
        self.heads = 0
        """Number of heads that have begun."""
        self.received_bytes = 0
        self._repeated: tuple[bytes, int, RequestHead] | None = None
        """The bytes of the latest direct request's head, the length of the request, and the head."""
        # This request
        self.in_head = True
        """Whether the connection waits for a head: the first one, or the rest of one that has begun."""
        self._head = _PartialHead()
        self._head_bytes = 0
        """Bytes of a head whose end has not arrived, or of trailers; not 0 if a head began in an earlier piece."""
        self._bare_bytes = 0
        """Bytes since the last part of a body: of heads, trailers and chunk extensions."""
        # These bytes
        self._chunk = b""
        """What is being read."""
        self._begins = 0
        """Number of the head that begins with the first byte of that; 0 if none does."""

    def read(self, data: bytes) -> None:
        """Parse what has arrived."""
        connection = self._connection
        if connection.is_refused or connection.transport.is_closing():
            return  # no client gets a response any more; and closing with unread bytes would cut off the response
        size = len(data)
        self.received_bytes += size
        repeated = self._repeated
        if repeated and self._is_repeated(data, repeated):
            return
        heads = self.heads
        self._chunk = data
        self._begins = heads + 1 if self._is_between() else 0
        self._bare_bytes += size
        try:
            self._feed(data)
        except HeadraceError as error:
            connection.refuse(error)
        except httptools.HttpParserError:
            connection.refuse(AmbiguousRequest("the bytes are not a valid HTTP request, or are ambiguous"))
        requests = connection.requests
        if self.in_head:
            self._head_bytes += size if self.heads in (heads, self._begins) else 1
            if self._head_bytes > MAX_HEAD_BYTES and not connection.transport.is_closing():
                connection.refuse(HeadersTooLarge(f"the head is larger than {MAX_HEAD_BYTES} bytes: send less"))
        elif self._bare_bytes > MAX_HEAD_BYTES and requests.latest and requests.latest.body.has_more:
            text = f"more than {MAX_HEAD_BYTES} bytes between parts of the body: send less"
            connection.refuse(HeadersTooLarge(text))
        if requests.is_holding:
            requests.hold(size)
        self._chunk = b""

    def _feed(self, data: bytes | memoryview) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as switch:
                # Headrace ignores Upgrade. This parser has skipped the body, so another one reads the request.
                head = self._head.without_upgrade(self._parser)
                data = memoryview(data)[switch.args[0] :]  # not copied: there may be thousands in one piece
                self._parser = _parser(self)
                self.heads -= 1
                self._parser.feed_data(head)

    def _is_between(self) -> bool:
        """Return whether the next byte is the first one of a request that can be served at once."""
        request = self._connection.requests.latest
        if request is None:
            return not self.heads
        return not self.in_head and request.response.is_complete and not request.body.has_more

    def _is_repeated(self, data: bytes, repeated: tuple[bytes, int, RequestHead]) -> bool:
        """Serve a request that has the same head as an earlier one, without the parser; return whether it was."""
        connection = self._connection
        text, size, head = repeated
        if len(data) != size or not data.startswith(text) or not self._is_between():
            return False
        if connection.flow.write_paused or connection.kind != "requests":
            return False
        requests = connection.requests
        if not requests.add_repeated(head, data[len(text) :]):
            return False
        self.heads += 1
        if not requests.do():
            self._repeated = None
        return True

    def close(self) -> None:
        """Parse nothing more."""
        # Each refers to this parser or to the connection: a cycle that only a collection would free.
        self._parser = self._repeated = None
        del self._connection

    # What httptools calls

    def on_message_begin(self) -> None:
        self.in_head = True
        self.heads += 1
        self._head = _PartialHead()

    def on_url(self, url: bytes) -> None:
        self._head.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:
            self._head.fields.append((name.lower(), value))
            return
        self._head_bytes += len(name) + len(value) + 4  # a trailer: it must not count as a header
        if self._head_bytes > MAX_HEAD_BYTES:
            text = f"the trailers are larger than {MAX_HEAD_BYTES} bytes: send less"
            self._connection.refuse(HeadersTooLarge(text))

    def on_headers_complete(self) -> None:
        connection, head = self._connection, self._head
        if connection.is_refused:
            raise httptools.HttpParserError  # the parser stops here, and the rest of the bytes is ignored
        if self._parser.should_upgrade():
            return  # `_feed` has it read again
        if connection.requests.is_full:
            text = f"more than {_MOST_PIPELINED} requests wait on one connection: send fewer"
            connection.refuse(TooManyRequests(text))
            return
        if not head.names_its_host:
            text = "the request line and the Host header name different hosts: send one"
            connection.refuse(AmbiguousRequest(text))
            return
        is_direct = connection.kind == "requests" and head.url.startswith(connection.shared.targets.direct)
        if not is_direct and not connection.may_send(head.url):
            return
        request = HttpRequest.of(connection, head.complete(self._parser))
        if self._head_bytes or len(self._chunk) > MAX_HEAD_BYTES:
            request.head.is_long = head.is_long
            self._head_bytes = 0
        self.in_head = False
        connection.requests.add(request)

    def on_body(self, data: bytes) -> None:
        connection = self._connection
        request = connection.requests.latest
        self._bare_bytes = 0
        if not (connection.is_refused or request is None or request.response.is_complete):
            request.body.arrived(data)

    def on_message_complete(self) -> None:
        connection = self._connection
        request = connection.requests.latest
        if connection.is_refused or self.in_head or request is None:
            return
        if self._head_bytes and request.response.keep_alive and not self._parser.should_keep_alive():
            # The parser would read no more.
            connection.refuse(AmbiguousRequest("a trailer ends the connection: send Connection as a header"))
            return
        self._bare_bytes = self._head_bytes = 0
        request.body.has_more = False
        if not request.body.is_direct:
            connection.shared.slices.count(request.body.size_bytes)
            request.response.wake()
            return
        self._remember(request)
        if not connection.requests.do():
            self._repeated = None

    def _remember(self, request: HttpRequest) -> None:
        """Keep the head of a direct request that arrived in one piece."""
        data, chunks = self._chunk, request.body.chunks
        if self._begins == self.heads and len(chunks) == 1 and len(data) <= _MOST_REPEATED_BYTES:
            end = len(data) - len(chunks[0])
            if data.find(b"\r\n\r\n") == end - 4:  # else the next request has begun
                self._repeated = data[:end], len(data), request.head


def _parser(callbacks: RequestParser) -> Any:
    """Return a parser of requests."""
    parser: Any = httptools.HttpRequestParser(callbacks)
    # The first of several requests gets its response, even if it ends the connection.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
