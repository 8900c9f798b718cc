"""Whether the client of a connection has received a response that was written to it.

The operating system buffers responses of several MB, and a client may close the connection before it has read them.
Then its system resets the connection; otherwise it ends it. Both may follow each other: a client that has closed
responds to our last TLS message with a reset. Linux tells which was first: after an end, a reset is EPIPE and not
ECONNRESET.

Source: Linux, `tcp_reset` in net/ipv4/tcp_input.c, `struct tcp_info` in include/uapi/linux/tcp.h, TCP_CORK in tcp(7).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import sys
import termios
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from headrace.http.flow import Flow
from headrace.http.request import ResponseWriter

_PATIENCE_SECONDS: Final = 0.5
"""Clients delay acknowledgements by up to 0.04 s."""
_GOODBYE_SECONDS: Final = 0.05
"""Between the end of TLS and the end of the connection, which clients send together."""
_GOODBYE_BYTES: Final = 31
"""Largest size of our own TLS close message."""
_FIRST_PAUSE_SECONDS: Final = 0.001
_PAUSE_SECONDS: Final = 0.01
_TCP_INFO: Final = struct.Struct("=B119xQ")
_CLOSED: Final = 7
_CLOSE_WAIT: Final = 8


class _Connection(NamedTuple):
    """What the system says of a connection."""

    state: int
    acknowledged: int
    """Bytes since it was opened."""


class _Duplicate(socket.socket):
    """A second descriptor of a connection. Closed with its last user, because a loop that stops reports no end."""

    def __del__(self) -> None:
        self.close()


class Arrival:
    """Tracks one response; may be used after its connection has ended."""

    def __init__(self, transport: asyncio.Transport, response: ResponseWriter, last: Arrival | None) -> None:
        """Start when a response is written.

        Args:
            transport: That of the connection.
            response: That response.
            last: The arrival of an earlier response on the same connection.
        """
        self._response: ResponseWriter | None = response
        self._end: int | None = None  # bytes of the connection with this response; None until the system has all of it
        self._patience_seconds = 0.0  # after a goodbye
        self._is_ending = False
        self._received: bool | None = None  # None until it is certain
        if last:
            self._socket: Any = last.superseded()
        else:
            self._socket = transport.get_extra_info("socket")
            if transport.get_extra_info("ssl_object") is not None:  # TLS closes its own descriptor too early
                self._socket = _Duplicate(fileno=os.dup(self._socket.fileno()))

    def superseded(self) -> Any:
        """Store the state before the next response is written, and return the shared socket."""
        if self._received is None:
            self._received = self._has_arrived()
        return self._socket

    async def taken(self, transport: asyncio.Transport, flow: Flow) -> bool:
        """Wait until the operating system has the response; return False if the connection was closed before."""
        tls = isinstance(self._socket, _Duplicate)
        # At a limit of 0, TLS would pause even with an empty buffer, until more bytes arrive.
        transport.set_write_buffer_limits(1 if tls else 0, 0)
        try:
            await flow.drain()
            if not transport.is_closing():
                if tls:
                    await self._taken_by_tls(transport, flow)
                else:
                    self._end = self._written()
        finally:
            if not transport.is_closing():  # otherwise uvloop raises RuntimeError
                transport.set_write_buffer_limits()
        return self._end is not None

    async def _taken_by_tls(self, transport: asyncio.Transport, flow: Flow) -> None:
        """Wait until the transport below TLS has sent everything: then the system would accept more.

        The buffer of that transport is not accessible. A client may read the response and close before the wait is
        over; then the end of the connection decides.
        """
        looks = 0
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLOUT)
        flow.pause_writing()  # so the limit for clients that do not read applies here, too
        try:
            while looks < 2:  # the transport may write between two checks
                await asyncio.sleep(_PAUSE_SECONDS if looks < 0 else 0)
                ends = transport.is_closing()
                if self._is_ending or (ends and self._end is not None):
                    return
                self._end = self._written() - (_GOODBYE_BYTES if ends else 0) if poll.poll(0) else None
                looks = -1 if self._end is None else looks + 1
        finally:
            flow.resume_writing()

    def _written(self) -> int:
        return self._look().acknowledged + self._queued()

    def await_close(self) -> None:
        """Let a client that requested the end of the connection close it itself: how it closes is the evidence."""
        if response := self._response:
            options = response.head.headers.get(b"connection", b"").lower().split(b",")
            if b"close" in [option.strip() for option in options] or response.head.version == "1.0":
                response.keep_alive = True  # if we ended the stream, each close would look like a reset

    def client_ends(self) -> None:
        """Delay our TLS close message briefly: if a client closes without reading it, its system sends a reset."""
        if isinstance(self._socket, _Duplicate):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            self._patience_seconds = _GOODBYE_SECONDS

    def we_end(self) -> None:
        """Store the state before this side ends the connection, because the client may reset it then."""
        self._received = self._has_arrived() or None

    def ended(self, error: Exception | None) -> None:
        """Decide by how the connection ended."""
        self._response = None
        self._is_ending = True
        found = self._received
        if found is None:
            found = False
            with contextlib.suppress(OSError, ValueError):
                found = self._judge_end(error)
        if found is None:
            self._patience_seconds -= _PAUSE_SECONDS
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self.ended, error)
            return
        self._received = found
        if isinstance(self._socket, _Duplicate):
            self._socket.close()

    def _judge_end(self, error: Exception | None) -> bool | None:
        """Return whether the client has received the whole response; None if its system may still report it."""
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        state = self._look().state
        if state == _CLOSED:
            return self._has_all() and errno.EPIPE in (code, error.errno if isinstance(error, OSError) else 0)
        if self._patience_seconds > 0 and not (self._has_all() and state == _CLOSE_WAIT):
            return None
        return self._has_all()

    async def received(
        self, patience_seconds: float = _PATIENCE_SECONDS, on_progress: Callable[[], object] = lambda: None
    ) -> bool:
        """Return whether the client has received the whole response.

        Args:
            patience_seconds: How long to wait while the client acknowledges nothing.
            on_progress: Called when it has acknowledged a part.
        """
        acknowledged = -1
        pause = _FIRST_PAUSE_SECONDS
        now = asyncio.get_running_loop().time
        until = now() + patience_seconds
        while now() < until:
            if self._received is not None:
                return self._received
            if not self._is_ending:
                if self._has_arrived():
                    return True
                seen = self._look().acknowledged
                if seen > acknowledged:
                    acknowledged = seen
                    until = now() + patience_seconds
                    on_progress()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS)
        return False

    def _has_arrived(self) -> bool:
        """Return whether the client's system has the whole response, and has not reset the connection."""
        return self._has_all() and self._look().state != _CLOSED

    def _has_all(self) -> bool:
        return self._end is not None and (not self._queued() or self._look().acknowledged >= self._end)

    def _queued(self) -> int:
        """Return how many written bytes are not acknowledged."""
        queued = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(queued, sys.byteorder)

    def _look(self) -> _Connection:
        found: bytes = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        return _Connection(*_TCP_INFO.unpack(found))
