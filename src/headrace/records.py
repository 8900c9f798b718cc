"""The values that travel between packages: frozen, cheap, free of any client library."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

Header = tuple[str, bytes | None]
"""One record header: a name that may repeat, and bytes or null."""

_RESERVED = "headrace."


def is_reserved(name: str) -> bool:
    """Return whether a header is Headrace's own: such headers of clients are left out, because they could be false."""
    return name[: len(_RESERVED)].lower() == _RESERVED


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def _no_headers() -> list[Header] | None:
    return None


class Committed(NamedTuple):
    """The committed position of a group in a partition."""

    offset: int
    """The next to read."""
    metadata: str = ""
    """The text that is committed with the offset."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record as Kafka stores it.

    `offset` is the record's own offset. `timestamp_ms` is milliseconds since the epoch, -1 when the record has none.
    Most records have no headers, so they are read only when they are needed.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    read_headers: Callable[[], list[Header] | None] = _no_headers
    size_bytes: int = 0
    """Bytes of key and value, counted once, when the record was read from Kafka."""

    @property
    def headers(self) -> list[Header]:
        """The headers in their order, duplicates kept; empty when there are none."""
        return self.read_headers() or []

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition of the record."""
        return TopicPartition(self.topic, self.partition)


class OutgoingRecord(msgspec.Struct, frozen=True, gc=False):
    """One record to write to Kafka, bytes ready.

    `partition` None leaves the choice to the partitioner (murmur2 of the key, as Java's client);
    `timestamp_ms` 0 means now.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[Header] | None = None
    partition: int | None = None
    timestamp_ms: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of key, value and headers."""
        size = len(self.key or b"") + len(self.value or b"")
        for name, value in self.headers or ():
            size += len(name) + len(value or b"")
        return size


NO_OFFSET = -1
"""Instead of an offset where no broker returns one (`acks: 0`), as in Kafka's Java client."""


class Produced(msgspec.Struct, frozen=True, gc=False):
    """The partition and offset of a written record, which is on all in-sync replicas."""

    partition: int
    offset: int
