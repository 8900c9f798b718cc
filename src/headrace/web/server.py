"""The HTTP server as a service."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn

from headrace.config.http import HttpConfig
from headrace.errors import EnvironmentProblem, PortTaken
from headrace.lifecycle import Clock, Deadline, Service, SystemClock
from headrace.lifecycle.memory import give_back_memory
from headrace.web.acceptor import Acceptor, ConnectionLimit, Spawn, allow_open_files
from headrace.web.application import Application
from headrace.web.connection import Connection, Deadlines, Receiving
from headrace.web.hot_path import HotPath
from headrace.web.slices import Slices

_BACKLOG = 65_535  # the kernel lowers it to net.core.somaxconn
_KEEP_ALIVE_SECONDS = 75
_KEEP_ALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 60),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 10),
)
_GRACE_SECONDS = 1
_LOOK_SECONDS = 1.0


class WebService(Service):
    """Listens at `http.host:http.port` and serves an application."""

    def __init__(
        self,
        settings: HttpConfig,
        application: Application,
        name: str = "http",
        *,
        tls: ssl.SSLContext | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(name)
        self._clock = clock or SystemClock()
        self._scheme = "https" if tls else "http"
        self._settings = settings
        self._application = application
        self._task: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._server = _Server(
            uvicorn.Config(
                application,
                http=Connection,
                ssl_context_factory=(lambda _config, _default: tls) if tls else None,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
                backlog=_BACKLOG,
            )
        )
        self._server.hot_path = application.hot_path
        self._server.receiving, self._server.slices = Receiving(), Slices()
        self._server.limit = ConnectionLimit(settings.max_connections)
        self._server.spawn = self.spawn
        self.url = ""
        """Where it listens, once started; with the real port where 0 was asked for."""

    def claim(self) -> None:
        """Take the address before anything else begins; who connects is served once this service has started.

        Raises:
            PortTaken: Another program listens there.
            EnvironmentProblem: The address cannot be listened on, or the limit of open files is too low.
        """
        self._listener = self._bind()

    async def start(self) -> None:
        """Begin to serve; raises what `claim` does if that was not called."""
        listener = self._listener or self._bind()
        host, port = listener.getsockname()[:2]
        self.url = f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"
        self._application.streams.spawn = self.spawn
        self._task = self.spawn(self._server.serve(sockets=[listener]), "serve")
        self.spawn(self._end_the_slow(), "deadlines")
        self.spawn(give_back_memory(self._clock), "memory")

    async def drain(self, deadline: Deadline) -> None:
        await self._application.gate.drain(deadline)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._task), 2 * _GRACE_SECONDS)
        await super().stop()

    async def _end_the_slow(self) -> None:
        deadlines = Deadlines()
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            deadlines.look(self._server.server_state.connections, self._clock.monotonic())

    def _bind(self) -> socket.socket:
        allow_open_files(self._settings.max_connections)
        host, port = self._settings.host, self._settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            for option, value in _KEEP_ALIVE:  # connections inherit them: a client may vanish without a word
                listener.setsockopt(*option, value)
            return listener
        except OSError as cause:
            place = {"host": host, "port": port}
            if cause.errno == errno.EADDRINUSE:
                text = "another program listens there. End it, or set http.port to another one (0 picks a free one)"
                raise PortTaken(f"cannot listen on {host}:{port}: {text}", **place) from cause
            text = f"{cause.strerror or cause}. Correct http.host and http.port"
            raise EnvironmentProblem(f"cannot listen on {host}:{port}: {text}", **place) from cause


class _Server(uvicorn.Server):
    """The server without its own signal handlers, because the supervisor stops it, and with its own accepting."""

    hot_path: HotPath | None = None
    receiving: Receiving
    slices: Slices
    limit: ConnectionLimit
    spawn: Spawn

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self.servers: list[Any] = [
            Acceptor(listener, self.limit, self._connection, self.spawn, self.config.ssl) for listener in sockets or ()
        ]

    def _connection(self) -> Connection:
        connection = Connection(self.config, self.server_state, self.lifespan.state)
        connection.hot_path = self.hot_path
        connection.receiving, connection.limit, connection.slices = self.receiving, self.limit, self.slices
        return connection

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
