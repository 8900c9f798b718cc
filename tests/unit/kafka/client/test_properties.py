"""Which client properties users may set."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext

import confluent_kafka
import pytest
from pydantic import SecretStr

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSasl, KafkaSecurity
from headrace.devcluster.certificates import SERVER_NAME, Authority
from headrace.kafka.client.properties import client_log, client_properties
from headrace.testing.scenario import Scenario


def test_allowed_properties_reach_the_client() -> None:
    """Secrets are opened only here."""
    sasl = KafkaSasl(mechanism="PLAIN", username="a", password=SecretStr("s3"))
    kafka = KafkaConfig(security=KafkaSecurity(sasl=sasl), properties={"socket.timeout.ms": 5000})
    found = client_properties(kafka, "me")
    assert (found["sasl.password"], found["socket.timeout.ms"], found["client.id"]) == ("s3", 5000, "me")


def test_consumer_properties_stay_out_of_producers() -> None:
    """The client warns about properties of the other kind, so it does not get them."""
    kafka = KafkaConfig(properties={"max.poll.interval.ms": 1000})
    assert "max.poll.interval.ms" not in client_properties(kafka, "p")
    assert client_properties(kafka, "c", consumer=True)["max.poll.interval.ms"] == 1000


def test_the_client_does_not_repeat_itself() -> None:
    """A line comes once in a while, one of a start only if it lasts; lost connections are told elsewhere, once."""

    def passes(text: str, seconds: float, level: int = 40) -> bool:
        record = client_log.makeRecord(client_log.name, level, "f", 1, text, (), None)
        record.created = 1000 + seconds
        return bool(client_log.filter(record)) and record.levelno == level

    assert passes("GETPID 127.0.0.1:1/2: refused (after 0ms in state CONNECT)", 0)
    assert not passes("GETPID 127.0.0.1:1/2: refused (after 7ms, 3 suppressed)", 5)
    assert passes("GETPID 127.0.0.1:1/2: timed out", 5)
    assert passes("GETPID 127.0.0.1:1/2: refused (after 0ms in state CONNECT)", 31)
    assert not passes("FAIL 127.0.0.1:1/2: refused (after 0ms in state CONNECT)", 100)
    assert not passes("REQTMOUT 127.0.0.1:1/2: Timed out 1 in-flight requests", 100)
    metadata = "METADATA [c#consumer-13] [thrd:main]: sasl_ssl://b:1/1: Metadata request failed: connected: Local: x"
    assert not passes(metadata, 100)
    fenced = (
        "TXNERR [p#producer-1] [thrd:main]: Current transaction failed in state BeginCommit: x (ILLEGAL_GENERATION)"
    )
    assert not passes(fenced, 150)  # it passes, at another level
    loading = "GETPID [p#producer-4] [thrd:main]: Failed to acquire idempotence PID from broker b:1/1: x: retrying"
    assert [passes(loading, seconds, 30) for seconds in (200, 205, 231)] == [False, False, True]


def test_token_servers_are_checked_with_the_authorities_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another authority's certificate is refused for that reason, not because the system's file is not found."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    files = Authority(tmp_path, "ca").issue(SERVER_NAME, server=True)
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    oauth = {"token_url": f"https://localhost:{server.server_port}/token", "client_id": "a", "client_secret": "b"}
    security = KafkaSecurity.model_validate({"sasl": {"mechanism": "OAUTHBEARER", "oauth": oauth}})
    kafka = KafkaConfig(bootstrap_servers="localhost:1", security=security)
    errors: list[str] = []
    own = {"log_level": 0, "error_cb": lambda error: errors.append(error.str())}
    try:
        client = confluent_kafka.Producer({**client_properties(kafka, "test"), **own})
        Scenario.wait_until(lambda: client.poll(0.1) >= 0 and errors, "an error", 30)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "unable to get local issuer certificate" in errors[0]
