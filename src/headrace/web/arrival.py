"""Whether the client of a connection has received an answer that was written to it.

The operating system takes answers of some MB, and a client may close the connection before it has read them. Then its
system resets the connection; until it acknowledges, the bytes wait in the send queue.
"""

import asyncio
import contextlib
import fcntl
import select
import sys
import termios
from typing import Any, Final

_TRIES: Final = 50
_TRY_SECONDS: Final = 0.01
"""Clients delay acknowledgements by up to 0.04 s."""


class Arrival:
    """Belongs to one answer, and outlives its connection."""

    def __init__(self, transport: asyncio.Transport, cycle: Any) -> None:
        """Take the connection's transport, and uvicorn's object for the answer."""
        self._transport: asyncio.Transport | None = transport
        self._cycle = cycle
        self._is_lost = False

    def await_close(self) -> None:
        """Leave it to a client to close the connection that it wants to end: how it does so tells the rest."""
        if self._cycle:
            scope = self._cycle.scope
            asks = dict(scope["headers"]).get(b"connection", b"").lower() == b"close"
            if asks or scope["http_version"] == "1.0":
                self._cycle.keep_alive = True  # and no end of the stream: with that, each close looks like a reset

    def ended(self, error: Exception | None) -> None:
        """Keep what the end of the connection says; with TLS nothing, because its own last messages may be lost."""
        is_plain = self._transport is not None and self._transport.get_extra_info("ssl_object") is None
        is_cut = isinstance(error, ConnectionError) or self._is_reset() or self._unacknowledged() > 0
        self._is_lost = is_plain and is_cut
        self._transport = self._cycle = None

    async def received(self) -> bool:
        """Return whether the client has received all of it; for that, wait a moment for its acknowledgement."""
        for _ in range(_TRIES):
            if self._transport is None:
                return not self._is_lost
            if self._is_reset():
                return False
            if not self._unacknowledged():
                return True
            await asyncio.sleep(_TRY_SECONDS)
        return False

    @property
    def _socket(self) -> int:
        return int(self._transport.get_extra_info("socket").fileno()) if self._transport else -1

    def _is_reset(self) -> bool:
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError):
            poll.register(self._socket, 0)
            return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
        return False

    def _unacknowledged(self) -> int:
        """Return the number of bytes that the client's system has not acknowledged."""
        with contextlib.suppress(OSError, ValueError):
            return int.from_bytes(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return 0
