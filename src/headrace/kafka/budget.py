"""How many bytes wait for Kafka: in all, and for one partition, so that a leader that is gone does not stop the rest.

Source: reliability.md 5.2, "one queue for all partitions"; row C7.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

import confluent_kafka

from headrace.errors import ProducerQueueFull
from headrace.records import OutgoingRecord

Lane = tuple[str, int]
"""A topic, and the partition of all records of a request; -1: several, or whichever the client picks."""
SEVERAL: Final = -1


class ByteBudget:
    """Bytes accepted and not yet acknowledged.

    A lane may hold a share of what is free, not of the whole: however many leaders are gone, something stays free for
    the others (with a quarter: one lane holds a fifth of the budget at most).
    """

    def __init__(self, max_bytes: int, share: float) -> None:
        self.pending_bytes = 0
        self._max_bytes = max_bytes
        self._share = share
        self._lanes: defaultdict[Lane, int] = defaultdict(int)
        self._requests: defaultdict[str, int] = defaultdict(int)
        """For each topic the requests of several records, whose lane names only one topic."""

    def check(self, lane: Lane, size: int) -> None:
        """Return if there is room for a request.

        Raises:
            ProducerQueueFull: There is none.
        """
        pending, held = self.pending_bytes, self._lanes.get(lane, 0)
        free = self._max_bytes - pending
        # A request larger than its limit passes when nothing else is in its way, or it could never be sent.
        if pending and size > free:
            raise _full(f"{pending} bytes wait", f"{self._max_bytes} may (producer.max_pending_bytes)", pending)
        if held and held + size > free * self._share:
            place = f"partition {lane[1]} of topic {lane[0]}" if lane[1] != SEVERAL else f"topic {lane[0]}"
            may = f"it may have {self._share:g} of what is free (producer.partition_share)"
            raise _full(f"{held} bytes wait for {place}", may, held)

    def holds(self, topic: str) -> bool:
        """Return whether records of a topic wait."""
        return topic in self._requests or any(name == topic for name, _ in self._lanes)

    def count(self, topics: Collection[str], requests: int) -> None:
        """Add to the requests that have records of these topics."""
        for topic in topics:
            self._requests[topic] += requests
            if not self._requests[topic]:
                del self._requests[topic]

    def take(self, lane: Lane, size: int) -> None:
        """Count a request, if `check` lets it."""
        self.check(lane, size)
        self.pending_bytes += size
        self._lanes[lane] += size

    def give_back(self, lane: Lane, size: int) -> None:
        """Count a request no more."""
        self.pending_bytes -= size
        self._lanes[lane] -= size
        if not self._lanes[lane]:
            del self._lanes[lane]


def lane_of(records: Sequence[OutgoingRecord], partitions: int) -> Lane:
    """Return where a request's records go.

    By request, not by record, because every look at a record costs. So a request to several partitions counts for the
    topic as a whole, as one whose partition the client picks: such requests can starve each other, and nobody else.

    Args:
        records: One or more, all of one topic, or the first stands for all.
        partitions: How many the topic has; 0 if that is not known.
    """
    first = records[0]
    if len(records) == 1 and first.partition is None and first.key is not None and partitions:
        return first.topic, confluent_kafka.murmur2(first.key, partitions)  # as the client's own partitioner
    if first.partition is None or any(record.partition != first.partition for record in records):
        return first.topic, SEVERAL
    return first.topic, first.partition


def _full(waiting: str, limit: str, pending: int) -> ProducerQueueFull:
    return ProducerQueueFull(
        f"{waiting} for Kafka's acknowledgement, and {limit}: nothing of this request was sent, "
        "send it again after a pause",
        pending_bytes=pending,
    )
