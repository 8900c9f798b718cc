"""Raw servers on loopback that keep to nothing, a client for them, and an authority that signs their certificates."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import inspect
import ipaddress
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.errors import DestinationUnavailable
from headrace.runtime import LoopThread
from headrace.sidecar.reactive.client import BackendClient

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
AMPLE = 60.0


class Server:
    """What a raw server saw."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        """Head and body of every request that came whole."""
        self.connections = 0
        self.ended = 0
        """Conversations that are over."""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/in"

    async def request(self, reader: asyncio.StreamReader) -> None:
        """Read one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        size = re.search(r"(?im)^content-length: (\d+)\r$", head)
        self.requests.append((head, await reader.readexactly(int(size[1]) if size else 0)))

    def answering(self, *responses: bytes, then: str = "keep") -> Talk:
        """Answer requests of a connection one after the other; then `keep` it, `close` it, or half-close it (`eof`)."""

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for response in responses:
                await self.request(reader)
                writer.write(response)
                await writer.drain()
            if then == "eof":
                writer.write_eof()
            if then != "close":
                await reader.read()

        return talk


@contextlib.asynccontextmanager
async def served(*talks: Callable[[Server], Talk] | Talk, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Serve on loopback; the first connection has the first conversation, and the last one is had again and again."""
    server, tasks = Server(), set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        server.connections += 1
        talk: Any = talks[min(server.connections, len(talks)) - 1]
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await talk(reader, writer)
        finally:
            server.ended += 1
            writer.transport.abort()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    talks = tuple(talk(server) if getattr(talk, "__name__", "") == "<lambda>" else talk for talk in talks)  # type: ignore[call-arg,misc]
    try:
        yield server
    finally:
        listener.close()
        await asyncio.sleep(0.01)  # what has just been accepted is one of the tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # connections end: a loop that is closed before warns of each in a later test


@contextlib.contextmanager
def served_by_thread(talk: Talk) -> Iterator[int]:
    """Serve on a thread; give the port."""
    thread, stack = LoopThread("raw server"), contextlib.AsyncExitStack()
    try:
        yield thread.call(stack.enter_async_context(served(talk)), 30).port
    finally:
        thread.call(stack.aclose(), 30)
        thread.stop()


def always(*responses: bytes, then: str = "keep") -> Any:
    """Return a conversation for `served`; see `Server.answering`."""
    return lambda server: server.answering(*responses, then=then)


@contextlib.contextmanager
def client_for(url: str, *, seconds: float = AMPLE, limit: int = 1_048_576, **more: Any) -> Any:
    client = BackendClient(url, timeout_seconds=seconds, max_response_bytes=limit, **more)
    try:
        yield client
    finally:
        client.close()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main(), 2 * AMPLE)

    uvloop.run(bounded())


async def until(met: Callable[[], object], what: str = "it", seconds: float = 120) -> None:
    """Wait for what another task, process or server does, which has no event."""
    end = time.monotonic() + seconds
    while not (await found if inspect.isawaitable(found := met()) else found):
        assert time.monotonic() < end, f"waited in vain for {what}"
        await asyncio.sleep(0.002)


async def rested(client: BackendClient) -> None:
    """Wait until every connection that is kept may be used again."""
    pool = client._connections
    await until(lambda: pool._idle and not (pool._resting or pool._rested))


async def why_not(client: BackendClient, body: bytes = b"x") -> str:
    """Post, and return the description of the error."""
    with pytest.raises(DestinationUnavailable) as failed:
        await client.post(body)
    assert failed.value.wait_seconds is None
    return failed.value.description


class Authority:
    """Signs certificates for a test."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        self._write(self.file, self.name, self.key, days=1, authority=True)

    def issue(
        self, name: str, host: str = "127.0.0.1", days: int = 1, password: bytes = b"", names: Any = None
    ) -> ssl.SSLContext:
        """Write `<name>.pem` and `<name>.key`; return the context of a server that shows them.

        `names` is an extension in place of the alternative name of the host.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._write(self.folder / f"{name}.pem", subject, key, days=days, names=names or _name_of(host))
        locked: Any = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
        (self.folder / f"{name}.key").write_bytes(private)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / f"{name}.pem", self.folder / f"{name}.key", password or None)
        return context

    def _write(
        self, file: Path, subject: x509.Name, key: Any, *, days: int, authority: bool = False, names: Any = None
    ) -> None:
        now = datetime.datetime.now(datetime.UTC)
        start, end = now - datetime.timedelta(10), now + datetime.timedelta(days)
        builder = x509.CertificateBuilder(self.name, subject, key.public_key(), x509.random_serial_number(), start, end)
        builder = builder.add_extension(x509.BasicConstraints(authority, None), True)
        if names:
            builder = builder.add_extension(names, False)
        file.write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def _name_of(host: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName(
        [x509.DNSName(host) if host[0].isalpha() else x509.IPAddress(ipaddress.ip_address(host))]
    )
