"""Connections to other processes and to backends that are closed, or whose response has no body."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from headrace.http.peer_connection import PeerConnection
from headrace.sidecar.reactive.backend_connection import Broken, Connection

pytestmark = pytest.mark.uvloop
GET, HEAD = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n"


@contextlib.asynccontextmanager
async def peer(head: bytes, body: bytes = b"") -> AsyncIterator[tuple[str, int]]:
    """Respond to each request with these bytes; the body is left out after HEAD."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while request := await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 " + head + b"\r\n\r\n" + (b"" if request.startswith(b"HEAD") else body))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()


@pytest.mark.parametrize("request_bytes", [HEAD, GET])
@pytest.mark.parametrize("head", ["200 OK\r\ncontent-length: 5", "204 No Content", "304 Not Modified"])
async def test_a_response_without_a_body_ends_with_its_head(request_bytes: bytes, head: str) -> None:
    """Also when its headers count the bytes that GET would answer with; the connection serves the next request."""
    async with peer(head.encode(), b"hello" if head.startswith("200") else b"") as (host, port):
        connection = await PeerConnection.open(f"http://{host}:{port}", None)
        for each in (request_bytes, GET, request_bytes):
            await connection.send(each)
            async with asyncio.timeout(20):
                body = await connection.next_part()
            assert (connection.status, body) == (int(head[:3]), b"hello" if "200" in head and each is GET else b"")
        connection.close()


async def test_a_kept_connection_that_is_closed_is_an_error_of_the_connection() -> None:
    """So the request is sent again on another one, or answered 503; uvloop raises RuntimeError for it."""
    async with peer(b"204 No Content") as (host, port):
        connection = await PeerConnection.open(f"http://{host}:{port}", None)
        _, backend = await asyncio.get_running_loop().create_connection(lambda: Connection(1000), host, port)
        connection.close()
        backend.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(ConnectionError):
            await connection.send(GET)
        with pytest.raises(Broken) as caught:
            await backend.send([GET], time.monotonic() + 20)
        assert caught.value.resend


@pytest.mark.parametrize(
    "head", [b"101 S\r\nConnection: Upgrade\r\nUpgrade: x", b"101 S", b"200 OK\r\nContent-Length: x"]
)
async def test_a_response_in_another_protocol_is_an_error_of_the_connection(head: bytes) -> None:
    """Its bytes count for no request; so the request is answered 503, and not with a defect."""
    async with peer(head, GET) as (host, port):
        _, backend = await asyncio.get_running_loop().create_connection(lambda: Connection(1000), host, port)
        with contextlib.closing(await PeerConnection.open(f"http://{host}:{port}", None)) as connection:
            with pytest.raises(Broken):
                await backend.send([GET], time.monotonic() + 20)
            with pytest.raises(OSError, match="not valid HTTP"):
                await connection.send(GET)
