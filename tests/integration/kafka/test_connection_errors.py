"""Every login works; each wrong setting of TLS and login leads to one sentence with its cause and fix, and soon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaUnavailable
from headrace.kafka import Admin
from headrace.kafka.client.connection_errors import PROBLEMS
from headrace_devkit.devcluster.certificates import STORE_PASSWORD, Authority
from headrace_devkit.testing.secured import SecuredCluster

LIMIT_SECONDS = 30
WRONG = "canary-of-a-wrong-password"
UNVERIFIED = "broker's certificate"


@contextlib.contextmanager
def expired_server(folder: Path) -> Iterator[str]:
    """Serve TLS with a certificate that has expired; give the address."""
    files = Authority(folder, "ca").issue("wrong-server", server=True, days=-1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with recording_server(lambda connection: context.wrap_socket(connection, server_side=True).close()) as found:
        yield found.address


class Recorded(NamedTuple):
    """A server that keeps the first byte of every connection."""

    address: str
    first_bytes: list[bytes]


@contextlib.contextmanager
def recording_server(serve: Callable[[socket.socket], Any]) -> Iterator[Recorded]:
    """Accept connections until the end of the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    found = Recorded(f"localhost:{listener.getsockname()[1]}", [])

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                found.first_bytes.append(connection.recv(1, socket.MSG_PEEK))
                serve(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield found
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(LIMIT_SECONDS)


def changed(section: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return a section `kafka` with some settings changed: `security__sasl__password`; None removes one."""
    found: dict[str, Any] = json.loads(json.dumps(section))
    for path, value in values.items():
        *parents, last = path.split("__")
        parent = found
        for name in parents:
            parent = parent[name]
        if value is None:
            parent.pop(last)
        else:
            parent[last] = value
    return found


def settings(section: dict[str, Any]) -> KafkaConfig:
    """Return the settings of a section with its files read; a request may take longer than the test."""
    text = re.sub(r"\$\{file:([^}]+)\}", lambda found: Path(found[1]).read_text(), json.dumps(section))
    return KafkaConfig.model_validate({**json.loads(text), "request_timeout_seconds": 120})


def refusal(section: dict[str, Any]) -> str:
    """Return why the topics cannot be listed, before the limit of the request."""

    async def ask() -> str:
        async with asyncio.timeout(LIMIT_SECONDS):
            with pytest.raises(KafkaUnavailable) as found:
                await Admin(settings(section)).list_topics()
        return str(found.value)

    return asyncio.run(ask())


def sentence(name: str, address: str = "", **details: str) -> str:
    """Return what is said of a problem."""
    template = PROBLEMS[name]
    return f"{template.why}: {template.fix}".format(address=address, **details)


def assert_refused(section: dict[str, Any], name: str, **details: str) -> None:
    """The error names the servers, the problem, the fix, and no secret."""
    servers = section["bootstrap_servers"]
    text = refusal(section)
    assert text == f"list topics: no response from Kafka at {servers}: {sentence(name, servers, **details)}"
    assert WRONG not in text


@pytest.mark.parametrize("way", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "certificate", "store"])
async def test_every_login_works(kafka_secured: SecuredCluster, way: str) -> None:
    """Each mechanism, a certificate as PEM and one in a store."""
    own = way in ("certificate", "store")
    section = kafka_secured.certificate() if own else kafka_secured.login(way)
    if way == "store":
        store = {"keystore": str(kafka_secured.security.folder / "app.p12"), "keystore_password": STORE_PASSWORD}
        section["security"] = {"tls": {"ca": section["security"]["tls"]["ca"], **store}}
    assert isinstance(await Admin(settings(section)).list_topics(), list)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_a_wrong_password(kafka_secured: SecuredCluster, mechanism: str) -> None:
    """Each mechanism says the same."""
    section = changed(kafka_secured.login(mechanism), security__sasl__password=WRONG)
    assert_refused(section, "password", user="app", mechanism=mechanism)


def test_certificates_of_the_broker(kafka_secured: SecuredCluster) -> None:
    """Unknown authority, expired, and another host name; the client does not say which."""
    folder, section = kafka_secured.security.folder, kafka_secured.login("PLAIN")
    assert_refused(changed(section, security__tls__ca=str(folder / "other-ca.pem")), UNVERIFIED)
    with expired_server(folder) as address:
        assert_refused(changed(section, bootstrap_servers=address), UNVERIFIED)
    by_number = section["bootstrap_servers"].replace("localhost", "127.0.0.1")
    assert_refused(changed(section, bootstrap_servers=by_number), UNVERIFIED)


def test_certificates_of_the_client(kafka_secured: SecuredCluster) -> None:
    """Expired, of another authority, and none where one is required."""
    section = kafka_secured.certificate()
    assert_refused(kafka_secured.certificate("expired"), "certificate's dates")
    assert_refused(kafka_secured.certificate("stranger"), "client certificate")
    none = changed(section, security__tls__certificate=None, security__tls__key=None)
    assert_refused(none, "no certificate")


def test_a_wrong_listener(kafka_secured: SecuredCluster) -> None:
    """TLS on a plain port and the reverse, login on a port without, and no login on a port with one."""
    plain, sasl = kafka_secured.cluster.bootstrap_servers, kafka_secured.login("PLAIN")
    certificate = kafka_secured.certificate()
    tls_port = certificate["bootstrap_servers"]
    assert_refused({"bootstrap_servers": tls_port}, "other kind", protocol="plaintext")
    assert_refused(changed(certificate, bootstrap_servers=plain), "other kind", protocol="ssl")
    assert_refused(changed(sasl, bootstrap_servers=plain), "other kind", protocol="sasl_ssl")
    assert_refused(changed(sasl, bootstrap_servers=tls_port), "no certificate")
    both = changed(sasl, bootstrap_servers=tls_port, security__tls=certificate["security"]["tls"])
    assert_refused(both, "no login")


def test_a_wrong_token_server(kafka_secured: SecuredCluster) -> None:
    """Unreachable, wrong secret, and unknown authority."""
    section, url = kafka_secured.login("OAUTHBEARER"), kafka_secured.tokens.token_url
    nothing = "https://localhost:1/token"
    assert_refused(changed(section, security__sasl__oauth__token_url=nothing), "token server", token_url=nothing)
    wrong = changed(section, security__sasl__oauth__client_secret=WRONG)
    assert_refused(wrong, "client secret", token_url=url, oauth_error=" (invalid_client)")
    other = changed(section, security__sasl__oauth__ca=str(kafka_secured.security.folder / "other-ca.pem"))
    assert_refused(other, "token server's certificate", token_url=url)


@pytest.mark.parametrize("way", ["certificate", "login"])
def test_nothing_falls_back_to_plain_text(kafka_secured: SecuredCluster, way: str) -> None:
    """Every connection to a server that ends each TLS handshake begins with another TLS handshake."""
    section = kafka_secured.certificate() if way == "certificate" else kafka_secured.login("PLAIN")
    with recording_server(lambda connection: connection.close()) as server:
        text = refusal(changed(section, bootstrap_servers=server.address))
    assert text.endswith(sentence("other kind", server.address, protocol="ssl" if way == "certificate" else "sasl_ssl"))
    assert len(server.first_bytes) > 1
    assert set(server.first_bytes) == {b"\x16"}, "content type 22 is a handshake (RFC 8446, 5.1)"
