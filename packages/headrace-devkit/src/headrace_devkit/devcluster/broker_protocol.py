"""The three requests of the dev cluster to a broker, in Kafka's own protocol over a plain socket.

A Kafka client takes a second to import. Its background threads log errors when the broker is killed, which is what
the dev cluster is for.

Source: Kafka protocol guide, Metadata v1 and CreateTopics v2 (oldest versions that Kafka 4 speaks without tags).
"""

import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

_METADATA, _CREATE_TOPICS = 3, 19
_TOPIC_EXISTS = 36
_PASSING = (7, 38, 41)  # timed out, fewer brokers than replicas, another controller


class PartitionState(NamedTuple):
    """One partition as a broker sees it."""

    topic: str
    partition: int
    leader: int
    """Broker id, -1 if there is none now."""
    replicas: list[int]
    in_sync: list[int]


class Metadata(NamedTuple):
    """The cluster as one broker sees it."""

    brokers: set[int]
    partitions: list[PartitionState]


def metadata(port: int, limit_seconds: float = 2.0) -> Metadata:
    """Return the cluster as the broker on a loopback port sees it.

    Raises:
        OSError: It does not respond.
    """
    response = _Reader(_ask(port, _METADATA, 1, struct.pack(">i", -1), limit_seconds))
    brokers = {response.values("isis")[0] for _ in range(response.value("i"))}  # id, host, port, rack
    response.value("i")  # controller
    partitions = []
    for _ in range(response.value("i")):
        # An error is a topic that is being created; it then has no partitions yet.
        _error, topic, _internal = response.values("hsb")
        for _ in range(response.value("i")):
            _error, number, leader, replicas, in_sync = response.values("hiiaa")
            partitions.append(PartitionState(topic, number, leader, replicas, in_sync))
    return Metadata(brokers, partitions)


def create_topic(
    port: int,
    topic: str,
    partitions: int,
    replication_factor: int,
    configs: Mapping[str, str],
    limit_seconds: float = 10.0,
) -> None:
    """Create a topic; one that is there already is fine. Its leaders may be elected a little later.

    Raises:
        TimeoutError: The broker does not answer in time, or the cluster has not settled: it may do later.
        OSError: The broker cannot be reached or refuses; the text is the broker's.
    """
    body = struct.pack(">i", 1) + _text(topic) + struct.pack(">ihi", partitions, replication_factor, 0)
    body += struct.pack(">i", len(configs)) + b"".join(_text(key) + _text(value) for key, value in configs.items())
    body += struct.pack(">i?", int(limit_seconds * 1000), False)
    response = _Reader(_ask(port, _CREATE_TOPICS, 2, body, limit_seconds))
    _throttle_time, _count, _topic, code, reason = response.values("iishs")
    if code not in (0, _TOPIC_EXISTS):
        kind = TimeoutError if code in _PASSING else OSError
        raise kind(f"the broker refused to create topic {topic}: error {code}, {reason}")


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">h", len(data)) + data


def _ask(port: int, api: int, version: int, body: bytes, limit_seconds: float) -> bytes:
    request = struct.pack(">hhi", api, version, 1) + _text("headrace-devcluster") + body
    with socket.create_connection(("127.0.0.1", port), limit_seconds) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _receive(connection, 4))
        return _receive(connection, size)[4:]


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the broker closed the connection")
        data += part
    return bytes(data)


class _Reader:
    """Takes a response apart: `b`, `h` and `i` are numbers as in `struct`, `s` is text, `a` an array of `i`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def values(self, layout: str) -> list[Any]:
        return [self.value(kind) for kind in layout]

    def value(self, kind: str) -> Any:
        if kind == "a":
            return self.values("i" * self.value("i"))
        size = max(0, self.value("h")) if kind == "s" else struct.calcsize(f">{kind}")
        self._at += size
        part = self._data[self._at - size : self._at]
        return part.decode() if kind == "s" else struct.unpack(f">{kind}", part)[0]
