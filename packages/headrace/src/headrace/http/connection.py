"""One connection of a client: its transport, the limits it counts for, and when it is too slow.

Source: RFC 9112, HTTP/1.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from headrace.errors import HeadraceError, KafkaTimeout
from headrace.http.arrival import Arrival
from headrace.http.flow import Flow
from headrace.http.messages import last_response
from headrace.http.received_requests import RequestParser, RequestQueue
from headrace.http.request import HttpRequest, Kind, ResponseWriter
from headrace.http.shared import OPEN_PATHS, Shared, is_one_probe

_REQUEST_SECONDS: Final = 60.0
"""Longest time for a request, from its head to its response, unless it is a stream."""
_SLOW_SECONDS: Final = 10.0
"""Longest time for a head, and for `_LEAST_BYTES` of a body or of a response that is read."""
_IDLE_SECONDS: Final = 75.0
"""Longest time between two requests."""
_LEAST_BYTES: Final = 10_240
"""Bytes that begin the time anew."""
_LINGER_SECONDS: Final = 1.0


class _Deadlines:
    """Decides when a request takes too long, and when its client is too slow."""

    def __init__(self) -> None:
        # This request
        self._request: HttpRequest | None = None
        self._first_seen_at = 0.0
        # What the client must do
        self._reason = ""
        self._head_number = 0
        self._since = 0.0
        self._moved_bytes = 0
        """The bytes that had moved by then."""
        # This response
        self.patience_seconds = _SLOW_SECONDS
        """Longest time for reading it."""

    def is_late(self, request: HttpRequest, now: float) -> bool:
        """Return whether the latest request takes too long."""
        if self._request is not request:
            self._request = request
            self._first_seen_at = now
        return now - self._first_seen_at > _REQUEST_SECONDS

    def is_slow(self, reason: str, head_number: int, moved_bytes: int, now: float) -> bool:
        """Return whether the client takes too long for what it must do.

        Args:
            reason: That; see `ClientConnection`.
            head_number: The request for which it must do that.
            moved_bytes: How many bytes have moved by now.
            now: The present, by the monotonic clock.
        """
        is_new = reason != self._reason or head_number != self._head_number
        if is_new or moved_bytes - self._moved_bytes >= _LEAST_BYTES:
            self._reason = reason
            self._head_number = head_number
            self._since = now
            self._moved_bytes = moved_bytes
        if not reason:
            return False
        longest = {"idle": _IDLE_SECONDS, "reading": self.patience_seconds}.get(reason, _SLOW_SECONDS)
        return now - self._since > longest

    def wait_for_reading(self, patience_seconds: float | None) -> None:
        """Let the client read a response at its own pace, until `restart`; by default as long as a request may take."""
        self.patience_seconds = _REQUEST_SECONDS if patience_seconds is None else patience_seconds

    def restart(self) -> None:
        """Begin the time anew for what the client must do next."""
        self.patience_seconds = _SLOW_SECONDS
        self._reason = ""
        self._head_number = 0

    def forget_request(self) -> None:
        """Forget the latest request, which refers to its connection."""
        self._request = None


class _Peer(NamedTuple):
    address: tuple[str, int] | None
    certificate: Mapping[str, Any] | None


class ClientConnection(asyncio.Protocol):
    """The protocol of one connection."""

    def __init__(self, shared: Shared) -> None:
        # This server
        self.shared = shared
        # This connection
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until it is connected
        self.opening: asyncio.Task[None] | None = None
        """Completes with the TLS handshake."""
        self.peer = _Peer(None, None)
        self.kind: Kind | None = None
        """The limit that it counts for; None until its first request other than health."""
        self.is_refused = False
        """Whether no client gets a response any more."""
        self._waiting: tuple[bytes, ...] = ()
        """Bytes to read in a later turn."""
        self._deadlines = _Deadlines()
        self._arrival: Arrival | None = None
        """Of the latest response that the client must receive."""
        self.flow: Flow = None  # type: ignore[assignment]  # until it is connected
        self.requests = RequestQueue(self)
        self._parser = RequestParser(self)

    # The transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.shared.connections.add(self)
        self.transport = transport
        self.flow = Flow(transport)
        address = transport.get_extra_info("peername")
        self.peer = _Peer(
            (str(address[0]), int(address[1])) if isinstance(address, tuple | list) else None,
            transport.get_extra_info("peercert") or None,
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.requests.lost()
        if self._arrival:
            self._arrival.ended(exc)
        self.flow.resume_writing()
        self.shared.lost(self)
        # Each refers to this connection: a cycle that only a collection would free.
        self._parser.close()
        self._deadlines.forget_request()
        self._arrival = None

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def data_received(self, data: bytes) -> None:
        self.requests.is_idle = False
        if not self._waiting and (self.shared.slices.has_time() or is_one_probe(data)):
            self._parser.read(data)
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
        request = self.requests.latest
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
            if not self.transport.is_closing():
                self._parser.read(data)
        if len(waiting) > 1 and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    # What its requests need

    def may_send(self, url: bytes) -> bool:
        """Return whether it may send a request to a URL, which the limit of its kind decides; if not, it ends."""
        limit = self.shared.limit
        if url.startswith(OPEN_PATHS):
            limit.active(self)
            return True
        kind: Kind = "reads" if self.shared.targets.is_long_poll(url) else "requests"
        waits = self.kind == "reads" and self.is_answering
        # A client may commit on the connection it reads on, even at the limit of the other kind.
        if kind == self.kind or waits or limit.admit(self, kind) or self.kind == "reads":
            return True
        self.refuse(limit.busy(kind))
        return False

    async def written(self, response: ResponseWriter, patience_seconds: float | None) -> Arrival | None:
        """Wait until the operating system has what was sent; None if the connection was closed or it timed out."""
        self._deadlines.wait_for_reading(patience_seconds)
        if self.transport.is_closing():
            return None
        try:
            self._arrival = arrival = Arrival(self.transport, response, self._arrival)
            return arrival if await arrival.taken(self.transport, self.flow) else None
        except (OSError, ValueError):  # it is closed, and the loop has not reported that yet
            return None
        finally:
            self._deadlines.restart()

    @property
    def is_answering(self) -> bool:
        """Whether a response is due."""
        return self.requests.is_answering

    # Ends

    def shut_down(self) -> None:
        """Close the connection after the response that is due."""
        request = self.requests.latest
        if request and not request.response.is_complete:
            request.response.keep_alive = False
        else:
            self.transport.close()

    def dismiss(self) -> None:
        """Close a connection without a request in favour of a new one."""
        if self.transport is None:
            if self.opening:
                self.opening.cancel()
            return
        if not self.is_refused:
            self.is_refused = True
            self._end(self.shared.limit.busy("requests"))
        # After the response is written; a close would wait for the client.
        asyncio.get_running_loop().call_soon(self.transport.abort)

    def refuse(self, error: HeadraceError) -> None:
        """End the connection with an error, after the responses that are due."""
        if not self.is_refused:
            self.is_refused = True
            if self.requests.refuse_latest():
                self._end(error)

    def _end(self, error: HeadraceError) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(last_response(error))
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, self.transport.close)

    def check_deadlines(self, now: float) -> None:
        """Close the connection if its client is too slow, or if its request takes too long."""
        request = self.requests.latest
        if request:
            self.requests.hold(0)
            if not request.response.is_complete and not request.is_streaming and self._deadlines.is_late(request, now):
                self._end_late(request)
                return
        reason = self._waits_for()
        moved_bytes = 0
        if reason == "body":
            moved_bytes = self._parser.received_bytes
        elif reason == "reading":
            moved_bytes = -self.transport.get_write_buffer_size()
        if not self._deadlines.is_slow(reason, self._parser.heads, moved_bytes, now):
            return
        if reason == "idle":
            self._end_idle()
        else:
            self.transport.abort()

    def _waits_for(self) -> str:
        """Return what the client must do next: send the `head`, send the `body`, or read (`reading`); else empty.

        `idle` is between two requests.
        """
        request = self.requests.latest
        if self._waiting:
            return ""
        if self._parser.in_head or request is None:
            return "head"
        if self.flow.write_paused:
            return "reading"
        if request.response.is_complete:
            return "idle" if self.requests.is_idle else "head"
        is_slow = self.flow.read_paused or request.is_streaming
        return "body" if request.body.has_more and not is_slow else ""

    def _end_idle(self) -> None:
        if self._arrival:
            self._arrival.we_end()
        self.transport.close()

    def _end_late(self, request: HttpRequest) -> None:
        """End a request that takes too long. If it is complete, respond that its outcome is unknown."""
        if request.body.has_more or request.response.status or self.requests.has_waiting:
            self.transport.abort()
            return
        self.is_refused = True
        request.abandon()
        text = f"timed out after {_REQUEST_SECONDS:g} s: the request may have been served, or may still be"
        self._end(KafkaTimeout(text))
