"""A consumer with retry topics and blocked keys over topics in memory, under a clock that tests own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.consumers.retry_path import RetryPath
from headrace.delivery.outcomes import ACK, DeadLetter, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import PumpHooks
from headrace.errors import DeadLetterFailed, KafkaUnavailable, RecordTooLarge
from headrace.records import Committed, OutgoingRecord, Produced, Record, TopicPartition
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster

SOURCE, RETRY_TOPIC, BLOCKED = TopicPartition("t", 3), TopicPartition("g.retry.10s", 0), "_headrace-g.blocked"


class RetryHarness:
    """The pumps of a consumer and its retry topics, with their topics, source, destination and dead letter topic."""

    def __init__(
        self,
        *,
        clock: ManualClock | None = None,
        cluster: MemoryCluster | None = None,
        dead_letters: bool = True,
        follows: bool = True,
        **given: Any,
    ) -> None:
        """With `follows`, the table of blocked keys has each record of its topic at once. `given` is the policy."""
        self.clock = clock or ManualClock()
        self.deliveries: list[Delivery] = []
        self.dead_letters: list[DeadLetter] = []
        self.response: Callable[[Record], Reply] = lambda record: ACK
        self.refuses = ""
        """The topic that cannot be written; `dead` is that of dead letters."""
        self.too_large = b""
        """The key of the records that are too large for a retry topic."""
        self.fed = 0
        delivery = DeliveryConfig(
            ordering=given.pop("ordering", "none"),
            batch=BatchConfig(max_records=given.pop("max_records", 1)),
            max_in_flight=given.pop("max_in_flight", 64),
            retry=RetryConfig.model_validate({"attempts": 2, "topics": [10], **given}),
        )
        self.cluster = cluster or MemoryCluster(dict.fromkeys([*delivery.retry.topic_names("g"), BLOCKED], 1))
        context: Any = SimpleNamespace(admin=self.cluster, clock=self.clock, inner_producer=self)
        self.path = RetryPath(context, "p", "g", ["t"], delivery, self, self if dead_letters else None)
        self.topics, self.table = self.path.writer, self.path.blocked_keys
        self.blocked: Any = self.topics.blocked
        if self.table and follows:
            self.cluster.follow(self.table)
        hooks = PumpHooks(blocked_keys=self.topics)
        self.live = Pump(
            "p",
            "g",
            self.path.destination,
            self.topics,
            delivery=delivery,
            clock=self.clock,
            chance=Random(1),
            hooks=hooks,
        )
        self.retries = self.path.pump(self.live)
        self.retries._context.chance.seed(1)
        for pump in (self.live, self.retries):
            pump.connect(self, self)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run both pumps, each with one partition."""
        for pump, partition in ((self.live, SOURCE), (self.retries, RETRY_TOPIC)):
            await pump.start()
            pump.on_assigned({partition: 1}, {})
        yield
        await self.live.stop()
        await self.retries.stop()

    def feed(self, *records: Record) -> None:
        self.live.on_records(SOURCE, 1, records)

    def feed_retries(self) -> None:
        """Hand over what is new in the retry topic."""
        log = self.log(RETRY_TOPIC.topic)
        if news := log[self.fed :]:
            self.fed = len(log)
            self.retries.on_records(RETRY_TOPIC, self.retries.lanes[RETRY_TOPIC].tracker.epoch, news)

    def log(self, topic: str) -> list[Record]:
        return self.cluster.records(topic)

    def append(self, record: OutgoingRecord) -> Produced:
        return self.cluster.write(record, int(self.clock.time()))

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Any]:
        return [self._refusal(record) or self.append(record) for record in records]

    def _refusal(self, record: OutgoingRecord) -> Exception | None:
        if record.topic == self.refuses:
            return KafkaUnavailable("no broker")
        is_retry = record.topic == RETRY_TOPIC.topic
        return RecordTooLarge("too large") if is_retry and record.key == self.too_large else None

    async def write(self, dead_letters: Sequence[DeadLetter]) -> None:
        if self.refuses == "dead":
            raise DeadLetterFailed("no room", missing=[0])
        self.dead_letters += dead_letters

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.deliveries.append(delivery)
        return [self.response(record) for record in delivery.records]

    @property
    def delivered(self) -> list[int]:
        return [record.offset for delivery in self.deliveries for record in delivery.records]

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        pass

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        pass

    async def seek(self, partition: TopicPartition, epoch: int, to: Committed) -> bool:
        raise NotImplementedError
