"""A broken network between a client and something that answers as brokers do."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
import time
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


def wait_for(server: socketserver.ThreadingTCPServer, count: int) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while len(server.got) < count:  # type: ignore[attr-defined]
        assert time.monotonic() < end
        time.sleep(0.01)


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


@pytest.mark.parametrize("arrives", [False, True])
def test_silence_keeps_connections_and_sends_nothing(
    proxy: FaultProxy, broker: socketserver.ThreadingTCPServer, arrives: bool
) -> None:
    """In both directions or one; what was kept back arrives later, also from a client that has gone."""
    with connected(proxy) as client, connected(proxy) as leaver:
        for one in (client, leaver):
            send(one, 1)
            assert response_to(one, 1)
        proxy.silence(requests=not arrives)
        send(client, 2)
        send(leaver, 2)
        if arrives:
            wait_for(broker, 4)
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        leaver.close()
        client.settimeout(LIMIT_SECONDS)
        assert len(broker.got) == (4 if arrives else 2)  # type: ignore[attr-defined]
        proxy.heal()
        assert response_to(client, 2)
        wait_for(broker, 4)


def test_connections_are_cut(proxy: FaultProxy) -> None:
    """Each is reset, not ended; new ones pass."""
    with connected(proxy) as client, connected(proxy) as other:
        for one in (client, other):
            send(one, 1)
            assert response_to(one, 1)
        assert proxy.cut() == 2
        for one in (client, other):
            with pytest.raises(ConnectionResetError):
                one.recv(1)
    with connected(proxy) as client:
        send(client, 1)
        assert response_to(client, 1)
