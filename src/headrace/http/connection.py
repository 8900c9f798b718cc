"""One connection of a client: adds limits that uvicorn's own protocol does not have.

The event loop reads all clients that have sent something in one turn, even a thousand. `Slices` spreads their requests
over several short turns. Otherwise health requests and new connections would wait for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol
from urllib.parse import unquote_to_bytes

import msgspec
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from headrace import errors
from headrace.errors import AmbiguousRequest, HeadersTooLarge, HeadraceError, KafkaTimeout, ServerBusy, TooManyRequests
from headrace.http.arrival import Arrival
from headrace.http.asgi import ALWAYS_OPEN, LONG_HEAD, MAX_HEAD_BYTES, STREAMING, WAKE, WRITTEN
from headrace.http.messages import retry_after
from headrace.runtime.telemetry.correlation import new_correlation_id

_ALWAYS_OPEN: Final = tuple(path.encode() for path in ALWAYS_OPEN)
_PROBES: Final = tuple(b"GET " + path for path in _ALWAYS_OPEN)
_READ: Final = re.compile(rb"([^/]*//[^/]*)?/consumers/([^/]+/instances/[^/]+/records|deadLetter/active)")
"""Path of a read or a stream, also in absolute form."""
_QUERY: Final = re.compile(rb"[?#]")
_AUTHORITY: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_PROBE_BYTES: Final = 4096
_MOST_PIPELINED: Final = 16
"""Requests of one connection that may wait while an earlier one is served."""
_REQUEST_SECONDS: Final = 60.0
"""Longest time for a request, from its head to its response, unless it is a stream."""
_SLOW_SECONDS: Final = 10.0
"""Longest time for a head, for reading a response, and for a body below the minimum rate."""
_LEAST_BYTES_PER_SECOND: Final = 1024
_LINGER_SECONDS: Final = 1.0
_ORDINARY_REQUESTS: Final = 15
"""After a request that the fast path did not take, this many skip it: they are likely to be similar."""
_MOST_RECEIVING_BYTES: Final = 67_108_864

RESERVED_CONNECTIONS: Final = 512
"""Connections above `http.max_connections`, for health requests and for clients that get 503."""
_TIME_TO_SEND_SECONDS: Final = 0.2
"""A new connection is not closed earlier: its request may be in transit, and the 503 could be lost."""

_UNUSED: Final = logging.getLogger("headrace.http.uvicorn")
_UNUSED.setLevel(logging.CRITICAL + 1)
_SLICE_SECONDS: Final = 0.005
_TASK_SECONDS: Final = 0.0002
_BYTE_SECONDS: Final = 1e-7
"""Usual processor time of a request that a task serves, and of a byte of its body."""


Kind = Literal["requests", "reads"]
"""What a connection sends: reads of active consumers, which may wait for records, or other requests."""


class ConnectionLimit:
    """Admits connections to send requests. Of the others, it closes the oldest in favour of new ones.

    Each kind has a separate limit, so that neither uses up the connections of the other.
    """

    def __init__(self, limits: Mapping[Kind, int]) -> None:
        self.limits = limits
        self.admitted: dict[Kind, int] = dict.fromkeys(limits, 0)
        """Number of open connections that may send requests."""
        self._others: dict[ClientConnection, float] = {}
        """Not admitted: they sent nothing, an incomplete head, or only health requests. Least recently active first."""

    def has_capacity(self) -> bool:
        """Return whether one more may be opened. At the limit, close the oldest that had time to send a request."""
        most = sum(self.limits.values()) + RESERVED_CONNECTIONS
        if sum(self.admitted.values()) + len(self._others) < most:
            return True
        before = time.monotonic() - _TIME_TO_SEND_SECONDS
        oldest = next((one for one, at in self._others.items() if at > before or not one.is_answering), None)
        if oldest is None or self._others[oldest] > before:
            return False
        del self._others[oldest]
        oldest.dismiss()
        return True

    def opened(self, connection: ClientConnection) -> None:
        """Count a new connection."""
        self._others[connection] = time.monotonic()

    def admit(self, connection: ClientConnection, kind: Kind) -> bool:
        """Return whether a connection may send requests of a kind; if so, it counts for that kind alone."""
        if self.admitted[kind] >= self.limits[kind]:
            return False
        self.closed(connection)
        connection.kind = kind
        self.admitted[kind] += 1
        return True

    def active(self, connection: ClientConnection) -> None:
        """Mark a connection that is not admitted as active."""
        if self._others.pop(connection, None) is not None:
            self.opened(connection)

    def closed(self, connection: ClientConnection) -> None:
        """Stop counting a connection."""
        self._others.pop(connection, None)
        if connection.kind:
            self.admitted[connection.kind] -= 1
            connection.kind = None


class Slices:
    """Decides whether to read arrived bytes in this turn of the event loop or in a later one."""

    def __init__(self) -> None:
        self._ends_at = 0.0
        self._waiting: deque[Callable[[], None]] = deque()

    def has_time(self) -> bool:
        """Return whether a connection may read now; if not, it must `wait`."""
        if not self._ends_at:
            self._begin()
        return not self._waiting and time.perf_counter() < self._ends_at

    def wait(self, read: Callable[[], None]) -> None:
        """Call a function in a later turn, after those already waiting."""
        self._waiting.append(read)

    def count(self, body_bytes: int) -> None:
        """Count the expected time of a request that a task will serve, and of its body bytes, in this turn."""
        if not self._ends_at:
            self._begin()
        self._ends_at -= _TASK_SECONDS + body_bytes * _BYTE_SECONDS

    def _begin(self) -> None:
        self._ends_at = time.perf_counter() + _SLICE_SECONDS
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._ends_at = 0.0
        if not self._waiting:
            return
        self._begin()
        self._waiting.popleft()()
        while self._waiting and time.perf_counter() < self._ends_at:
            self._waiting.popleft()()


class DirectPath(Protocol):
    """Serves usual requests on their connection, without a task."""

    def begin(self, connection: ClientConnection) -> Any:
        """Return the exchange for a request with a complete head; None if the application must serve it."""

    def serve(self, exchange: Any) -> bool:
        """Serve a request with a complete body; return False if the application must serve it."""


class Shared:
    """What all connections of a server share."""

    def __init__(self, limits: Mapping[Kind, int], fast_path: DirectPath | None) -> None:
        self.limit = ConnectionLimit(limits)
        self.slices = Slices()
        self.fast_path = fast_path
        self.receiving_bytes = 0
        """Bytes of requests that are not complete."""


class _Ended(Exception):
    """Stops parsing the bytes after a rejected request."""


class ClientConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits for heads, bodies, and pipelined requests."""

    opening: asyncio.Task[None]
    """Completes with the TLS handshake."""
    kind: Kind | None = None
    """The limit that it counts for; None until its first request other than health."""
    received_bytes = 0
    _held_bytes = 0
    _chunk_bytes = 0
    _head_bytes = 0
    _body_bytes = 0
    _refused = False
    _waiting: tuple[bytes, ...] = ()
    """Bytes to read in a later turn."""
    _ordinary = 0
    _running: Any = None
    """The request that is being served. `cycle` is the latest to arrive, and may wait for this one."""
    _timed: tuple[Any, float] = None, 0.0
    """The request that is being served, and when `check_deadlines` first saw it."""
    _awaited: tuple[str, Any, float, int] = "", None, 0.0, 0
    """What the client must do, for which request, since when, and the bytes received until then."""
    _patience_seconds = _SLOW_SECONDS
    """Longest time for reading a response."""
    _exchange: Any = None
    """`cycle`, if the fast path serves it."""
    _arrival: Arrival | None = None
    """Of the latest response that the client must receive."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], shared: Shared) -> None:
        super().__init__(config, server_state, {**app_state, WRITTEN: weakref.WeakMethod(self.written)})
        self.logger = _UNUSED  # the application logs each failure once
        self._shared = shared
        self._limit = shared.limit
        self._slices = shared.slices
        self._fast_path = shared.fast_path

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if certificate := transport.get_extra_info("peercert"):
            self.app_state = {**self.app_state, "certificate": certificate}

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running:
            self._running.disconnected = True
        if self._arrival:
            self._arrival.ended(exc)
        self._shared.receiving_bytes -= self._held_bytes
        self._limit.closed(self)
        super().connection_lost(exc)
        # Each refers to this connection: a cycle that only a collection would free.
        self.cycle = self._running = self._exchange = self._arrival = None
        self._timed = None, 0.0

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        cycle.scope["state"][WAKE] = cycle.message_event.set
        self._slices.count(0)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if not self._waiting and (self._slices.has_time() or _is_one_probe(data)):
            self._read(data)
        elif self._waiting:
            self._waiting = *self._waiting, data
            self.transport.pause_reading()
        else:
            self._waiting = (data,)
            self._slices.wait(self.read_waiting)

    def eof_received(self) -> None:
        if self._arrival:
            self._arrival.client_ends()

    def timeout_keep_alive_handler(self) -> None:
        if self._arrival:
            self._arrival.we_end()
        super().timeout_keep_alive_handler()

    async def written(self, patience_seconds: float = _REQUEST_SECONDS) -> Arrival | None:
        """Wait until the operating system has the whole response; None if the connection was closed or it timed out."""
        self._patience_seconds = patience_seconds
        if self.transport.is_closing():
            return None
        try:
            self._arrival = arrival = Arrival(self.transport, self._running, self._arrival)
            return arrival if await arrival.taken(self.transport, self.flow) else None
        except (OSError, ValueError):  # it is closed, and the loop has not reported that yet
            return None
        finally:
            self._patience_seconds = _SLOW_SECONDS
            self._awaited = "", None, 0.0, 0

    def read_waiting(self) -> None:
        """Read the bytes that arrived in an earlier turn."""
        waiting, self._waiting = self._waiting, ()
        for data in waiting:
            self._read(data)
        if len(waiting) > 1 and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        if self._refused or self.parser is None:
            return  # closing with unread bytes would cut off the response
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
                cycle.scope["state"][LONG_HEAD] = True  # in time: its task has not run yet
        if self._held_bytes or (cycle and cycle.more_body):
            self.hold(size)

    def hold(self, size: int) -> None:
        """Count received bytes of an incomplete body; once it is complete, none of them count."""
        cycle = self.cycle
        waits = cycle.more_body and not cycle.response_complete and not cycle.scope["state"].get(STREAMING)
        held = self._held_bytes + size if waits else 0
        self._shared.receiving_bytes += held - self._held_bytes
        self._held_bytes = held
        if held and self._shared.receiving_bytes > _MOST_RECEIVING_BYTES and not self._refused:
            busy = ServerBusy(f"incomplete requests use more than {_MOST_RECEIVING_BYTES} bytes")
            text = f"the body is larger than {_MOST_RECEIVING_BYTES} bytes: send less in one request"
            self._refuse(errors.PayloadTooLarge(text) if held > _MOST_RECEIVING_BYTES else busy)
            if cycle is self._exchange:
                cycle.chunks.clear()
            self._shared.receiving_bytes -= held  # at once, so that other requests are not rejected
            self._held_bytes = 0

    def on_headers_complete(self) -> None:
        if self._refused:
            raise _Ended  # the parser stops here, and the rest of the bytes is ignored
        if len(self.pipeline) >= _MOST_PIPELINED:
            self._refuse(TooManyRequests(f"more than {_MOST_PIPELINED} requests wait on one connection: send fewer"))
            return
        if self.url[:1] != b"/" and not self._names_its_host():
            self._refuse(AmbiguousRequest("the request line and the Host header name different hosts: send one"))
            return
        if (self.kind != "requests" or not self.url.startswith(b"/producers/")) and not self._may_send():
            return
        idle = (self.cycle is None or self.cycle.response_complete) and not self._ordinary
        self._ordinary = max(0, self._ordinary - 1)
        checked = (self._chunk_bytes <= MAX_HEAD_BYTES and not self._head_bytes) or not self._head_is_long()
        exchange = self._fast_path.begin(self) if self._fast_path and idle and checked else None
        if exchange:
            self.cycle: Any = exchange
            self._running = self._exchange = exchange
        else:
            super().on_headers_complete()

    def _names_its_host(self) -> bool:
        """Return whether the authority of an absolute-form target equals Host (RFC 9112 section 3.2.2)."""
        found = _AUTHORITY.match(self.url)
        return not found or found[1].lower() == dict(self.headers).get(b"host", b"").lower()

    def _may_send(self) -> bool:
        if self.url.startswith(_ALWAYS_OPEN):
            self._limit.active(self)
            return True
        kind: Kind = "reads" if _READ.fullmatch(unquote_to_bytes(_QUERY.split(self.url, 1)[0])) else "requests"
        waits = self.kind == "reads" and self.is_answering
        # A client may commit on the connection it reads on, even at the limit of the other kind.
        if kind == self.kind or waits or self._limit.admit(self, kind) or self.kind == "reads":
            return True
        self._refuse(self._busy(kind))
        return False

    def _busy(self, kind: Kind = "requests") -> ServerBusy:
        setting = "http.max_connections" if kind == "requests" else "half of http.max_connections, for reads"
        limit = self._limit.limits[kind]
        return ServerBusy(f"limit of {limit} connections reached ({setting}): close some, or send again after a pause")

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        if self.cycle is self._exchange:
            self.cycle.chunks.append(body)
        else:
            self._body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        exchange = self.cycle
        if self._refused:
            return
        if exchange is not self._exchange:
            self._slices.count(self._body_bytes)
            self._body_bytes = 0
            super().on_message_complete()
            return
        exchange.more_body = False
        if self._fast_path and not self._fast_path.serve(exchange):
            self.cycle = self._exchange = None
            self._ordinary = _ORDINARY_REQUESTS
            super().on_headers_complete()
            body = b"".join(exchange.chunks)
            self._slices.count(len(body))
            super().on_body(body)
            super().on_message_complete()

    def _head_is_long(self) -> bool:
        return sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES

    @property
    def is_answering(self) -> bool:
        """Whether a response is due."""
        return self.cycle is not None and not self.cycle.response_complete

    def dismiss(self) -> None:
        """Close a connection without a request in favour of a new one."""
        if self.transport is None:
            self.opening.cancel()
        elif not self._refused:
            self._refused = True
            self._end(self._busy())
        if self.transport is not None:  # after the response is written; a close would wait for the client
            self.loop.call_soon(self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        self._refuse(AmbiguousRequest("the bytes are not a valid HTTP request, or are ambiguous"))

    def _refuse(self, error: HeadraceError) -> None:
        if self._refused:
            return
        self._refused = True
        cycle = self.cycle
        if cycle and not cycle.response_complete:
            if not cycle.more_body or cycle.response_started:
                cycle.keep_alive = False  # the earlier request is served, and the connection ends after it
                if cycle.more_body:  # the rest of a stream cannot be read
                    self.transport.close()
                return
            self._forget(cycle)
            if self.pipeline:  # a response now would count as that of an earlier request
                self.pipeline.popleft()
                last = self.pipeline[0][0] if self.pipeline else self._running
                last.keep_alive = False
                return
        self._end(error)

    @property
    def in_head(self) -> bool:
        """Whether the connection waits for a head: the first one, or the rest of one that has begun."""
        return self.cycle is None or self.scope is not self.cycle.scope

    def check_deadlines(self, now: float) -> None:
        """Close the connection if its client is too slow, or if its request takes too long."""
        cycle = self.cycle
        if cycle:
            self.hold(0)
            if not cycle.response_complete and not cycle.scope["state"].get(STREAMING):
                if self._timed[0] is not cycle:
                    self._timed = cycle, now
                if now - self._timed[1] > _REQUEST_SECONDS:
                    self._end_late(cycle)
                    return
        reason = self._waits_for()
        if reason != self._awaited[0] or self.scope is not self._awaited[1]:
            self._awaited = reason, self.scope, now, self.received_bytes
        elapsed = now - self._awaited[2]
        received = self.received_bytes - self._awaited[3]
        too_slow = reason != "body" or received < elapsed * _LEAST_BYTES_PER_SECOND
        limit = self._patience_seconds if reason == "reading" else _SLOW_SECONDS
        if reason and elapsed > limit and too_slow:
            self.transport.abort()

    def _waits_for(self) -> str:
        """Return what the client must do next: send the `head`, send the `body`, or read (`reading`); else empty."""
        cycle = self.cycle
        if self._waiting:
            return ""
        if self.in_head:
            return "head"
        if self.flow.write_paused:
            return "reading"
        if cycle.response_complete:  # idle: the keep-alive timer runs, unless bytes without a request have arrived
            return "" if self.timeout_keep_alive_task else "head"
        slow = self.flow.read_paused or cycle.scope["state"].get(STREAMING)
        return "body" if cycle.more_body and not slow else ""

    def _end_late(self, cycle: Any) -> None:
        """End a request that takes too long. If it is complete, respond that its outcome is unknown."""
        if cycle.more_body or cycle.response_started or self.pipeline:
            self.transport.abort()
            return
        self._refused = True
        self._forget(cycle)
        self._end(
            KafkaTimeout(f"timed out after {_REQUEST_SECONDS:g} s: the request may have been served, or may still be")
        )

    def _forget(self, cycle: Any) -> None:
        cycle.disconnected = True  # so that a later response is not sent
        cycle.message_event.set()

    def _end(self, error: HeadraceError) -> None:
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(error.body())
        head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += "".join(
            f"{name.decode()}: {value.decode()}\r\n" for name, value in retry_after(error.retry_after_seconds)
        )
        head += f"connection: close\r\nx-correlation-id: {new_correlation_id().decode()}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _is_one_probe(data: bytes) -> bool:
    """Return whether the bytes are exactly one health request; such bytes are always read at once."""
    return data.startswith(_PROBES) and len(data) < _PROBE_BYTES and data.find(b"\r\n\r\n") == len(data) - 4
