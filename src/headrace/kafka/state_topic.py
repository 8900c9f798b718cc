"""A compacted topic of ours that holds a state by key, and can be read back after a crash."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from headrace.config.kafka import KafkaConfig
from headrace.kafka.admin import Admin
from headrace.kafka.own_topics import ensure_table
from headrace.kafka.reader import read_records
from headrace.records import Record, TopicPartition

_CONFIGS = {
    "cleanup.policy": "compact,delete",
    "retention.ms": "172800000",  # two days, twice the longest window
    "segment.ms": "3600000",
    "compression.type": "producer",
}


class StateTopic:
    """One partition, so that what is read back has one order."""

    def __init__(self, kafka: KafkaConfig, admin: Admin, name: str) -> None:
        self.name = name
        self._kafka = kafka
        self._admin = admin

    async def exists(self) -> bool:
        """Return whether the cluster has it."""
        return await self._admin.has_topic(self.name)

    async def create_like(self, source: str) -> None:
        """Create it with the replication factor and min ISR of a topic.

        Raises:
            TopicNotFound: It is not there, and topics are not created here (`kafka.create_topics`).
            KafkaError: Kafka refuses.
        """
        await ensure_table(self._kafka, self._admin, self.name, source, _CONFIGS)

    async def read_since(self, timestamp_ms: int) -> AsyncGenerator[list[Record], None]:
        """Read what is committed and as old as a timestamp or younger.

        What a lost process has left open is waited for, until it is committed or aborted.
        """
        partition = TopicPartition(self.name, 0)
        ends = await self._admin.written_offsets([partition])
        starts = await self._admin.offsets_since([partition], timestamp_ms)
        async for records in read_records(self._kafka, starts, ends):
            yield records
