"""Backends that are no good HTTP servers, pushed to by a running process: nothing is lost and nothing is buried."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HEAD = b"HTTP/1.1 200 OK\r\n"
OK = HEAD + b"Content-Length: 0\r\n\r\n"
SILENCE = b""
HOSTILE = [
    SILENCE,
    HEAD + b"Content-Length: 9\r\n\r\nab",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab",
    HEAD + b"Content-Length: 1073741824\r\n\r\n" + b"x" * 2_000_000,
    HEAD + b"X: y\r\n" * 40_000,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
    b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
    b"SSH-2.0-OpenSSH\r\n",
]


class Raw:
    """A server of bytes: each request is answered by the next of `script`, or with `usual` when that is empty."""

    def __init__(self, usual: bytes = OK, tls: ssl.SSLContext | None = None) -> None:
        self.script: deque[bytes] = deque()
        self.fatal = b"nothing"
        """At a request whose body has this, the connection is closed."""
        self.accepted: list[tuple[str, bytes]] = []
        """Head and body of the requests answered as usual."""
        self._usual, self._tls = usual, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def stop(self) -> None:
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            with plain, self._tls.wrap_socket(plain, server_side=True) if self._tls else plain as connection:
                while (request := self._read(connection)) and self.fatal not in request[1]:
                    response = self.script.popleft() if self.script else self._usual
                    if response == self._usual:
                        self.accepted.append(request)
                    if response == SILENCE:
                        connection.recv(1)  # until the client ends it
                        return
                    connection.sendall(response)
        except OSError:
            return

    @staticmethod
    def _read(connection: socket.socket) -> tuple[str, bytes] | None:
        data = b""
        while b"\r\n\r\n" not in data:
            if not (more := connection.recv(65_536)):
                return None
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        size = re.search(rb"(?i)content-length: (\d+)", head)
        while len(body) < int(size[1] if size else 0):
            if not (more := connection.recv(65_536)):
                return None
            body += more
        return head.decode("latin-1"), body


@pytest.fixture
def raw() -> Iterator[Any]:
    """Start servers of bytes: `raw(usual, tls)`."""
    servers: list[Raw] = []

    def start(usual: bytes = OK, tls: ssl.SSLContext | None = None) -> Raw:
        servers.append(Raw(usual, tls))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def consumer(topic: str, backend: dict[str, Any]) -> dict[str, Any]:
    retry = {"attempts": 2, "first_delay_seconds": 0.02, "max_delay_seconds": 0.1}
    backend = {"mode": "status", **backend}
    return {"reactive_consumers": {"push": {"topics": [topic], "group": topic, "retry": retry, "backend": backend}}}


def offsets(accepted: list[tuple[str, bytes]]) -> list[int]:
    """Return what was accepted in the order of its first time; a response may be late on a busy machine."""
    return list(dict.fromkeys(entry["offset"] for _, body in accepted for entry in json.loads(body)))


def test_what_is_no_response_costs_no_record_and_no_attempt(site: Any, topic: Any, headrace: Any, raw: Any) -> None:
    """E5 to E7: each kind comes before the backend is well; then all is delivered in order, no dead letter."""
    name, server = topic(), raw()
    server.script.extend(HOSTILE)
    site.write_json(name, *range(5))
    url = f"http://127.0.0.1:{server.port}/in"
    process = headrace({**site.config, **consumer(name, {"url": url, "timeout_seconds": 1})})
    site.wait_committed(name, name, 5)
    assert not server.script
    assert offsets(server.accepted) == list(range(5))
    assert site.records(f"{name}.dlq") == []
    site.wait_until(lambda: site.reasons(process.url) == {}, "readiness")


def test_a_record_at_which_the_backend_closes_the_connection_ends_alone(
    site: Any, topic: Any, headrace: Any, raw: Any
) -> None:
    """It comes first, so nothing else is taken meanwhile: before it is sent alone, the backend is asked for OPTIONS."""
    name, server = topic(), raw()
    server.fatal = b'"offset":0'
    site.write_json(name, *range(5))
    process = headrace({**site.config, **consumer(name, {"url": f"http://127.0.0.1:{server.port}/in"})})
    site.wait_committed(name, name, 5)
    posts = [request for request in server.accepted if request[0].startswith("POST")]
    assert offsets(posts) == [1, 2, 3, 4]
    assert {head.split(" ")[1] for head, _ in server.accepted if head.startswith("OPTIONS")} == {"/in"}
    (dead,) = site.records(f"{name}.dlq")
    history = dict(dead.headers)
    assert (history["headrace.dlq.error"], history["headrace.dlq.attempts"]) == (b"ConnectionClosed", b"2")
    assert b"it closed the connection without a response" in history["headrace.dlq.reason"]
    site.wait_until(lambda: site.reasons(process.url) == {}, "readiness")


def certificate(folder: Path, days: int) -> ssl.SSLContext:
    """Write `us.pem`, signed by itself and good for some days; return the context of a server with it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "backend")])
    start, end = now - datetime.timedelta(10), now + datetime.timedelta(days)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), start, end)
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
    made = made.add_extension(x509.BasicConstraints(True, None), True)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    signed = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (folder / "ca.pem").write_bytes(signed)
    (folder / "us.pem").write_bytes(signed + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "us.pem")
    return context


def test_a_backend_with_a_bad_certificate_gets_nothing_until_it_has_a_good_one(
    site: Any, topic: Any, headrace: Any, raw: Any, tmp_path: Path
) -> None:
    """E11: readiness says why; then records come, with a token and the static headers, whose secrets stay secret."""
    granted = b'{"access_token":"canary-token","token_type":"Bearer","expires_in":3600}'
    giver = raw(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(granted), granted))
    bad = raw(tls=certificate(tmp_path, -1))
    (tmp_path / "secret").write_text("canary-secret")
    (tmp_path / "secret").chmod(0o600)
    backend = {
        "url": f"https://127.0.0.1:{bad.port}/in",
        "tls": {"ca": str(tmp_path / "ca.pem")},
        "oauth": {
            "token_url": f"http://127.0.0.1:{giver.port}/",
            "client_id": "me",
            "client_secret": f"${{file:{tmp_path}/secret}}",
        },
        "headers": {"X-Api-Key": f"${{file:{tmp_path}/secret}}"},
    }
    name = topic()
    site.write_json(name, 1, 2, 3)
    process = headrace({**site.config, **consumer(name, backend)}, wait=False)
    site.wait_until(lambda: "certificate has expired" in str(site.reasons(process.url)), "the reason")
    assert bad.accepted == []
    assert site.committed(name) == {}
    assert site.records(f"{name}.dlq") == []
    process.terminate()

    good = raw(tls=certificate(tmp_path, 1))
    backend["url"] = f"https://127.0.0.1:{good.port}/in"
    again = headrace({**site.config, **consumer(name, backend)})
    site.wait_committed(name, name, 3)
    assert offsets(good.accepted) == [0, 1, 2]
    head = good.accepted[0][0]
    assert "\r\nAuthorization: Bearer canary-token" in head
    assert "\r\nX-Api-Key: canary-secret" in head
    again.terminate()
    assert "canary" not in process.output + again.output
