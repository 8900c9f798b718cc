"""One connection below the framework: how long a head may be, how slow a client may be, and whose certificate it has.

Source: reliability.md 4.1. The server's own protocol has no such limits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.errors import (
    AmbiguousRequest,
    HeadersTooLarge,
    HeadraceError,
    KafkaTimeout,
    ServerBusy,
    TooManyRequests,
)
from headrace.telemetry.correlation import new_correlation_id
from headrace.web.exchange import retry_after
from headrace.web.hot_exchange import Exchange

if TYPE_CHECKING:
    from headrace.web.acceptor import ConnectionLimit
    from headrace.web.hot_path import HotPath
    from headrace.web.slices import Slices

MAX_HEAD_BYTES: Final = 32_768
LONG_HEAD: Final = "headrace.long_head"
"""Set in a request's state when its head came at once and is too long."""
STREAMING: Final = "headrace.streaming"
"""Set in a request's state by a route whose clients may send slowly."""
ALWAYS_OPEN: Final = ("/health/", "/live", "/ready", "/metrics")
"""Served while draining, and on connections beyond the limit."""
_ALWAYS_OPEN: Final = tuple(path.encode() for path in ALWAYS_OPEN)
_PROBES: Final = tuple(b"GET " + path for path in _ALWAYS_OPEN)
_AUTHORITY: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_PROBE_BYTES: Final = 4096
_MOST_PIPELINED: Final = 16
"""Requests of one connection that wait behind the one that is being answered."""
_LIMIT_SECONDS: Final = 10.0
_REQUEST_SECONDS: Final = 60.0
_LINGER_SECONDS: Final = 1.0
_ORDINARY_REQUESTS: Final = 15
"""So many are not tried on the hot path after one that was not for it: the next are likely to be like it."""
_LEAST_BYTES_PER_SECOND: Final = 1024
_MOST_RECEIVING_BYTES: Final = 67_108_864


class Receiving:
    """What all connections of a server hold of requests that have not come whole."""

    size_bytes = 0


class _Ended(Exception):
    """Ends the parsing of what came with a request that was refused."""


