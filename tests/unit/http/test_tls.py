"""TLS of the listener: handshakes, certificates, and how connections end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from tests.raw_server import Authority
from tests.running_server import OpenServer

BODY = b'{"records":[{"value":1}]}'
POST = b"POST /producers/t HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 25\r\n\r\n" + BODY


async def test_a_handshake_that_does_not_go_on_is_ended(
    opened: OpenServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a connection is not yet one of the server's, so the limit is the loop's."""
    monkeypatch.setattr("headrace.http.server._HANDSHAKE_SECONDS", 0.05)
    tls = issue(Authority(tmp_path))
    async with opened(tls=tls) as server:
        reader, _ = await server.connect()
        assert await asyncio.wait_for(reader.read(), 60) == b""


@pytest.mark.uvloop
async def test_a_connection_that_makes_room_is_closed_whatever_its_client_does(
    opened: OpenServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS would wait for the client's own close, and more descriptors would be open than the limit allows."""
    monkeypatch.setattr("headrace.http.shared.RESERVED_CONNECTIONS", 16)
    monkeypatch.setattr("headrace.http.shared._TIME_TO_SEND_SECONDS", 0.02)
    authority = Authority(tmp_path)
    tls = issue(authority)

    async with opened(tls=tls, max_connections=4) as server:
        host, port = server.web.url.removeprefix("https://").split(":")
        connections = server.web.shared.connections
        with contextlib.ExitStack() as clients:
            sockets = []
            for _ in range(40):
                raw = await asyncio.to_thread(socket.create_connection, (host, int(port)), 60)
                sockets.append(clients.enter_context(await asyncio.to_thread(client(authority).wrap_socket, raw)))
                assert len(connections) <= 21
            response = await asyncio.to_thread(sockets[0].recv, 1000)
            assert response.startswith(b"HTTP/1.1 503 ")


def issue(authority: Authority, name: str = "server", **more: Any) -> dict[str, Any]:
    """Write a certificate, and return the listener's settings with it."""
    authority.issue(name)
    return {"certificate": authority.folder / f"{name}.pem", "key": authority.folder / f"{name}.key", **more}


def client(authority: Authority, name: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    context.check_hostname = False
    if name:
        context.load_cert_chain(authority.folder / f"{name}.pem", authority.folder / f"{name}.key")
    return context


async def ask_over_tls(server: Any, context: ssl.SSLContext, data: bytes) -> tuple[int, Any]:
    host, port = server.web.url.removeprefix("https://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.write(data)
    status = int((await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).split()[1])
    writer.close()
    return status, certificate


def test_certificates_say_who_calls(opened: OpenServer, tmp_path: Path) -> None:
    """Mode mtls: a listed name has its scopes, another has none; no certificate, no connection; nor TLS 1.1."""
    authority = Authority(tmp_path)
    tls = issue(authority, client_ca=tmp_path / "ca.pem")
    authority.issue("loader")
    authority.issue("stranger")
    security = {"mode": "mtls", "principals": {"loader": {"scopes": ["kafka:w"]}}}

    async def main() -> None:
        async with opened(security=security, tls=tls) as server:
            assert server.web.url.startswith("https://")
            assert (await ask_over_tls(server, client(authority, "loader"), POST))[0] == 200
            assert (await ask_over_tls(server, client(authority, "stranger"), POST))[0] == 403
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await ask_over_tls(server, client(authority), POST)
            old = client(authority, "loader")
            old.minimum_version = ssl.TLSVersion.TLSv1
            old.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await ask_over_tls(server, old, POST)

    with pytest.warns(DeprecationWarning):
        asyncio.run(main())


@pytest.mark.uvloop
async def test_a_certificate_that_cannot_be_read_ends_its_own_connection_only(
    opened: OpenServer, tmp_path: Path
) -> None:
    """Python reads alternative names as UTF-8; an authority may sign others."""
    authority = Authority(tmp_path)
    tls = issue(authority, client_ca=tmp_path / "ca.pem")
    authority.issue("loader")
    name = b"b\xfccher.example"
    encoded = bytes([0x30, len(name) + 2, 0x82, len(name)]) + name
    authority.issue("odd", names=x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, encoded))
    security = {"mode": "mtls", "principals": {"loader": {"scopes": ["kafka:w"]}}}

    async with opened(security=security, tls=tls) as server:
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await ask_over_tls(server, client(authority, "odd"), POST)
        assert (await ask_over_tls(server, client(authority, "loader"), POST))[0] == 200
        assert server.web.death is None
