"""Versions of TLS that Kafka's client offers."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.devcluster.certificates import SERVER_NAME, Authority
from headrace.kafka.client.properties import client_properties

NEW, OLD = ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2


@contextlib.contextmanager
def listening(folder: Path, newest: ssl.TLSVersion) -> Iterator[tuple[int, queue.Queue[str]]]:
    """Serve TLS 1.2 to the newest version; yield the port, and the version of each handshake, or `refused`."""
    files = Authority(folder, "ca").issue(SERVER_NAME, server=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.minimum_version, context.maximum_version = OLD, newest
    seen: queue.Queue[str] = queue.Queue()

    def serve() -> None:
        with contextlib.suppress(OSError):  # the client or the test has closed it
            connection, _ = listener.accept()
            try:
                with context.wrap_socket(connection, server_side=True) as secured:
                    seen.put(str(secured.version()))
            except ssl.SSLError:
                seen.put("refused")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], seen


@pytest.mark.parametrize(
    ("newest", "tls", "version"), [(OLD, {"min_version": "1.3"}, "refused"), (NEW, {}, "TLSv1.3"), (OLD, {}, "TLSv1.2")]
)
def test_only_the_versions_set_are_offered(tmp_path: Path, newest: Any, tls: dict[str, Any], version: str) -> None:
    """A server with an older version gets no connection."""
    with listening(tmp_path, newest) as (port, seen):
        security = {"protocol": "ssl", "tls": {"ca": str(tmp_path / "ca.pem"), **tls}}
        kafka = KafkaConfig.model_validate({"bootstrap_servers": f"localhost:{port}", "security": security})
        client = confluent_kafka.Producer({**client_properties(kafka, "test"), "log_level": 0})
        assert seen.get(timeout=60) == version
        del client
