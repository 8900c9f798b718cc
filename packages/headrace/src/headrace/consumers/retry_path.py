"""The retry topics of a consumer: the writer of failed records, and the pump that delivers them when they are due."""

from collections.abc import Collection, Sequence

from headrace.config.consumers import BatchConfig, DeliveryConfig, RetryConfig
from headrace.delivery.blocked_keys import BlockedKeys, KeyOrder, StaleEntries
from headrace.delivery.outcomes import DeadLetterWriter, Destination, PartitionListener
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import CommitPace, PumpHooks
from headrace.delivery.retry_topics import RetryTopicDestination, RetryTopics
from headrace.kafka import RAW_BYTES, CompactedTable, InternalTopic
from headrace.process_context import ProcessContext
from headrace.records import Offsets, TopicPartition
from headrace.runtime import Deadline, Service


class RetryPath:
    """The retry topics of one consumer. A separate group reads them, so each group rebalances independently."""

    def __init__(
        self,
        context: ProcessContext,
        name: str,
        group: str,
        topics: Sequence[str],
        delivery: DeliveryConfig,
        destination: Destination,
        dead_letters: DeadLetterWriter | None,
    ) -> None:
        """Make everything but the pump; nothing is started. `destination` takes the records of retry topics, too."""
        produce, self._context = context.inner_producer.produce, context
        self._name, self._group, self._delivery, self._inner = name, group, delivery, destination
        self.source = next(iter(topics), "")
        """The topic that its internal topics are created like; empty if the consumer names none."""
        self.topics = delivery.retry.topic_names(group)
        """The retry topics, the shortest delay first."""
        self.blocked_keys: CompactedTable[bytes] | None = None
        """The table of blocked keys; None if the order of keys is not kept."""
        self.destination = destination
        """The destination of the consumer."""
        blocked: BlockedKeys | None = None
        if delivery.retry.keep_key_order:
            topic = InternalTopic(f"_headrace-{group}.blocked", self.source)
            self.blocked_keys = CompactedTable(context.admin, topic, RAW_BYTES, produce, context.clock)
            blocked = BlockedKeys(self.blocked_keys)
        self.writer = RetryTopics(
            group, delivery.retry, produce, context.clock, dead_letters=dead_letters, blocked=blocked
        )
        """The writer of the consumer's failed records."""
        if blocked:
            self.destination = KeyOrder(destination, blocked, self.writer.write)

    def pump(self, live: Pump) -> Pump:
        """Make the pump that delivers due records; it shares the breaker and the rate of the consumer's own pump."""
        delivery, destination = self._delivery, RetryTopicDestination(self._inner, self.writer, live.epoch_of)
        settings = {
            "ordering": "key" if self.blocked_keys else "none",
            "batch": BatchConfig(max_records=1, max_bytes=delivery.batch.max_bytes),
            "retry": retry_of_topic(delivery.retry),
        }
        return Pump(
            f"{self._name} retries",
            f"{self._group}.retry",
            destination,
            self.writer,
            delivery=delivery.model_copy(update=settings),
            clock=self._context.clock,
            shares_with=live,
            hooks=PumpHooks(
                blocked_keys=destination,
                commits=CommitPace(partitions=live.hooks.commits.partitions),
                delayed=self.writer.delayed,
                partitions=live.hooks.partitions and _RetryPartitions(live.hooks.partitions),
            ),
        )

    def stale_entries(self, live: Pump) -> list[Service]:
        """Make the service that unblocks keys whose record is gone; empty if the order of keys is not kept."""
        blocked = self.writer.blocked
        if not blocked:
            return []
        admin, group, (topic,) = self._context.admin, f"{self._group}.retry", self.topics

        async def ends() -> Offsets:
            partitions = (await admin.describe_topic(topic)).partitions
            return await admin.written_offsets([TopicPartition(topic, each.partition) for each in partitions])

        async def committed() -> Offsets:
            return await admin.committed(group)

        # Twice the limit, because a record of a rejected batch is written a second time.
        late_seconds = 2 * self._context.config.producer.delivery_timeout_seconds
        name = f"{self._name} blocked keys"
        return [StaleEntries(name, blocked, live.lanes, ends, committed, self._context.clock, late_seconds)]


class _RetryPartitions(PartitionListener):
    """Partitions of retry topics, which have no state: their records belong to the original partitions."""

    def __init__(self, live: PartitionListener) -> None:
        self._live = live

    async def drained(self, partitions: Collection[TopicPartition], deadline: Deadline) -> None:
        await self._live.drained(partitions, deadline)


def retry_of_topic(retry: RetryConfig) -> RetryConfig:
    """Return the attempts of a record in a retry topic: one, or `attempts` more where it blocks its key."""
    if not retry.keep_key_order:
        return retry
    delay = float(retry.topics[0])
    pauses = {"first_delay_seconds": delay, "max_delay_seconds": delay}
    return retry.model_copy(update={"attempts": 2 * retry.attempts, **pauses})
