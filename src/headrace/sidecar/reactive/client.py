"""A client of one backend: kept-alive connections, one request at a time on each, one deadline per request.

Names are resolved for every connection, redirects are never followed, nothing is decompressed.
Source: RFC 9110, RFC 9112; building-blocks.md, Consume -> JSON -> HTTP POST.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlsplit

from headrace.errors import DestinationUnavailable
from headrace.sidecar.reactive.connection import Answer, Broken, Connection

_IDLE_SECONDS: Final = 30.0
_NAMES: Final = 1000
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F)))
_OURS: Final = re.compile(
    "host|te|trailer|expect|upgrade|(proxy-)?connection|keep-alive|content-length|(transfer|accept)-encoding"
)
"""Headers that say how a request is read; they come from here alone."""


class Client:
    """Asks one server; connections are opened when needed and kept."""

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float,
        max_answer_bytes: int,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        forbidden: Callable[[str], str] = lambda address: "",
    ) -> None:
        """Prepare; nobody is contacted.

        Args:
            url: Where requests are posted.
            timeout_seconds: Time of one request as a whole, the opening of a connection included.
            max_answer_bytes: Largest body of an answer.
            headers: Sent with every request.
            tls: Context of `https` connections; the system's authorities when None.
            forbidden: Says why an IP address must not be connected to, or nothing; asked before every connection.
        """
        parts = urlsplit(url)
        self.place = f"{parts.scheme}://{parts.netloc}{parts.path}"
        """The URL without its query, which may hold secrets."""
        self._host = parts.hostname or ""
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._target = _target(parts.path, parts.query)
        self._timeout_seconds = timeout_seconds
        self._max_answer_bytes = max_answer_bytes
        self._forbidden = forbidden
        self._starts: dict[str, str] = {}
        fixed = headers or {}
        self._fixed = f"Host: {parts.netloc}\r\nAccept-Encoding: identity\r\n{self._lines(fixed.items())}"
        self._starts = {name.lower(): "" for name in fixed}
        self._post = f"POST {self._target} HTTP/1.1\r\n{self._fixed}"
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    async def post(self, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> Answer:
        """Return the answer to a request; it is repeated at once only if a kept connection turns out to be closed.

        Args:
            body: What is sent.
            headers: Headers of this request. Control and other than ASCII characters in values are percent-encoded;
                left out are names that are no HTTP names, that say how a request is read, or that are set for every
                request.

        Raises:
            DestinationUnavailable: No complete answer came within the limits of time and size.
        """
        head = f"{self._post}{self._lines(headers)}Content-Length: {len(body)}\r\n\r\n".encode("ascii")
        return await self._ask((head, body))

    async def get(self, path: str) -> Answer:
        """Return the answer to `GET path` of the same server, with or without a query.

        Raises:
            DestinationUnavailable: No complete answer came within the limits of time and size.
        """
        parts = urlsplit(path)
        return await self._ask(
            (f"GET {_target(parts.path, parts.query)} HTTP/1.1\r\n{self._fixed}\r\n".encode("ascii"),)
        )

    def close(self) -> None:
        """Close every connection; requests under way end as unavailable."""
        for connection in [*self._open]:
            connection.abort()
        self._open.clear()
        self._idle.clear()

    async def _ask(self, request: Sequence[bytes]) -> Answer:
        end = asyncio.get_running_loop().time() + self._timeout_seconds
        try:
            if kept := self._kept():
                try:
                    return await self._exchange(kept, request, end)
                except Broken as cause:
                    if not cause.silent:
                        raise
            return await self._exchange(await self._connect(end), request, end)
        except Broken as cause:
            raise DestinationUnavailable(f"waiting for the backend {self.place}: {cause}", url=self.place) from cause

    async def _exchange(self, connection: Connection, request: Sequence[bytes], end: float) -> Answer:
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
        loop = asyncio.get_running_loop()
        problem: OSError | None = None
        try:
            async with asyncio.timeout_at(end):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
            for index, address in enumerate(addresses):
                if why := self._forbidden(address):
                    raise Broken(f"its name stands for an address that is not allowed: {why}")
                # An address that swallows everything leaves the others their share of the time.
                share = (end - loop.time()) / (len(addresses) - index)
                try:
                    async with asyncio.timeout(share):
                        return await self._open_to(address)
                except OSError as cause:
                    problem = cause
        except OSError as cause:
            problem = cause
        raise Broken(_why(problem)) from problem

    async def _open_to(self, address: str) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._max_answer_bytes),
            address,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls else None,
        )
        self._open.add(connection)
        return connection

    def _lines(self, headers: Iterable[tuple[str, str]]) -> str:
        lines = []
        for name, value in headers:
            start = self._starts.get(name)
            if start is None:
                start = self._start_of(name)
            if start:
                plain = value.isascii() and value.isprintable()
                lines.append(f"{start}{value if plain else quote(value, _PRINTABLE, errors='replace')}\r\n")
        return "".join(lines)

    def _start_of(self, name: str) -> str:
        """Return how a header's line begins, or nothing if it must not be sent; names are few, so this is kept."""
        lower = name.lower()
        usable = _TOKEN.fullmatch(name) and not _OURS.fullmatch(lower) and self._starts.get(lower) != ""
        start = f"{name}: " if usable else ""
        if len(self._starts) < _NAMES:
            self._starts[name] = start
        return start


def _target(path: str, query: str) -> str:
    """Return path and query as they stand in a request line."""
    return quote(path or "/", safe="/%:@!$&'()*+,;=-._~") + (
        f"?{quote(query, safe='/?%:@!$&()*+,;=-._~')}" if query else ""
    )


def _why(cause: OSError | None) -> str:
    """Return why there is no connection, in words that name the next step."""
    match cause:
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate is not trusted: {cause.verify_message}. Correct the host in url, renew the "
                "certificate, or name its authority in tls.ca"
            )
        case ssl.SSLError():
            return (
                f"TLS cannot be agreed on ({cause.reason or cause}): is it http:// there, or tls.certificate missing?"
            )
        case socket.gaierror():
            return f"its name cannot be resolved ({cause.strerror}): correct the host in url"
        case ConnectionRefusedError():
            return "nobody listens there: start it, or correct the port in url"
        case TimeoutError():
            return "no connection in time: is it up, and does a firewall stand between?"
        case _:
            return f"no connection ({(cause and cause.strerror) or cause})"
