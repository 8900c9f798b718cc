"""The HTTP server as a service: listens, accepts connections, and closes those of slow clients.

It accepts all waiting connections in each turn of the event loop. uvloop's server accepts one per turn, as libuv
does since 1.45 (its pull request 3696). With long turns, a thousand clients would then wait for seconds.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any, Final

from headrace.config.http import HttpConfig
from headrace.errors import EnvironmentProblem
from headrace.http.application import Application
from headrace.http.connection import ClientConnection
from headrace.http.request import Kind
from headrace.http.shared import RESERVED_CONNECTIONS, Shared
from headrace.runtime import Clock, Deadline, Service, SystemClock
from headrace.runtime.held_port import listen_error
from headrace.runtime.memory import give_back_memory

_BACKLOG = 65_535  # the kernel lowers it to net.core.somaxconn
_KEEP_ALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 60),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 10),
)
_GRACE_SECONDS = 1.0
"""How long responses in progress may take when the server stops."""
_LOOK_SECONDS = 1.0
_OTHER_FILES: Final = 256
"""File descriptors for Kafka, backends, workers and files."""
_ACCEPTS_PER_TURN: Final = 128
_FULL_SECONDS: Final = 0.01
_HANDSHAKE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 1.0
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_SETTINGS: Final = {"http": "http.port", "management": "http.management.port"}

log = logging.getLogger(__name__)


def allow_open_files(connections: int) -> None:
    """Raise the soft limit of open files to the hard one; EnvironmentProblem if that is too low."""
    needed = connections + RESERVED_CONNECTIONS + _OTHER_FILES
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard not in (resource.RLIM_INFINITY, max(hard, needed)):
        raise EnvironmentProblem(
            f"http.max_connections allows {connections} connections, including reads; they need {needed} open files, "
            f"and the limit is {hard}: "
            "raise the limit (ulimit -Hn, LimitNOFILE= of systemd) or lower http.max_connections"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class WebService(Service):
    """Listens at `http.host:http.port` and serves an application."""

    def __init__(
        self,
        settings: HttpConfig,
        application: Application,
        *,
        name: str = "http",
        tls: ssl.SSLContext | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(name)
        self._clock = clock or SystemClock()
        self._scheme = "https" if tls else "http"
        self._settings = settings
        self._application = application
        self.before_drain: list[Callable[[], None]] = []
        """Called before the wait for requests in progress; ends those that would take long."""
        self._tls = tls
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None
        limits: dict[Kind, int] = {"requests": settings.max_connections, "reads": settings.max_readers}
        self.shared = Shared(limits, application, self._scheme, self.spawn)
        self.url = ""
        """The URL once started, with the actual port if the setting is 0."""
        self.reuse_port = False
        """Whether other processes of this machine listen on the same port. Set before it is claimed."""

    def claim(self) -> None:
        """Bind the address before other services start. Clients that connect are served after `start`.

        Raises:
            PortTaken: Another program uses the port.
            EnvironmentProblem: The address is not usable, or the limit of open files is too low.
        """
        self._listener = self._bind()

    async def start(self) -> None:
        """Start serving. Raises the errors of `claim` if that was not called."""
        listener = self._listener or self._bind()
        host, port = listener.getsockname()[:2]
        self.url = f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"
        self.shared.tick()
        self._acceptor = Acceptor(listener, self.shared, self._tls)
        self.keep(self._check_deadlines, "deadlines")
        if self.name != "http":
            return
        limit = self.shared.limit
        for kind in limit.admitted:
            self.publish("headrace_http_connections", functools.partial(limit.admitted.__getitem__, kind), kind=kind)
        self.keep(lambda: give_back_memory(self._clock), "memory")

    async def drain(self, deadline: Deadline) -> None:
        self._application.gate.draining = True
        for call in self.before_drain:
            call()
        if self._application.forwarder:
            self._application.forwarder.ending.set()
        await self._application.gate.drain(deadline)

    async def stop(self) -> None:
        if self._acceptor:
            self._acceptor.close()
            self._acceptor = None
        for connection in list(self.shared.connections):
            connection.shut_down()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.shared.no_connections(), _GRACE_SECONDS)
        await super().stop()
        for connection in list(self.shared.connections):
            connection.transport.abort()

    async def _check_deadlines(self) -> None:
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            self.shared.tick()
            check_deadlines(self.shared.connections, self._clock.monotonic())

    def _bind(self) -> socket.socket:
        files_per_reader = 2 if self._scheme == "https" else 1  # see `Arrival`
        allow_open_files(self._settings.max_connections + files_per_reader * self._settings.max_readers)
        host, port = self._settings.host, self._settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=self.reuse_port)
            for option, value in _KEEP_ALIVE:  # inherited by connections: a client may disappear without closing
                listener.setsockopt(*option, value)
            return listener
        except OSError as cause:
            setting = _SETTINGS.get(self.name, f"the port of {self.name}")
            raise listen_error(cause, host, port, setting, self.name) from cause


def check_deadlines(connections: Iterable[Any], now: float) -> None:
    """Close the connections of slow clients, and end requests that take too long."""
    for connection in list(connections):
        connection.check_deadlines(now)


class Acceptor:
    """Accepts connections of one listener."""

    def __init__(self, listener: socket.socket, shared: Shared, tls: ssl.SSLContext | None) -> None:
        """Start accepting."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._shared = shared
        self._tls = tls
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop accepting."""
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if not self._shared.limit.has_capacity():
                self._pause(_FULL_SECONDS)
                return
            try:
                client, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as cause:
                if cause.errno not in _EXHAUSTED:
                    continue  # the client has closed it already
                log.error("failed to accept a connection, will retry in %g s: %s", _PAUSE_SECONDS, cause)
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
        connection = ClientConnection(self._shared)
        task = self._shared.spawn(self._connect(connection, client), "connection")

        def opened(_: object) -> None:
            if connection.transport is None:  # the handshake failed or was cancelled
                client.close()
                self._shared.limit.closed(connection)

        task.add_done_callback(opened)
        connection.opening = task
        self._shared.limit.opened(connection)

    async def _connect(self, connection: ClientConnection, client: socket.socket) -> None:
        limit = _HANDSHAKE_SECONDS if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, client, ssl=self._tls, ssl_handshake_timeout=limit
            )
        except OSError as cause:
            log.debug("failed to open a connection: %s", cause)
        except Exception as cause:  # noqa: BLE001 boundary: a client's connection must not end the service
            log.warning("failed to open a connection; others are not affected: %r", cause)
