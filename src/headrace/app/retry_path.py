"""What a consumer with retry tiers has beside it: the topics, and the way by which its records come back."""

from __future__ import annotations

from typing import Protocol

from headrace.config.consumers import BatchConfig, ReactiveConsumerConfig
from headrace.config.model import HeadraceConfig
from headrace.config.retry import RetryConfig
from headrace.delivery.parked import KeyOrder, ParkedKeys
from headrace.delivery.protocols import DeadLetterWriter, Destination
from headrace.delivery.pump import Pump
from headrace.delivery.stale_entries import Offsets, StaleEntries
from headrace.delivery.tiers import TierDestination, Tiers, waiting_of
from headrace.kafka import Admin, FollowedTopic, Producer
from headrace.lifecycle import Clock, Service
from headrace.records import TopicPartition


class Surroundings(Protocol):
    """What the process has made before."""

    config: HeadraceConfig
    clock: Clock
    admin: Admin
    inner_producer: Producer


class RetryPath:
    """The tiers of one consumer, read by a group of their own, so neither group's rebalance disturbs the other."""

    def __init__(
        self,
        process: Surroundings,
        name: str,
        consumer: ReactiveConsumerConfig,
        destination: Destination,
        dead_letters: DeadLetterWriter | None,
    ) -> None:
        """Make everything but the pump; nothing is started.

        Args:
            process: Producer, clock and administration.
            name: Name of the consumer.
            consumer: Its settings.
            destination: Where its records are delivered, from the tiers too.
            dead_letters: Where records go after the last tier.
        """
        produce, self._clock, self._process = process.inner_producer.produce, process.clock, process
        self._name, self._consumer, self._inner = name, consumer, destination
        self.source = next(iter(consumer.topics), "")
        """The topic that those of ours are created like; empty if the consumer names none."""
        self.topics = consumer.retry.tier_topics(consumer.group)
        """The tiers, the shortest delay first."""
        self.followed: FollowedTopic | None = None
        """The topic of parked keys, if their order is kept."""
        self.destination = destination
        """What the consumer delivers to."""
        parked = None
        if consumer.retry.keep_key_order:
            name = f"_headrace-{consumer.group}.parked"
            self.followed = FollowedTopic(process.config.kafka, process.admin, name, self.source, process.clock)
            parked = ParkedKeys(name, produce, self.followed.end)
            self.followed.on_records = parked.read
        self.writer = Tiers(
            consumer.group, consumer.retry, produce, process.clock, dead_letters=dead_letters, parked=parked
        )
        """Where the consumer's failed records go."""
        if parked:
            self.destination = KeyOrder(destination, parked, self.writer.write)

    def pump(self, beside: Pump) -> Pump:
        """Make the pump that delivers what is due, beside the one of the consumer."""
        consumer = self._consumer
        settings = {
            "ordering": "key" if self.followed else "none",
            "batch": BatchConfig(max_records=1, max_bytes=consumer.batch.max_bytes),
            "retry": in_the_tier(consumer.retry),
        }
        pump = Pump(
            f"{self._name} retries",
            f"{consumer.group}.retry",
            TierDestination(self._inner, self.writer, beside.epoch_of),
            self.writer,
            delivery=consumer.model_copy(update=settings),
            clock=self._clock,
            beside=beside,
        )
        pump.waiting = self.writer.waiting
        if self.followed:
            pump.let_go = lambda record: self.writer.let_go(waiting_of(record).origin)
            beside.let_go = self.writer.let_go
        pump.first_of = lambda record: waiting_of(record).origin
        beside.serve_tiers(pump)
        return pump

    def stale_entries(self, beside: Pump) -> list[Service]:
        """Make what frees keys that wait for nothing; empty if the order of keys is not kept."""
        if not (parked := self.writer.parked):
            return []
        admin, group, (topic,) = self._process.admin, f"{self._consumer.group}.retry", self.topics

        async def ends() -> Offsets:
            partitions = (await admin.describe_topic(topic)).partitions
            return await admin.written_offsets([TopicPartition(topic, each.partition) for each in partitions])

        async def committed() -> Offsets:
            return await admin.committed(group)

        late_seconds = self._process.config.producer.delivery_timeout_seconds
        name = f"{self._name} blocked keys"
        return [StaleEntries(name, parked, beside.lanes, ends, committed, self._clock, late_seconds)]


def in_the_tier(retry: RetryConfig) -> RetryConfig:
    """Return how often a record of a tier is tried there: once, or where it holds its key `attempts` times again."""
    if not retry.keep_key_order:
        return retry
    delay = float(retry.tiers[0])
    pauses = {"first_delay_seconds": delay, "max_delay_seconds": delay}
    return retry.model_copy(update={"attempts": 2 * retry.attempts, **pauses})
