"""A compacted table over a topic in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from headrace.config.kafka import KafkaConfig
from headrace.kafka import CompactedTable, InternalTopic
from headrace.kafka.compacted_table import ValueFormat
from headrace.records import TopicPartition
from headrace.runtime import SystemClock


class EndOfTopic:
    """The administration of a cluster that only knows where the topic ends."""

    config = KafkaConfig()

    def __init__(self, end: Callable[[], int]) -> None:
        self.end = end

    async def written_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, self.end())


def memory_table(
    topic: str, values: ValueFormat[Any], produce: Any, end: Callable[[], int], *, loaded: bool = True
) -> CompactedTable[Any]:
    """Return a table to which the test passes what is in its topic (`read`)."""
    admin: Any = EndOfTopic(end)
    table = CompactedTable(admin, InternalTopic(topic), values, produce, SystemClock())
    if loaded:
        table.loaded(0)
    return table
