"""Kept-alive connections to one server, one request at a time on each.

The name of the server is resolved for every connection.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final

from headrace.config.backend import connection_problem
from headrace.sidecar.reactive.backend_connection import BackendResponse, Broken, Connection

_IDLE_SECONDS: Final = 30.0


class ConnectionPool:
    """Opens connections when they are needed, and keeps those that are fit for another request."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        *,
        max_response_bytes: int,
        forbidden: Callable[[str], str],
    ) -> None:
        """Prepare; no connection is opened.

        Args:
            host, port: The server.
            tls: Context of its connections; plain text when None.
            max_response_bytes: Largest body of a response.
            forbidden: Returns why an IP address must not be connected to, or nothing; called before every connection.
        """
        self._host = host
        self._port = port
        self._tls = tls
        self._max_response_bytes = max_response_bytes
        self._forbidden = forbidden
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._closed = False

    async def request(self, request: Sequence[bytes], end: float) -> BackendResponse:
        """Return the response to a request, or raise `Broken`, at the latest at `end` of the loop's clock.

        The request is repeated at once only if a kept connection turns out to be closed.
        """
        if kept := self._kept():
            try:
                return await self._exchange(kept, request, end)
            except Broken as cause:
                if not cause.silent:
                    raise
        return await self._exchange(await self._connect(end), request, end)

    def close(self) -> None:
        """Close every connection; requests in flight and later ones fail."""
        self._closed = True
        for connection in [*self._open]:
            connection.abort()
        self._open.clear()
        self._idle.clear()

    async def _exchange(self, connection: Connection, request: Sequence[bytes], end: float) -> BackendResponse:
        try:
            return await connection.ask(request, end)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.abort()
                self._open.discard(connection)

    def _kept(self) -> Connection | None:
        oldest = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since >= oldest:
                return connection
            connection.abort()
            self._open.discard(connection)
        return None

    async def _connect(self, end: float) -> Connection:
        if self._closed:
            raise Broken("the client is closed")
        loop = asyncio.get_running_loop()
        problem: OSError | None = None
        try:
            async with asyncio.timeout_at(end):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
            for index, address in enumerate(addresses):
                if why := self._forbidden(address):
                    raise Broken(f"its name resolves to an address that is not allowed: {why}")
                # An address that never responds must leave the others their share of the time.
                share = (end - loop.time()) / (len(addresses) - index)
                try:
                    async with asyncio.timeout(share):
                        return await self._open_to(address)
                except OSError as cause:
                    problem = cause
        except OSError as cause:
            problem = cause
        raise Broken(connection_problem(problem)) from problem

    async def _open_to(self, address: str) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._max_response_bytes),
            address,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls else None,
        )
        self._open.add(connection)
        return connection
