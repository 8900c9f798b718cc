"""One request is one request on each listener."""

from __future__ import annotations

import re
import socket
import uuid

import pytest

from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import Cluster, HeadraceProcess, SharedHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.function_calls import function_file


def connected(url: str) -> socket.socket:
    host, _, port = url.rpartition("/")[2].partition(":")
    return socket.create_connection((host, int(port)), 30)


def upgrading(hidden: bytes, path: str = "/nothing") -> tuple[bytes, bytes]:
    """Return head and body of a request whose body is a request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    return f"{head}Content-Length: {len(hidden)}\r\n\r\n".encode(), hidden


@pytest.fixture(scope="module")
def process(
    kafka: Cluster, module_headrace: SharedHeadrace, tmp_path_factory: pytest.TempPathFactory
) -> HeadraceProcess:
    """A run of two processes with every listener that there is."""
    folder, code = tmp_path_factory.mktemp("function"), "def handler(context, event):\n    return 'done'\n"
    kafka.create_topic(source := f"one-request-{uuid.uuid4().hex[:8]}", 1)
    records = {"kind": "kafka-cluster", "attributes": {"topics": [source], "consumerGroup": source}}
    management, web = free_ports(2)
    triggers = {"in": records, "web": {"kind": "http", "attributes": {"port": web}}}
    function = function_file(folder, code, triggers)
    sections = {"http": {"management": {"port": management}}, "processes": 2, "functions": [function]}
    return module_headrace({**Scenario(kafka.bootstrap_servers, folder).config, **sections})


def test_each_listener_reads_a_body_as_a_body(process: HeadraceProcess) -> None:
    """That of requests, of administration, and of a function's trigger; the next request is served."""
    [line] = re.findall("^ready .*$", process.output, re.MULTILINE)
    urls = re.findall(r"=(http://\S+)", line)
    assert len(urls) == 3, line
    last = b"GET /health/liveness HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for url in urls:
        for pieces in ((b"".join(upgrading(last)), last), (*upgrading(last), last)):
            with connected(url) as client, client.makefile("rb") as responses:
                for piece in pieces[:-1]:
                    client.sendall(piece)
                    first = b"" if piece != pieces[-2] else responses.readline()
                client.sendall(pieces[-1])
                text = first + responses.read()
            assert text.count(b"HTTP/1.1 ") == 2, (url, text)
