"""A broken network between a client and something that answers as brokers do."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator

import pytest

from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing.proxy import HEARTBEAT, OFFSET_COMMIT, FaultProxy

LIMIT_SECONDS = 60


class Broker(socketserver.BaseRequestHandler):
    """Records every request, and responds with it and one more byte."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while head := self.request.recv(4, socket.MSG_WAITALL):
                request = self.request.recv(*struct.unpack(">i", head), socket.MSG_WAITALL)
                self.server.got.append(request)  # type: ignore[attr-defined]
                self.request.sendall(request + b".")


@pytest.fixture
def broker() -> Iterator[socketserver.ThreadingTCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Broker) as server:
        server.daemon_threads = True
        server.got: list[bytes] = []  # type: ignore[attr-defined, misc]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(LIMIT_SECONDS)


@pytest.fixture
def proxy(broker: socketserver.ThreadingTCPServer) -> Iterator[FaultProxy]:
    proxy = FaultProxy({free_ports(1)[0]: broker.server_address[1]})
    proxy.start()
    yield proxy
    proxy.stop()


def connected(proxy: FaultProxy) -> socket.socket:
    host, port = proxy.bootstrap_servers.split(":")
    return socket.create_connection((host, int(port)), LIMIT_SECONDS)


def send(client: socket.socket, kind: int) -> None:
    client.sendall(struct.pack(">ih", 2, kind))


def response_to(client: socket.socket, kind: int) -> bool:
    return client.recv(3, socket.MSG_WAITALL) == struct.pack(">hc", kind, b".")


def test_one_kind_of_request_is_held(proxy: FaultProxy) -> None:
    """With what follows it on its connection; others go on, and later all of it."""
    proxy.hold(OFFSET_COMMIT)
    with connected(proxy) as client, connected(proxy) as other:
        for kind in (HEARTBEAT, OFFSET_COMMIT, HEARTBEAT):
            send(client, kind)
        assert response_to(client, HEARTBEAT)
        send(other, HEARTBEAT)
        assert response_to(other, HEARTBEAT)
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(LIMIT_SECONDS)
        assert proxy.held == [(OFFSET_COMMIT, 1)]
        proxy.heal()
        assert response_to(client, OFFSET_COMMIT)
        assert response_to(client, HEARTBEAT)
