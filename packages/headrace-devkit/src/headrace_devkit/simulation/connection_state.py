"""What the system of a machine says of one end of a TCP connection: bytes that wait, and how it ended.

Source: Linux, `tcp_info` in include/uapi/linux/tcp.h, and `tcp_reset` in net/ipv4/tcp_input.c.
"""

import errno
import socket
import struct
from collections.abc import Callable

_TCP_INFO = struct.Struct("=B119xQ")
_ESTABLISHED, _CLOSED, _CLOSE_WAIT = 1, 7, 8


class ConnectionState:
    """How many bytes were written and have arrived, and what the peer did."""

    def __init__(self) -> None:
        self.written = 0
        self.arrived = 0
        """Bytes that the peer's system has."""
        self.acknowledged = 0
        """Bytes of which this system knows that."""
        self.state = _ESTABLISHED
        self.error = 0

    def arrives(self, size: int) -> None:
        self.arrived += size

    def peer_has_closed(self) -> None:
        if self.state == _ESTABLISHED:
            self.state = _CLOSE_WAIT

    def is_reset(self) -> None:
        if self.state != _CLOSED:
            self.error = errno.EPIPE if self.state == _CLOSE_WAIT else errno.ECONNRESET
            self.state = _CLOSED


class ConnectionSocket:
    """The socket of one end, as far as a process asks it."""

    def __init__(self, number: int, hears_peer: Callable[[], bool]) -> None:
        """Take its file descriptor; `hears_peer` returns whether what the peer's system acknowledges arrives."""
        self.number = number
        self.state = ConnectionState()
        self._hears_peer = hears_peer
        self._is_closed = False

    def fileno(self) -> int:
        return -1 if self._is_closed else self.number

    def close(self) -> None:
        self._is_closed = True

    def unacknowledged(self) -> int:
        state = self.state
        if self._hears_peer():
            state.acknowledged = state.arrived
        return state.written - state.acknowledged

    def getsockopt(self, level: int, option: int, _size: int = 0) -> int | bytes:
        if self._is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR):
            error, self.state.error = self.state.error, 0
            return error
        self.unacknowledged()
        return _TCP_INFO.pack(self.state.state, self.state.acknowledged)

    def setsockopt(self, *_option: object) -> None:
        """No option changes anything here."""
