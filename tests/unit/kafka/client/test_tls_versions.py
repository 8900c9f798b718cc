"""Versions of TLS that Kafka's client offers."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from yaml_table import table

from headrace.devcluster.certificates import SERVER_NAME, Authority

CLIENTS = table(__file__, "clients")
BOTH = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
OLD = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2


@contextlib.contextmanager
def listening(folder: Path, versions: tuple[ssl.TLSVersion, ssl.TLSVersion]) -> Iterator[tuple[int, queue.Queue[str]]]:
    """Serve TLS of these versions; yield the port, and the version of each handshake, or `refused`."""
    files = Authority(folder, "ca").issue(SERVER_NAME, server=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.minimum_version, context.maximum_version = versions
    seen: queue.Queue[str] = queue.Queue()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = listener.accept()
                try:
                    with context.wrap_socket(connection, server_side=True) as secured:
                        seen.put(str(secured.version()))
                except ssl.SSLError:
                    seen.put("refused")
                except OSError:
                    connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(30)


def clients(port: int, ca: Path, *clusters: dict[str, Any], **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CLIENTS, json.dumps([port, str(ca), *clusters])]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environ})


@pytest.mark.parametrize(
    ("server", "tls", "version"),
    [(OLD, {"min_version": "1.3"}, "refused"), (BOTH, {}, "TLSv1.3"), (OLD, {}, "TLSv1.2")],
)
def test_only_the_versions_set_are_offered(tmp_path: Path, server: Any, tls: dict[str, Any], version: str) -> None:
    """A server with an older version gets no connection."""
    with listening(tmp_path, server) as (port, seen), clients(port, tmp_path / "ca.pem", tls, tls) as process:
        assert seen.get(timeout=60) == version
        process.kill()
