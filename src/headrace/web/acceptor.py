"""Accepts connections: all that wait, in each turn of the event loop; and the limit of how many may send requests.

uvloop's own server accepts one connection per turn, as libuv does since 1.45 (its pull request 3696). With long turns a
thousand clients that connect at once would wait for seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import EnvironmentProblem

if TYPE_CHECKING:
    from headrace.web.connection import Connection

log = logging.getLogger(__name__)

RESERVED_CONNECTIONS: Final = 512
"""Open beyond `http.max_connections` at most: for health requests, and for clients that are told 503."""
_OTHER_FILES: Final = 256
"""Descriptors for all else: Kafka, backends, workers, files."""
_ACCEPTS_PER_TURN: Final = 128
_TIME_TO_SEND_SECONDS: Final = 0.2
"""A client that has just connected is not told 503 while its request is on its way: the answer could be lost."""
_FULL_SECONDS: Final = 0.01
_HANDSHAKE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 1.0
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


def allow_open_files(connections: int) -> None:
    """Raise the soft limit of open files to the hard one.

    Raises:
        EnvironmentProblem: The hard limit is too low for so many connections.
    """
    needed = connections + RESERVED_CONNECTIONS + _OTHER_FILES
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard not in (resource.RLIM_INFINITY, max(hard, needed)):
        raise EnvironmentProblem(
            f"http.max_connections is {connections}, which needs {needed} open files, and the limit is {hard}: "
            "raise the limit (ulimit -Hn, LimitNOFILE= of systemd) or lower http.max_connections"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ConnectionLimit:
    """Admits so many connections to send requests; of the others it closes the oldest to make room for new ones."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._admitted = 0
        self._others: dict[Connection, float] = {}
        """Not admitted: they sent nothing, half a head, or only health requests. The least recently active first."""

    def has_room(self) -> bool:
        """Return whether one more may be opened; for it the oldest is closed, if it had time to send a request."""
        if self._admitted + len(self._others) < self.limit + RESERVED_CONNECTIONS:
            return True
        before = time.monotonic() - _TIME_TO_SEND_SECONDS
        oldest = next((one for one, at in self._others.items() if at > before or not one.is_answering), None)
        if oldest is None or self._others[oldest] > before:
            return False
        del self._others[oldest]
        oldest.dismiss()
        return True

    def opened(self, connection: Connection) -> None:
        """Count a new connection."""
        self._others[connection] = time.monotonic()

    def admit(self, connection: Connection) -> bool:
        """Return whether a connection may send requests until it is closed."""
        if self._admitted >= self.limit:
            return False
        self._others.pop(connection, None)
        self._admitted += 1
        return True

    def active(self, connection: Connection) -> None:
        """Note that a connection which is not admitted has sent a request."""
        if self._others.pop(connection, None) is not None:
            self.opened(connection)

    def closed(self, connection: Connection) -> None:
        """Count a connection no longer."""
        self._others.pop(connection, None)
        if connection.admitted:
            connection.admitted = False
            self._admitted -= 1


class Acceptor:
    """Accepts at one listener, in the place of the event loop's server."""

    def __init__(
        self,
        listener: socket.socket,
        limit: ConnectionLimit,
        make: Callable[[], Connection],
        spawn: Spawn,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Prepare; `make` returns the protocol of a new connection."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._limit = limit
        self._make = make
        self._spawn = spawn
        self._tls = tls
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """Return at once: the server waits for its connections itself."""

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if not self._limit.has_room():
                self._pause(_FULL_SECONDS)
                return
            try:
                client, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as cause:
                if cause.errno not in _EXHAUSTED:
                    continue  # this client is gone already
                log.error("no connection can be accepted for %g s: %s", _PAUSE_SECONDS, cause)
                self._pause(_PAUSE_SECONDS)
                return
            client.setblocking(False)
            self._open(client)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, self._accept_again)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _open(self, client: socket.socket) -> None:
        connection = self._make()
        task = self._spawn(self._connect(connection, client), "connection")

        def opened(_: object) -> None:
            if connection.transport is None:  # the handshake failed, or was given up
                client.close()
                self._limit.closed(connection)

        task.add_done_callback(opened)
        connection.opening = task
        self._limit.opened(connection)

    async def _connect(self, connection: Connection, client: socket.socket) -> None:
        limit = _HANDSHAKE_SECONDS if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, client, ssl=self._tls, ssl_handshake_timeout=limit
            )
        except OSError as cause:
            log.debug("a connection could not be opened: %s", cause)
        except Exception as cause:  # noqa: BLE001 boundary: no client's connection ends the service
            log.warning("a connection could not be opened, the others go on: %r", cause)
