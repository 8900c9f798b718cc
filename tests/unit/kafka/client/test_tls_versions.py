"""Versions of TLS that Kafka's client offers."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.kafka.client.properties import client_properties
from headrace_devkit.devcluster.certificates import SERVER_NAME, Authority

NEW, OLD = ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("newest", "tls", "version"), [(OLD, {"min_version": "1.3"}, "refused"), (NEW, {}, "TLSv1.3"), (OLD, {}, "TLSv1.2")]
)
def test_only_the_versions_set_are_offered(tmp_path: Path, newest: Any, tls: dict[str, Any], version: str) -> None:
    """A server with an older version gets no connection."""
    files = Authority(tmp_path, "ca").issue(SERVER_NAME, server=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.minimum_version, context.maximum_version = OLD, newest
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        section = {
            "bootstrap_servers": f"localhost:{listener.getsockname()[1]}",
            "security": {"protocol": "ssl", "tls": {"ca": str(tmp_path / "ca.pem"), **tls}},
        }
        properties = client_properties(KafkaConfig.model_validate(section), "test")
        client = confluent_kafka.Producer({**properties, "log_level": 0})
        connection, _ = listener.accept()
        connection.settimeout(60)
        found: str | None = "refused"
        refused = contextlib.suppress(ssl.SSLError)
        with refused, connection, context.wrap_socket(connection, server_side=True) as secured:
            found = secured.version()
        assert found == version
        del client
