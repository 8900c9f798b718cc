"""The Kafka behind a server in the test's own loop: it takes records, can be held, and can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.kafka import check_topic
from headrace.records import OutgoingRecord, Produced, TopicPartition


class Kafka:
    """Takes records; can be held, and can fail."""

    def __init__(self) -> None:
        self.records: list[OutgoingRecord] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.taken = asyncio.Event()
        self.failure: Exception | None = None
        self.not_sent: list[Any] = []
        """Requests that were refused, as the audit gets them."""

    def fail(self) -> None:
        if self.failure:
            raise self.failure

    async def produce(self, records: Sequence[OutgoingRecord], sliced: bool = False) -> list[Any]:
        self.records += records
        self.taken.set()
        await self.gate.wait()
        self.fail()
        return [Produced(0, index) for index in range(len(records))]

    def submit(
        self, records: Sequence[OutgoingRecord], closing: Any = None, group: Any = None
    ) -> asyncio.Future[list[Any]]:
        return asyncio.ensure_future(self.produce(records))

    async def has_topic(self, name: str) -> bool:
        return True

    async def written_offsets(self, partitions: Any) -> dict[Any, int]:
        return dict.fromkeys(partitions, 0)

    async def list_topics(self) -> list[Any]:
        self.fail()
        return [SimpleNamespace(name="t.dlq")]

    async def topic_ids(self, names: Iterable[str], right: str = "") -> dict[str, str]:
        self.fail()
        return {name: name for name in names if name == "t.dlq"}

    async def topic_offsets(self, topic: str, right: str = "") -> dict[TopicPartition, tuple[int, int]]:
        self.fail()
        return {TopicPartition(topic, 0): (0, 0)}

    async def list_groups(self) -> list[Any]:
        self.fail()
        return []

    async def group_members(self, group: str) -> list[Any]:
        self.fail()
        return []

    async def committed(self, group: str) -> dict[Any, int]:
        self.fail()
        return {}

    async def describe_topic(self, name: str, right: str = "") -> Any:
        self.fail()
        return SimpleNamespace(name=name, partitions=[], replication_factor=0)

    async def offsets_since(self, partitions: Any, timestamp_ms: int) -> dict[Any, int]:
        return {}

    async def start_offsets(self, partitions: Any) -> dict[Any, int]:
        return {}

    end_offsets = start_offsets
    config = KafkaConfig()

    def send(self, records: Sequence[OutgoingRecord], done: Callable[[list[Any]], None], *_: Any) -> None:
        self.fail()
        task = asyncio.ensure_future(self.produce(records))
        task.add_done_callback(lambda task: done(task.result()))

    def check_capacity(self, topic: str, size_bytes: int) -> None:
        if isinstance(self.failure, errors.ProducerQueueFull):
            raise self.failure

    def known(self, topic: str) -> int | None:
        return None if topic.startswith(("missing", "new", ".")) else 3

    async def partitions_of(self, topic: str) -> int:
        if check_topic(topic).startswith("missing"):
            raise errors.TopicNotFound(topic=topic)
        return 3
