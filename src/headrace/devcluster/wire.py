"""The three questions the dev cluster asks a broker, in Kafka's own protocol over a plain socket.

A Kafka client would be a second of imports and background threads that complain when the broker is killed, which
is what the dev cluster is for.

Source: Kafka protocol guide, Metadata v1 and CreateTopics v2 (oldest versions that Kafka 4 speaks without tags).
"""

import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

_METADATA, _CREATE_TOPICS = 3, 19
_TOPIC_EXISTS = 36


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
    """Ask the broker on a loopback port how it sees the cluster.

    Raises:
        OSError: It does not answer.
    """
    answer = _Reader(_ask(port, _METADATA, 1, struct.pack(">i", -1), limit_seconds))
    brokers = set()
    for _ in range(answer.number(">i")):
        brokers.add(answer.number(">i"))
        answer.text(), answer.number(">i"), answer.text()  # host, port, rack
    answer.number(">i")  # controller
    partitions = []
    for _ in range(answer.number(">i")):
        answer.number(">h")  # error: a topic being created; it then has no partitions yet
        topic = answer.text()
        answer.number(">b")  # internal
        for _ in range(answer.number(">i")):
            answer.number(">h")
            number, leader = answer.number(">i"), answer.number(">i")
            partitions.append(PartitionState(topic, number, leader, answer.numbers(), answer.numbers()))
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
        OSError: The broker does not answer or refuses; the text is the broker's.
    """
    body = struct.pack(">i", 1) + _text(topic) + struct.pack(">ihi", partitions, replication_factor, 0)
    body += struct.pack(">i", len(configs)) + b"".join(_text(key) + _text(value) for key, value in configs.items())
    body += struct.pack(">i?", int(limit_seconds * 1000), False)
    answer = _Reader(_ask(port, _CREATE_TOPICS, 2, body, limit_seconds))
    answer.number(">i"), answer.number(">i"), answer.text()  # throttle time, count, topic
    code, reason = answer.number(">h"), answer.text()
    if code not in (0, _TOPIC_EXISTS):
        raise OSError(f"the broker refused to create topic {topic}: error {code}, {reason}")


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
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return int(value)

    def numbers(self) -> list[int]:
        return [self.number(">i") for _ in range(self.number(">i"))]

    def text(self) -> str:
        size = max(0, self.number(">h"))
        self._at += size
        return self._data[self._at - size : self._at].decode()
