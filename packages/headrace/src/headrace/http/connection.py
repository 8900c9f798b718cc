"""One connection of a client: parses requests, and limits heads, bodies, pipelined requests and slow clients.

httptools parses. A request that needs only its body is done on the connection; for every other one, a task loads what
it needs.

Source: RFC 9112, HTTP/1.1.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import httptools

from headrace import errors
from headrace.errors import AmbiguousRequest, HeadersTooLarge, HeadraceError, KafkaTimeout, ServerBusy, TooManyRequests
from headrace.http.arrival import Arrival
from headrace.http.flow import Flow
from headrace.http.heads import head_of, head_without_upgrade, is_long_head, names_its_host, request_parser
from headrace.http.messages import last_response
from headrace.http.request import MAX_HEAD_BYTES, HttpRequest, RequestHead, ResponseWriter
from headrace.http.shared import OPEN_PATHS, Kind, Shared, is_one_probe

_MOST_PIPELINED: Final = 16
"""Requests of one connection that may wait while an earlier one is served."""
_REQUEST_SECONDS: Final = 60.0
"""Longest time for a request, from its head to its response, unless it is a stream."""
_SLOW_SECONDS: Final = 10.0
"""Longest time for a head, and for `_LEAST_BYTES` of a body or of a response that is read."""
_IDLE_SECONDS: Final = 75.0
"""Longest time between two requests."""
_LEAST_BYTES: Final = 10_240
"""Bytes that begin the time anew."""
_LINGER_SECONDS: Final = 1.0
_ORDINARY_REQUESTS: Final = 15
"""After a request that could not be served without a task, this many are not tried: they are likely to be similar."""
_MOST_REPEATED_BYTES: Final = 16_384
"""Longest request whose head is kept."""
_MOST_RECEIVING_BYTES: Final = 67_108_864


class ClientConnection(asyncio.Protocol):
    """The protocol of one connection."""

    opening: asyncio.Task[None]
    """Completes with the TLS handshake."""
    transport: asyncio.Transport = None  # type: ignore[assignment]  # until it is connected
    flow: Flow
    client: tuple[str, int] | None = None
    """Address of the client."""
    certificate: Mapping[str, Any] | None = None
    kind: Kind | None = None
    """The limit that it counts for; None until its first request other than health."""
    request: HttpRequest | None = None
    """The latest to arrive; it may wait for an earlier one."""
    received_bytes = 0
    in_head = True
    """Whether the connection waits for a head: the first one, or the rest of one that has begun."""
    is_idle = False
    """Whether nothing has arrived since the last response."""
    _serving: HttpRequest | None = None
    _held_bytes = 0
    _chunk = b""
    """What is being read."""
    _begins = 0
    """Number of the head that begins with the first byte of that; 0 if none does."""
    _head_bytes = 0
    """Bytes of a head whose end has not arrived, or of trailers; not 0 if a head began in an earlier piece."""
    _bare_bytes = 0
    """Bytes since the last part of a body: of heads, trailers and chunk extensions."""
    _body_bytes = 0
    _is_refused = False
    _waiting: tuple[bytes, ...] = ()
    """Bytes to read in a later turn."""
    _ordinary = 0
    _timed: tuple[HttpRequest | None, float] = None, 0.0
    """The request that is being served, and when `check_deadlines` first saw it."""
    _awaited: tuple[str, int, float, int] = "", 0, 0.0, 0
    """What the client must do, for which request, since when, and the bytes that had moved by then."""
    _patience_seconds = _SLOW_SECONDS
    """Longest time for reading a response."""
    _arrival: Arrival | None = None
    """Of the latest response that the client must receive."""
    _heads = 0
    """Number of heads that have begun."""
    _url = b""
    _fields: list[tuple[bytes, bytes]]
    _repeated: tuple[bytes, int, RequestHead] | None = None
    """The bytes of the latest direct request's head, the length of the request, and the head."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        """As given."""
        self._parser = request_parser(self)
        self._pipeline: deque[HttpRequest] = deque()

    # The transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.shared.connections.add(self)
        self.transport = transport
        self.flow = Flow(transport)
        address = transport.get_extra_info("peername")
        self.client = (str(address[0]), int(address[1])) if isinstance(address, tuple | list) else None
        self.certificate = transport.get_extra_info("peercert") or None

    def connection_lost(self, exc: Exception | None) -> None:
        for request in (self._serving, self.request):
            if request and not request.response.is_complete:
                request.abandon()
        if self._arrival:
            self._arrival.ended(exc)
        self.flow.resume_writing()
        self.shared.receiving_bytes -= self._held_bytes
        self.shared.lost(self)
        # Each refers to this connection: a cycle that only a collection would free.
        self.request = self._serving = self._arrival = self._parser = self._repeated = None
        self._timed = None, 0.0
        self._pipeline.clear()

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def data_received(self, data: bytes) -> None:
        self.is_idle = False
        if not self._waiting and (self.shared.slices.has_time() or is_one_probe(data)):
            self._read(data)
        elif self._waiting:
            self._waiting = *self._waiting, data
            self.transport.pause_reading()
        else:
            self._waiting = (data,)
            self.shared.slices.wait(self.read_waiting)

    def eof_received(self) -> bool:
        if self._waiting:
            self.read_waiting()
        if self._arrival:
            self._arrival.client_ends()
        request = self.request
        if not request or request.body.has_more or request.response.is_complete or self.shared.is_tls:
            return False
        if not (request.head.route and request.head.route.endpoint.produces):
            return False
        # The client may still read (RFC 9112 section 9.6), and its records are written.
        request.response.keep_alive = False
        return True

    def read_waiting(self) -> None:
        """Read the bytes that arrived in an earlier turn."""
        waiting, self._waiting = self._waiting, ()
        for data in waiting:
            self._read(data)
        if len(waiting) > 1 and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return  # no client gets a response any more; and closing with unread bytes would cut off the response
        size = len(data)
        self.received_bytes += size
        repeated = self._repeated
        if repeated and size == repeated[1] and data.startswith(repeated[0]) and self._is_repeated(data, *repeated):
            return
        heads = self._heads
        self._chunk = data
        self._begins = heads + 1 if self._is_between() else 0
        self._bare_bytes += size
        try:
            self._feed(data)
        except HeadraceError as error:
            self._refuse(error)
        except httptools.HttpParserError:
            self._refuse(AmbiguousRequest("the bytes are not a valid HTTP request, or are ambiguous"))
        if self.in_head:
            self._head_bytes += size if self._heads in (heads, self._begins) else 1
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(HeadersTooLarge(f"the head is larger than {MAX_HEAD_BYTES} bytes: send less"))
        elif self.request and self.request.body.has_more and self._bare_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadersTooLarge(f"more than {MAX_HEAD_BYTES} bytes between parts of the body: send less"))
        if self._held_bytes or (self.request and self.request.body.has_more):
            self.hold(size)
        self._chunk = b""

    def _feed(self, data: bytes | memoryview) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as switch:
                # Headrace ignores Upgrade. This parser has skipped the body, so another one reads the request.
                head = head_without_upgrade(self._parser, self._url, self._fields)
                data = memoryview(data)[switch.args[0] :]  # not copied: there may be thousands in one piece
                self._parser = request_parser(self)
                self._heads -= 1
                self._parser.feed_data(head)

    def _is_between(self) -> bool:
        """Return whether the next byte is the first one of a request that can be served at once."""
        request = self.request
        if request is None:
            return not self._heads
        return not self.in_head and request.response.is_complete and not request.body.has_more

    def _is_repeated(self, data: bytes, text: bytes, size: int, head: RequestHead) -> bool:
        """Serve a request that has the same head as an earlier one, without the parser; return whether it was."""
        if not self._is_between() or self.flow.write_paused or self.kind != "requests":
            return False
        request = HttpRequest(self, head)
        if self.shared.application.needs(request):
            return False
        self._heads += 1
        self.request = self._serving = request
        request.body.take_whole(data[len(text) :])
        self._serve_directly(request)
        return True

    def hold(self, size: int) -> None:
        """Count received bytes of an incomplete body; once it is complete, none of them count."""
        request, shared = self.request, self.shared
        waits = request and request.body.has_more and not request.response.is_complete and not request.is_streaming
        held = self._held_bytes + size if waits else 0
        shared.receiving_bytes += held - self._held_bytes
        self._held_bytes = held
        if held and shared.receiving_bytes > _MOST_RECEIVING_BYTES and not self._is_refused:
            busy = ServerBusy(f"incomplete requests use more than {_MOST_RECEIVING_BYTES} bytes")
            text = f"the body is larger than {_MOST_RECEIVING_BYTES} bytes: send less in one request"
            self._refuse(errors.PayloadTooLarge(text) if held > _MOST_RECEIVING_BYTES else busy)
            if request and request.body.is_direct:
                request.body.chunks.clear()
            shared.receiving_bytes -= held  # at once, so that other requests are not rejected
            self._held_bytes = 0

    # The parser

    def on_message_begin(self) -> None:
        self.in_head = True
        self._heads += 1
        self._url = b""
        self._fields = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:  # a trailer: it must not count as a header
            self._head_bytes += len(name) + len(value) + 4
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadersTooLarge(f"the trailers are larger than {MAX_HEAD_BYTES} bytes: send less"))
            return
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_refused:
            raise httptools.HttpParserError  # the parser stops here, and the rest of the bytes is ignored
        if self._parser.should_upgrade():
            return  # `_feed` has it read again
        if len(self._pipeline) >= _MOST_PIPELINED:
            self._refuse(TooManyRequests(f"more than {_MOST_PIPELINED} requests wait on one connection: send fewer"))
            return
        if self._url[:1] != b"/" and not names_its_host(self._url, self._fields):
            self._refuse(AmbiguousRequest("the request line and the Host header name different hosts: send one"))
            return
        if (self.kind != "requests" or not self._url.startswith(self.shared.targets.direct)) and not self._may_send():
            return
        request = HttpRequest(self, head_of(self._parser, self._url, self._fields))
        request.body.expects_continue = request.head.expects_continue
        waits = self.request is not None and not self.request.response.is_complete
        if self._head_bytes or len(self._chunk) > MAX_HEAD_BYTES:
            request.head.is_long = is_long_head(self._url, self._fields)
            self._head_bytes = 0
        self.request, self.in_head = request, False
        if waits:
            self.flow.pause_reading()
            self._pipeline.append(request)
            return
        self._serving = request
        if self._ordinary:
            self._ordinary -= 1
        elif not self.flow.write_paused and not self.shared.application.needs(request):
            request.body.is_direct = True
            return
        self._run(request)

    def _may_send(self) -> bool:
        limit = self.shared.limit
        if self._url.startswith(OPEN_PATHS):
            limit.active(self)
            return True
        kind: Kind = "reads" if self.shared.targets.is_long_poll(self._url) else "requests"
        waits = self.kind == "reads" and self.is_answering
        # A client may commit on the connection it reads on, even at the limit of the other kind.
        if kind == self.kind or waits or limit.admit(self, kind) or self.kind == "reads":
            return True
        self._refuse(limit.busy(kind))
        return False

    def on_body(self, body: bytes) -> None:
        request = self.request
        self._bare_bytes = 0
        if self._is_refused or request is None or request.response.is_complete:
            return
        if not request.body.is_direct:
            self._body_bytes += len(body)
        request.body.arrived(body)

    def on_message_complete(self) -> None:
        request = self.request
        if self._is_refused or self.in_head or request is None:
            return
        if self._head_bytes and request.response.keep_alive and not self._parser.should_keep_alive():
            # The parser would read no more.
            self._refuse(AmbiguousRequest("a trailer ends the connection: send Connection as a header"))
            return
        self._bare_bytes = self._head_bytes = 0
        request.body.has_more = False
        if request.body.is_direct:
            self._remember(request)
            self._serve_directly(request)
            return
        self.shared.slices.count(self._body_bytes)
        self._body_bytes = 0
        request.body.wake()

    def _remember(self, request: HttpRequest) -> None:
        """Keep the head of a direct request that arrived in one piece."""
        data, chunks = self._chunk, request.body.chunks
        if self._begins == self._heads and len(chunks) == 1 and len(data) <= _MOST_REPEATED_BYTES:
            end = len(data) - len(chunks[0])
            if data.find(b"\r\n\r\n") == end - 4:  # else the next request has begun
                self._repeated = data[:end], len(data), request.head

    def _serve_directly(self, request: HttpRequest) -> None:
        if self.shared.application.do(request):
            request.body.chunks = []
            return
        request.body.is_direct = False
        self._ordinary = _ORDINARY_REQUESTS
        self._repeated = None
        self.shared.slices.count(sum(map(len, request.body.chunks)))
        self._run(request)

    # Requests

    def _run(self, request: HttpRequest) -> None:
        self._serving = request
        self.shared.slices.count(0)
        self.shared.spawn(self._serve(request), "request")

    async def _serve(self, request: HttpRequest) -> None:
        responds_later = False
        try:
            await self.flow.drain()  # a client that does not read gets no further response
            responds_later = await self.shared.application.load(request)
        except Exception:  # noqa: BLE001 boundary: the application logs each failure once
            pass
        finally:
            if not (request.response.is_complete or request.response.is_disconnected or responds_later):
                self.transport.close()

    def response_complete(self) -> None:
        """Serve the next request, or wait for one."""
        if self._serving:
            self._serving.body.response_complete()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._pipeline:
            self._run(self._pipeline.popleft())
        else:
            self.is_idle = True

    async def written(self, response: ResponseWriter, patience_seconds: float | None) -> Arrival | None:
        """Wait until the operating system has what was sent; None if the connection was closed or it timed out."""
        self._patience_seconds = _REQUEST_SECONDS if patience_seconds is None else patience_seconds
        if self.transport.is_closing():
            return None
        try:
            self._arrival = arrival = Arrival(self.transport, response, self._arrival)
            return arrival if await arrival.taken(self.transport, self.flow) else None
        except (OSError, ValueError):  # it is closed, and the loop has not reported that yet
            return None
        finally:
            self._patience_seconds = _SLOW_SECONDS
            self._awaited = "", 0, 0.0, 0

    @property
    def is_answering(self) -> bool:
        """Whether a response is due."""
        return self.request is not None and not self.request.response.is_complete

    # Ends

    def shut_down(self) -> None:
        """Close the connection after the response that is due."""
        if self.request and not self.request.response.is_complete:
            self.request.response.keep_alive = False
        else:
            self.transport.close()

    def dismiss(self) -> None:
        """Close a connection without a request in favour of a new one."""
        if self.transport is None:
            self.opening.cancel()
        elif not self._is_refused:
            self._is_refused = True
            self._end(self.shared.limit.busy("requests"))
        if self.transport is not None:  # after the response is written; a close would wait for the client
            asyncio.get_running_loop().call_soon(self.transport.abort)

    def _refuse(self, error: HeadraceError) -> None:
        if self._is_refused:
            return
        self._is_refused = True
        request = self.request
        if request and not request.response.is_complete:
            response = request.response
            if not request.body.has_more or response.status:
                response.keep_alive = False  # the earlier request is served, and the connection ends after it
                if request.body.has_more:  # the rest of a stream cannot be read
                    self.transport.close()
                return
            request.abandon()
            if self._pipeline:  # a response now would count as that of an earlier request
                self._pipeline.pop()
                last = self._pipeline[-1] if self._pipeline else self._serving
                if last:
                    last.response.keep_alive = False
                return
        self._end(error)

    def _end(self, error: HeadraceError) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(last_response(error))
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, self.transport.close)

    def check_deadlines(self, now: float) -> None:
        """Close the connection if its client is too slow, or if its request takes too long."""
        request = self.request
        if request:
            self.hold(0)
            if not request.response.is_complete and not request.is_streaming:
                if self._timed[0] is not request:
                    self._timed = request, now
                if now - self._timed[1] > _REQUEST_SECONDS:
                    self._end_late(request)
                    return
        reason, moved_bytes = self._waits_for(), 0
        if reason == "body":
            moved_bytes = self.received_bytes
        elif reason == "reading":
            moved_bytes = -self.transport.get_write_buffer_size()
        is_new = reason != self._awaited[0] or self._heads != self._awaited[1]
        if is_new or moved_bytes - self._awaited[3] >= _LEAST_BYTES:
            self._awaited = reason, self._heads, now, moved_bytes
        elapsed = now - self._awaited[2]
        if reason == "idle":
            if elapsed > _IDLE_SECONDS:
                self._end_idle()
        elif reason and elapsed > (self._patience_seconds if reason == "reading" else _SLOW_SECONDS):
            self.transport.abort()

    def _waits_for(self) -> str:
        """Return what the client must do next: send the `head`, send the `body`, or read (`reading`); else empty.

        `idle` is between two requests.
        """
        request = self.request
        if self._waiting:
            return ""
        if self.in_head or request is None:
            return "head"
        if self.flow.write_paused:
            return "reading"
        if request.response.is_complete:
            return "idle" if self.is_idle else "head"
        is_slow = self.flow.read_paused or request.is_streaming
        return "body" if request.body.has_more and not is_slow else ""

    def _end_idle(self) -> None:
        if self._arrival:
            self._arrival.we_end()
        self.transport.close()

    def _end_late(self, request: HttpRequest) -> None:
        """End a request that takes too long. If it is complete, respond that its outcome is unknown."""
        if request.body.has_more or request.response.status or self._pipeline:
            self.transport.abort()
            return
        self._is_refused = True
        request.abandon()
        text = f"timed out after {_REQUEST_SECONDS:g} s: the request may have been served, or may still be"
        self._end(KafkaTimeout(text))
