"""Limits the bytes that are pending in a producer."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import confluent_kafka

from headrace.errors import ProducerQueueFull
from headrace.records import OutgoingRecord

TopicPartitionKey = tuple[str, int]
"""A topic, and the partition of all records of a request; `SEVERAL` if there are more or the client chooses."""
SEVERAL: Final = -1


class Claim(NamedTuple):
    """The bytes of one request, counted in a budget."""

    key: TopicPartitionKey
    size_bytes: int


class ByteBudget:
    """Bytes accepted and not yet acknowledged, in all and per partition: one lost leader does not stop the rest.

    A partition may use a share of the free bytes, not of the whole. So some bytes stay free for other partitions,
    however many leaders are down. With a share of a quarter, one partition uses a fifth of the budget at most.
    """

    def __init__(self, max_bytes: int, share: float) -> None:
        self.pending_bytes = 0
        self._max_bytes = max_bytes
        self._share = share
        self._bytes_by_key: defaultdict[TopicPartitionKey, int] = defaultdict(int)

    def check(self, key: TopicPartitionKey, size: int) -> None:
        """Raise ProducerQueueFull unless a request fits."""
        pending = self.pending_bytes
        of_key = self._bytes_by_key.get(key, 0)
        free = self._max_bytes - pending
        # A request larger than the limit passes when nothing else is pending, or it could never be sent.
        if pending and size > free:
            raise _full("", pending, f"{self._max_bytes} bytes (producer.max_pending_bytes)")
        if of_key and of_key + size > free * self._share:
            where = f" for partition {key[1]} of topic {key[0]}" if key[1] != SEVERAL else f" for topic {key[0]}"
            raise _full(where, of_key, f"{self._share:g} of the free part of producer.max_pending_bytes")

    def take(self, key: TopicPartitionKey, size: int) -> Claim:
        """Count a request that passes `check`."""
        self.check(key, size)
        self.pending_bytes += size
        self._bytes_by_key[key] += size
        return Claim(key, size)

    def release(self, claim: Claim) -> None:
        """Stop counting a request."""
        self.pending_bytes -= claim.size_bytes
        self._bytes_by_key[claim.key] -= claim.size_bytes
        if not self._bytes_by_key[claim.key]:
            del self._bytes_by_key[claim.key]


def key_of_request(records: Sequence[OutgoingRecord], partitions: int) -> TopicPartitionKey:
    """Return the partition that a request counts for.

    A request counts as a whole, because looking at each record is expensive. A request to several partitions counts
    for the topic, as one whose partition the client chooses: such requests can starve each other only.

    Args:
        records: One or more, of one topic; otherwise the first one's topic counts.
        partitions: How many the topic has; 0 if that is not known.
    """
    first = records[0]
    if len(records) == 1 and first.partition is None and first.key is not None and partitions:
        return first.topic, confluent_kafka.murmur2(first.key, partitions)  # as the client's own partitioner
    if first.partition is None or any(record.partition != first.partition for record in records):
        return first.topic, SEVERAL
    return first.topic, first.partition


def _full(where: str, pending: int, limit: str) -> ProducerQueueFull:
    return ProducerQueueFull(
        f"this request would exceed the limit of {limit}: {pending} bytes{where} are awaiting Kafka's acknowledgement; "
        "nothing of this request was sent, send it again after a pause",
        pending_bytes=pending,
    )
