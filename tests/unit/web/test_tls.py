"""TLS of the listener: handshakes, certificates, and answers whose end counts as received."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.config.http import TlsConfig
from headrace.errors import ConfigError
from headrace.security import TlsFiles
from headrace.testing import ManualClock

BODY = b'{"records":[{"value":1}]}'
POST = b"POST /producers/t HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 25\r\n\r\n" + BODY


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_answer_over_tls_is_complete_when_it_is_sent(opened: Any, tmp_path: Path, loop_factory: Any) -> None:
    """Records count as delivered although the client sends nothing more on its connection."""
    authority = Authority(tmp_path)
    tls = authority.issue("server", "localhost")

    async def main() -> None:
        async with opened(tls=tls.model_dump()) as server:
            host, port = server.web.url.removeprefix("https://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port), ssl=authority.client())
            writer.write(b"GET /consumers/g/instances/i/records HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await server.read(reader)).body == b"[]"
            (connection,) = server.web._server.server_state.connections
            for _ in range(1000):
                if not connection.is_answering:
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError("the server waits for more")
            writer.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def test_a_handshake_that_does_not_go_on_is_ended(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a connection is not yet one of the server's, so the limit is the loop's."""
    monkeypatch.setattr("headrace.web.server._HANDSHAKE_SECONDS", 0.05)
    tls = Authority(tmp_path).issue("server", "localhost")
    async with opened(tls=tls.model_dump()) as server:
        reader, _ = await server.connect()
        assert await asyncio.wait_for(reader.read(), 60) == b""


@pytest.mark.uvloop
async def test_a_connection_that_makes_room_is_closed_whatever_its_client_does(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS would wait for the client's own close, and more descriptors would be open than the limit allows."""
    monkeypatch.setattr("headrace.web.connection.RESERVED_CONNECTIONS", 16)
    monkeypatch.setattr("headrace.web.connection._TIME_TO_SEND_SECONDS", 0.02)
    authority = Authority(tmp_path)
    tls = authority.issue("server", "localhost")

    async with opened(tls=tls.model_dump(), max_connections=4) as server:
        host, port = server.web.url.removeprefix("https://").split(":")
        connections = server.web._server.server_state.connections
        with contextlib.ExitStack() as clients:
            sockets = []
            for _ in range(40):
                raw = await asyncio.to_thread(socket.create_connection, (host, int(port)), 60)
                sockets.append(clients.enter_context(await asyncio.to_thread(authority.client().wrap_socket, raw)))
                assert len(connections) <= 21
            answer = await asyncio.to_thread(sockets[0].recv, 1000)
            assert answer.startswith(b"HTTP/1.1 503 ")


class Authority:
    """Signs certificates for a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        (folder / "ca.pem").write_bytes(self._signed(self.name, self.key.public_key(), True))

    def issue(self, name: str, common_name: str, *extensions: x509.ExtensionType) -> TlsConfig:
        """Write `<name>.pem` and `<name>.key`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
        (self.folder / f"{name}.pem").write_bytes(self._signed(subject, key.public_key(), False, *extensions))
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (self.folder / f"{name}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
        return TlsConfig(certificate=self.folder / f"{name}.pem", key=self.folder / f"{name}.key")

    def client(self, name: str = "") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.folder / "ca.pem")
        context.check_hostname = False
        if name:
            context.load_cert_chain(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        return context

    def _signed(self, subject: x509.Name, key: Any, is_authority: bool, *extensions: x509.ExtensionType) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            self.name, subject, key, x509.random_serial_number(), now, now + datetime.timedelta(1)
        )
        builder = builder.add_extension(x509.BasicConstraints(is_authority, None), True)
        for extension in extensions:
            builder = builder.add_extension(extension, False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


async def ask_over_tls(server: Any, context: ssl.SSLContext, data: bytes) -> tuple[int, Any]:
    host, port = server.web.url.removeprefix("https://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.write(data)
    status = int((await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).split()[1])
    writer.close()
    return status, certificate


def test_certificates_say_who_calls(opened: Any, tmp_path: Path) -> None:
    """Mode mtls: a listed name has its scopes, another has none; no certificate, no connection; nor TLS 1.1."""
    authority = Authority(tmp_path)
    tls = authority.issue("server", "localhost").model_copy(update={"client_ca": tmp_path / "ca.pem"})
    authority.issue("loader", "loader.example")
    authority.issue("stranger", "stranger.example")
    security = {"mode": "mtls", "principals": {"loader.example": {"scopes": ["kafka:w"]}}}

    async def main() -> None:
        async with opened(security=security, tls=tls.model_dump()) as server:
            assert server.web.url.startswith("https://")
            assert (await ask_over_tls(server, authority.client("loader"), POST))[0] == 200
            assert (await ask_over_tls(server, authority.client("stranger"), POST))[0] == 403
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await ask_over_tls(server, authority.client(), POST)
            old = authority.client("loader")
            old.minimum_version = ssl.TLSVersion.TLSv1
            old.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await ask_over_tls(server, old, POST)

    with pytest.warns(DeprecationWarning):
        asyncio.run(main())


@pytest.mark.uvloop
async def test_a_certificate_that_cannot_be_read_ends_its_own_connection_only(opened: Any, tmp_path: Path) -> None:
    """Python reads alternative names as UTF-8; an authority may sign others."""
    authority = Authority(tmp_path)
    tls = authority.issue("server", "localhost").model_copy(update={"client_ca": tmp_path / "ca.pem"})
    authority.issue("loader", "loader.example")
    name = b"b\xfccher.example"
    encoded = bytes([0x30, len(name) + 2, 0x82, len(name)]) + name
    authority.issue("odd", "odd.example", x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, encoded))
    security = {"mode": "mtls", "principals": {"loader.example": {"scopes": ["kafka:w"]}}}

    async with opened(security=security, tls=tls.model_dump()) as server:
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await ask_over_tls(server, authority.client("odd"), POST)
        assert (await ask_over_tls(server, authority.client("loader"), POST))[0] == 200
        assert server.web.death is None


async def test_a_new_certificate_is_taken_without_a_restart(opened: Any, tmp_path: Path) -> None:
    """When it fits its key; half a change leaves the old one in use."""
    authority = Authority(tmp_path)
    tls = authority.issue("server", "first.example")

    async def name_of(server: Any) -> str:
        _, certificate = await ask_over_tls(server, authority.client(), POST)
        return str(certificate["subject"][0][0][1])

    async with opened(tls=tls.model_dump()) as server:
        files: TlsFiles = server.tls
        assert await name_of(server) == "first.example"
        key = (tmp_path / "server.key").read_bytes()
        authority.issue("server", "second.example")
        new = (tmp_path / "server.key").read_bytes()
        (tmp_path / "server.key").write_bytes(key)
        files.look()
        assert await name_of(server) == "first.example"
        (tmp_path / "server.key").write_bytes(new)
        files.look()
        assert await name_of(server) == "second.example"


def test_files_that_are_no_certificates_stop_the_start(tmp_path: Path) -> None:
    """One paragraph that names them."""
    for name in ("a.pem", "a.key"):
        (tmp_path / name).write_text("x")
    with pytest.raises(ConfigError, match=r"http\.tls: the files .*a\.pem, .*a\.key are no certificate"):
        TlsFiles(TlsConfig(certificate=tmp_path / "a.pem", key=tmp_path / "a.key"), ManualClock())
