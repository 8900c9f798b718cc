from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from headrace.devcluster import broker_protocol


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


@pytest.fixture
def broker() -> Iterator[Callable[[bytes], tuple[int, list[bytes]]]]:
    """Response one request with given bytes, in two parts; gives the port and the list that gets the request."""
    threads: list[threading.Thread] = []

    def answer(body: bytes) -> tuple[int, list[bytes]]:
        listener = socket.create_server(("127.0.0.1", 0))
        requests: list[bytes] = []

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, listener:
                (size,) = struct.unpack(">i", connection.recv(4))
                requests.append(connection.recv(size, socket.MSG_WAITALL))
                frame = struct.pack(">ii", len(body) + 4, 1) + body
                connection.sendall(frame[:7])
                connection.sendall(frame[7:])

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return listener.getsockname()[1], requests

    yield answer
    for thread in threads:
        thread.join(5)


def test_metadata_lists_brokers_and_partitions(broker: Callable[[bytes], tuple[int, list[bytes]]]) -> None:
    """Ids, leaders, replicas and in-sync replicas are read; a rack may be null."""
    brokers = b"".join(struct.pack(">i", number) + _text("127.0.0.1") + struct.pack(">ih", 9, -1) for number in (1, 3))
    partition = struct.pack(">hii", 0, 2, 3) + struct.pack(">iii", 2, 1, 3) + struct.pack(">ii", 1, 3)
    topic = struct.pack(">h", 0) + _text("orders") + struct.pack(">bi", 0, 1) + partition
    port, requests = broker(struct.pack(">i", 2) + brokers + struct.pack(">ii", 1, 1) + topic)
    found = broker_protocol.metadata(port)
    assert found.brokers == {1, 3}
    assert found.partitions == [broker_protocol.PartitionState("orders", 2, 3, [1, 3], [3])]
    assert requests[0].startswith(struct.pack(">hh", 3, 1))


def test_a_refused_topic_carries_the_brokers_reason(broker: Callable[[bytes], tuple[int, list[bytes]]]) -> None:
    """The broker's number and text are in the error."""
    port, _ = broker(struct.pack(">ii", 0, 1) + _text("a b") + struct.pack(">h", 17) + _text("illegal name"))
    with pytest.raises(OSError, match="topic a b: error 17, illegal name"):
        broker_protocol.create_topic(port, "a b", 1, 1, {})


def test_a_topic_that_exists_is_fine(broker: Callable[[bytes], tuple[int, list[bytes]]]) -> None:
    """Two that ask for the same topic both succeed."""
    port, requests = broker(struct.pack(">ii", 0, 1) + _text("t") + struct.pack(">hh", 36, -1))
    broker_protocol.create_topic(port, "t", 2, 1, {"retention.ms": "5"})
    assert _text("retention.ms") + _text("5") in requests[0]


def test_a_connection_closed_early_is_an_error() -> None:
    """Not an endless wait."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with listener, pytest.raises(OSError, match=r"closed|reset"):
        broker_protocol.metadata(listener.getsockname()[1])
    thread.join(5)