class Connection(HttpToolsProtocol):
    """The server's protocol, with a limit for heads and a count of what came."""

    hot_path: HotPath | None = None
    receiving: Receiving
    limit: ConnectionLimit
    slices: Slices
    opening: asyncio.Task[None]
    """Ends when the TLS handshake has ended."""
    admitted = False
    """Whether it is one of `http.max_connections`: it has sent another request than for health."""
    received_bytes = 0
    _held_bytes = 0
    _chunk_bytes = 0
    _head_bytes = 0
    _body_bytes = 0
    _refused = False
    _waiting: tuple[bytes, ...] = ()
    """What came and is read in a later turn."""
    _ordinary = 0
    _running: Any = None
    """The request that is being answered; `cycle` is the last that came, and may wait behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if certificate := transport.get_extra_info("peercert"):
            self.app_state = {**self.app_state, "certificate": certificate}

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running:
            self._running.disconnected = True
        self.receiving.size_bytes -= self._held_bytes
        self.limit.closed(self)
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        self.slices.count(0)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if not self._waiting and (self.slices.has_time() or _is_one_probe(data)):
            self._read(data)
        elif self._waiting:
            self._waiting = *self._waiting, data
            self.transport.pause_reading()
        else:
            self._waiting = (data,)
            self.slices.wait(self)

    def read_waiting(self) -> None:
        """Read what came in an earlier turn."""
        waiting, self._waiting = self._waiting, ()
        for data in waiting:
            self._read(data)
        if len(waiting) > 1 and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        if self._refused or self.parser is None:
            return  # closing on bytes that were not read would cut the answer off
        size = self._chunk_bytes = len(data)
        self.received_bytes += size
        HttpToolsProtocol.data_received(self, data)
        cycle = self.cycle
        if cycle is None or self.scope is not cycle.scope:  # in_head; this runs for every request
            self._head_bytes += size
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(HeadersTooLarge(f"the head is larger than {MAX_HEAD_BYTES} bytes: send less"))
        elif size > MAX_HEAD_BYTES or self._head_bytes:
            self._head_bytes = 0
            if self._head_is_long():
                cycle.scope["state"][LONG_HEAD] = True  # its task has not run yet
        if self._held_bytes or (cycle and cycle.more_body):
            self.hold(size)

    def hold(self, size: int) -> None:
        """Count what came of a body that is not complete, or that nothing is kept of it any more."""
        cycle = self.cycle
        waits = cycle.more_body and not cycle.response_complete and not cycle.scope["state"].get(STREAMING)
        held = self._held_bytes + size if waits else 0
        self.receiving.size_bytes += held - self._held_bytes
        self._held_bytes = held
        if held and self.receiving.size_bytes > _MOST_RECEIVING_BYTES and not self._refused:
            self._refuse(ServerBusy(f"more than {_MOST_RECEIVING_BYTES} bytes of requests wait for their rest"))
            if type(cycle) is Exchange:
                cycle.chunks.clear()
            self.receiving.size_bytes -= held  # at once, so that others need not be refused too
            self._held_bytes = 0

    def on_headers_complete(self) -> None:
        if self._refused:
            raise _Ended  # the parser stops here; what it has not read is nobody's request
        if len(self.pipeline) >= _MOST_PIPELINED:
            self._refuse(TooManyRequests(f"more than {_MOST_PIPELINED} requests wait on one connection: send fewer"))
            return
        if self.url[:1] != b"/" and not self._names_its_host():
            self._refuse(AmbiguousRequest("the host in the request line is not that of the Host header: send one"))
            return
        if not self.admitted and not self._may_send():
            return
        idle = (self.cycle is None or self.cycle.response_complete) and not self._ordinary
        self._ordinary = max(0, self._ordinary - 1)
        checked = (self._chunk_bytes <= MAX_HEAD_BYTES and not self._head_bytes) or not self._head_is_long()
        exchange = self.hot_path.begin(self) if self.hot_path and idle and checked else None
        if exchange:
            self.cycle: Any = exchange
            self._running = exchange
        else:
            super().on_headers_complete()

    def _names_its_host(self) -> bool:
        """Return whether the authority of an absolute-form target is the Host (RFC 9112 section 3.2.2)."""
        found = _AUTHORITY.match(self.url)
        return not found or found[1].lower() == dict(self.headers).get(b"host", b"").lower()

    def _may_send(self) -> bool:
        if self.url.startswith(_ALWAYS_OPEN):
            self.limit.active(self)
            return True
        self.admitted = self.limit.admit(self)
        if not self.admitted:
            self._refuse(self._busy())
        return self.admitted

    def _busy(self) -> ServerBusy:
        return ServerBusy(
            f"more than {self.limit.limit} connections are open (http.max_connections): "
            "close some, or send again after a pause"
        )

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        if type(self.cycle) is Exchange:
            self.cycle.chunks.append(body)
        else:
            self._body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        exchange = self.cycle
        if self._refused:
            return
        if type(exchange) is not Exchange:
            self.slices.count(self._body_bytes)
            self._body_bytes = 0
            super().on_message_complete()
            return
        exchange.more_body = False
        if self.hot_path and not self.hot_path.serve(exchange):
            self.cycle = None
            self._ordinary = _ORDINARY_REQUESTS
            super().on_headers_complete()
            body = b"".join(exchange.chunks)
            self.slices.count(len(body))
            super().on_body(body)
            super().on_message_complete()

    def _head_is_long(self) -> bool:
        return sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES

    @property
    def in_head(self) -> bool:
        """Whether the head of a request is not complete: of the first, or one that has begun."""
        return self.cycle is None or self.scope is not self.cycle.scope

    @property
    def is_answering(self) -> bool:
        """Whether a request waits for its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_waiting(self) -> bool:
        """Whether what came is read in a later turn."""
        return bool(self._waiting)

    def dismiss(self) -> None:
        """Close a connection without a request, to make room for a new one."""
        if self.transport is None:
            self.opening.cancel()
        elif not self._refused:
            self._refused = True
            self._end(self._busy())
        if self.transport is not None:  # once it is written; a close would wait for what the client does
            self.loop.call_soon(self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        self._refuse(AmbiguousRequest("this is no HTTP request that can be read in one way only"))

    def _refuse(self, error: HeadraceError) -> None:
        if self._refused:
            return
        self._refused = True
        cycle = self.cycle
        if cycle and not cycle.response_complete:
            if not cycle.more_body or cycle.response_started:
                cycle.keep_alive = False  # what came before is answered, and with it the connection ends
                if cycle.more_body:  # a stream, of which no more can be understood
                    self.transport.close()
                return
            self._forget(cycle)
            if self.pipeline:  # what is written now would be taken for the answer to an earlier request
                self.pipeline.popleft()
                last = self.pipeline[0][0] if self.pipeline else self._running
                last.keep_alive = False
                return
        self._end(error)

    def give_up(self) -> None:
        """End a request that takes too long; one that came whole is told that nobody knows what became of it."""
        cycle = self.cycle
        if cycle.more_body or cycle.response_started or self.pipeline:
            self.transport.abort()
            return
        self._refused = True
        self._forget(cycle)
        text = f"no answer within {_REQUEST_SECONDS:g} s: whether what was asked has been done, or will be, is unknown"
        self._end(KafkaTimeout(text))

    def _forget(self, cycle: Any) -> None:
        cycle.disconnected = True  # so nothing that is answered later reaches the client
        cycle.message_event.set()

    def _end(self, error: HeadraceError) -> None:
        body = msgspec.json.encode(error.body())
        head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += "".join(
            f"{name.decode()}: {value.decode()}\r\n" for name, value in retry_after(error.retry_after_seconds)
        )
        head += f"connection: close\r\nx-correlation-id: {new_correlation_id().decode()}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _is_one_probe(data: bytes) -> bool:
    """Return whether this is one request for health and nothing else: it is read even in a turn without time."""
    return data.startswith(_PROBES) and len(data) < _PROBE_BYTES and data.find(b"\r\n\r\n") == len(data) - 4


class _Wait(NamedTuple):
    what: str
    request: Any
    since: float
    received_bytes: int


class Deadlines:
    """Ends connections whose clients are too slow: 10 seconds for a head, 1 KiB/s for a body, 10 seconds to read.

    And those whose request is not answered within 60 seconds in all, unless it is a stream.
    """

    def __init__(self) -> None:
        self._waits: dict[Connection, _Wait] = {}
        self._requests: dict[Connection, tuple[Any, float]] = {}

    def look(self, connections: Iterable[Any], now: float) -> None:
        """Compare with the last look, and end what has not moved."""
        before, self._waits = self._waits, {}
        begun, self._requests = self._requests, {}
        for connection in list(connections):
            cycle = connection.cycle
            if cycle:
                connection.hold(0)
            if cycle and not cycle.response_complete and not cycle.scope["state"].get(STREAMING):
                seen = begun.get(connection)
                since = seen[1] if seen and seen[0] is cycle else now
                self._requests[connection] = cycle, since
                if now - since > _REQUEST_SECONDS:
                    connection.give_up()
                    continue
            what = _waits_for(connection)
            if not what:
                continue
            wait = before.get(connection)
            if wait is None or wait.what != what or wait.request is not connection.scope:
                wait = _Wait(what, connection.scope, now, connection.received_bytes)
            elapsed = now - wait.since
            moved = connection.received_bytes - wait.received_bytes
            if elapsed > _LIMIT_SECONDS and (what != "body" or moved < elapsed * _LEAST_BYTES_PER_SECOND):
                connection.transport.abort()
            else:
                self._waits[connection] = wait


def _waits_for(connection: Connection) -> str:
    """Return what a client owes: its head, its body, reading the answer, or nothing."""
    cycle = connection.cycle
    if connection.is_waiting:
        return ""
    if connection.in_head:
        return "head"
    if connection.flow.write_paused:
        return "reading"
    if cycle.response_complete:  # idle; the keep-alive timer runs unless something came that began no request
        return "" if connection.timeout_keep_alive_task else "head"
    slow = connection.flow.read_paused or cycle.scope["state"].get(STREAMING)
    return "body" if cycle.more_body and not slow else ""
