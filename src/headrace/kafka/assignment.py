"""What the client is told to read, under either protocol of rebalancing: some partitions at a time, or all at once."""

from __future__ import annotations

from typing import Any

import confluent_kafka

from headrace.records import TopicPartition


class Assignment:
    """The client's assignment. For the thread that owns the consumer.

    Source: KIP-429; the client refuses incremental changes under the eager protocol, and whole ones under the other.
    """

    def __init__(self, client: Any, *, whole: bool) -> None:
        """Prepare; `whole` for the eager protocol, where a change names everything that stays."""
        self._client = client
        self._whole = whole
        self._begun: dict[TopicPartition, int] = {}

    def add(self, assigned: list[Any]) -> None:
        """Begin to read partitions at the offsets they carry."""
        (self._client.assign if self._whole else self._client.incremental_assign)(assigned)
        self._begun |= {TopicPartition(p.topic, p.partition): p.offset for p in assigned}

    def remove(self, revoked: list[Any]) -> None:
        """Stop to read partitions; under the eager protocol these are always all."""
        if self._whole:
            self._client.unassign()
        else:
            self._client.incremental_unassign(revoked)
        for item in revoked:
            self._begun.pop(TopicPartition(item.topic, item.partition), None)

    def go_on_at(self, partition: TopicPartition, offset: int) -> list[TopicPartition]:
        """Read a partition from another offset on. Returns all that are to be paused or resumed anew.

        A seek is refused where the client has stopped fetching; to assign anew is not.
        """
        place = [confluent_kafka.TopicPartition(*partition, offset)]
        self._begun[partition] = offset
        if not self._whole:
            self._client.incremental_unassign(place)
            self._client.incremental_assign(place)
            return [partition]
        items = self._client.position([confluent_kafka.TopicPartition(*p) for p in self._begun if p != partition])
        for item in items:
            if item.offset < 0:  # nothing was handed over yet
                item.offset = self._begun[TopicPartition(item.topic, item.partition)]
        self._client.assign(place + items)
        return list(self._begun)
