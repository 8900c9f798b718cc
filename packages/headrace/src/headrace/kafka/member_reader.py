"""Reads topics as a member of a group, for a command: one poll at a time, and offsets are committed on request."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Self

from headrace.config.kafka import KafkaConfig
from headrace.config.membership import ConsumerConfig
from headrace.errors import HeadraceError
from headrace.kafka.client import library
from headrace.kafka.client.access import Right
from headrace.kafka.client.error_map import to_error
from headrace.kafka.client.properties import member_properties
from headrace.kafka.fetch_queue import FetchQueue
from headrace.kafka.names import check_group
from headrace.kafka.reader import ReadPart, poll_part
from headrace.records import Offsets, TopicPartition
from headrace.runtime import run_blocking

_END = library.KafkaError._PARTITION_EOF


class MemberReader:
    """A member of a group; the group gives it partitions, and they start at the committed offsets."""

    def __init__(
        self,
        kafka: KafkaConfig,
        group: str,
        topics: Sequence[str],
        properties: Mapping[str, Any],
        *,
        otherwise: Literal["earliest", "latest"],
    ) -> None:
        """Prepare; partitions without a committed offset start `otherwise`.

        Raises:
            InvalidRequest: The name of the group is not valid.
        """
        self._kafka = kafka
        self._group = check_group(group)
        self._topics = list(topics)
        self._properties = {
            **member_properties(kafka, "headrace-consume", group, ConsumerConfig()),
            **properties,
            "auto.offset.reset": otherwise,
            "queued.max.messages.kbytes": 16_384,
            "error_cb": lambda error: None,  # fatal and authentication errors are returned with the records too
        }
        self._joined = False
        self._at_end: set[TopicPartition] = set()

    async def __aenter__(self) -> Self:
        self._client = library.Consumer(self._properties)
        self._queue = FetchQueue(self._client, self._kafka)
        self._client.subscribe(self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(run_blocking(self._queue.close))  # leaves the group

    async def parts(self, most_records: int) -> AsyncGenerator[ReadPart, None]:
        """Yield what arrives; a part may be empty.

        Raises:
            KafkaError: Kafka refuses the membership or the read.
        """
        while True:
            batches, append_times, events = await run_blocking(poll_part, self._queue, most_records)
            self._at_end.difference_update(batch.topic_partition for batch in batches)
            for event in events:
                if event.error.code() != _END:
                    raise self._error(event.error, event.partition.topic)
                self._at_end.add(event.partition)
            yield ReadPart(batches, {}, append_times)

    @property
    def is_at_end(self) -> bool:
        """Whether it has joined, and every partition that it has was read to its end."""
        assigned = {TopicPartition(p.topic, p.partition) for p in self._client.assignment()}
        return self._joined and assigned <= self._at_end

    async def commit(self, next_offsets: Offsets) -> HeadraceError | None:
        """Commit the offsets to read next; return the error if Kafka refuses them, as after a rebalance."""
        offsets = [library.TopicPartition(*partition, offset) for partition, offset in next_offsets.items()]
        try:
            committed = await run_blocking(lambda: self._client.commit(offsets=offsets, asynchronous=False))
        except library.KafkaException as cause:
            return self._error(cause.args[0], "")
        refused = [one for one in committed or () if one.error]
        return self._error(refused[0].error, refused[0].topic) if refused else None

    def _error(self, error: Any, topic: str) -> HeadraceError:
        rights = [Right("Read", "group", self._group), *([Right("Read", "topic", topic)] if topic else [])]
        return to_error(error, f"read as a member of group {self._group}", self._kafka, *rights)

    def _on_assign(self, _client: Any, partitions: Sequence[Any]) -> None:
        self._joined = True
        self._queue.assigned(partitions)  # the client assigns them when this returns

    def _on_revoke(self, _client: Any, partitions: Sequence[Any]) -> None:
        self._joined = False
        self._at_end.difference_update(TopicPartition(p.topic, p.partition) for p in partitions)
