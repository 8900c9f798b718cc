"""Limits of a producer: how large a batch of each topic may be, and how many bytes may be pending.

Kafka refuses a whole batch that is larger than its topic allows. The client fills batches up to one size for all
topics, and never splits a refused batch. Source: the topic's `max.message.bytes` and `segment.bytes`.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final

import confluent_kafka

from headrace.errors import BatchRefused, HeadraceError, KafkaUnavailable, ProducerQueueFull
from headrace.records import Header, OutgoingRecord

log = logging.getLogger(__name__)

_FRAME_BYTES: Final = 256
"""Left free for what frames a batch and its first record."""
_HEADER_BYTES: Final = 10
_LIMIT_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 10.0
_REFUSED_SECONDS: Final = 600.0
"""For so long the limit stays below a batch that was refused, whatever the topic's settings say."""
_SETTINGS: Final = ("max.message.bytes", "segment.bytes")
_TOO_LARGE: Final = (confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE, confluent_kafka.KafkaError.RECORD_LIST_TOO_LARGE)

TopicPartitionKey = tuple[str, int]
"""A topic, and the partition of all records of a request; `SEVERAL` if there are more or the client chooses."""
SEVERAL: Final = -1


class BatchLimits:
    """The batch limits of topics, each requested once. `of` and `refusal` may be called on any thread."""

    def __init__(self, topic_configs: Callable[[str], Awaitable[Mapping[str, str]]]) -> None:
        """Prepare; `topic_configs` asks Kafka for the configuration of a topic."""
        self._topic_configs = topic_configs
        self._fresh_until: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._most_bytes: dict[str, int] = {}
        self._refused: dict[str, tuple[int, float]] = {}
        """For each topic the size of batches after the last refusal, and until when it is the most."""

    def of(self, topic: str, usual_bytes: int) -> int | None:
        """Return how many bytes a batch may have, a power of two; None if the producer's usual size fits."""
        most = self._most_bytes.get(topic)
        return None if most is None or most >= usual_bytes else _power_of_two(most)

    def knows(self, topic: str) -> bool:
        """Return whether `learn` would ask nothing."""
        return self._fresh_until.get(topic, 0.0) > time.monotonic()

    async def learn(self, topic: str) -> None:
        """Ask for a topic's limit, unless it is known. Without an answer the usual size stays."""
        async with self._locks.setdefault(topic, asyncio.Lock()):
            if self.knows(topic):
                return
            try:
                async with asyncio.timeout(_LIMIT_SECONDS):  # wait_for may lose a cancellation
                    configs = await self._topic_configs(topic)
                most = min(float(configs.get(name, math.inf)) for name in _SETTINGS) - _FRAME_BYTES
                size, until = self._refused.get(topic, (0, 0.0))
                refused = until > time.monotonic()
                if (most := min(most, size) if refused else most) < math.inf:
                    self._most_bytes[topic] = int(most)
                else:
                    self._most_bytes.pop(topic, None)
                self._fresh_until[topic] = until if refused else math.inf
            except (KafkaUnavailable, TimeoutError):
                self._fresh_until[topic] = time.monotonic() + _AGAIN_SECONDS
            except HeadraceError as error:  # as without permission; a refused batch then lowers the limit
                log.debug("the batch limit of topic %s is not known: %s", topic, error)
                self._fresh_until[topic] = math.inf

    def learn_from_thread(self, topic: str, loop: asyncio.AbstractEventLoop) -> None:
        """Do the same from a thread that may wait for the loop."""
        if not self.knows(topic):
            with contextlib.suppress(TimeoutError, RuntimeError):  # the loop may have ended
                asyncio.run_coroutine_threadsafe(self.learn(topic), loop).result(2 * _LIMIT_SECONDS)

    def refusal(
        self, error: confluent_kafka.KafkaError, record: confluent_kafka.Message, batch_bytes: int
    ) -> BatchRefused | None:
        """Return the error for a record that is not too large itself, but its batch was; else None.

        The topic's limit is lowered then, and stays so for a while: it is not known, was lowered in Kafka, or has
        another cause. `batch_bytes` is the size of the batches it was sent with; a larger record is alone in its batch.
        """
        if error.code() not in _TOO_LARGE:
            return None
        topic, headers = str(record.topic()), record.headers()
        if wire_bytes(record.key(), record.value(), headers) > batch_bytes:  # type: ignore[arg-type]
            return None
        size = _power_of_two(min(self.of(topic, batch_bytes) or batch_bytes, batch_bytes - 1))
        self._most_bytes[topic] = size
        self._refused[topic] = size, time.monotonic() + _REFUSED_SECONDS
        self._fresh_until.pop(topic, None)
        return BatchRefused(
            f"produce to {topic}: the record went to Kafka in a batch that is larger than the topic allows "
            f"({' or '.join(_SETTINGS)}), and is not written: send it again"
        )


class Batches:
    """Flushes a client before a batch exceeds its topic's limit. Belongs to the thread that may wait for the flush."""

    def __init__(self, limits: BatchLimits, batch_bytes: int, flush: Callable[[], Any]) -> None:
        """Prepare; `flush` sends what the client holds and waits for it, `batch_bytes` is the client's own limit."""
        self._limits = limits
        self._flush = flush
        self._batch_bytes = batch_bytes
        self._sizes: dict[str, int] = {}
        self._held_bytes: dict[str, int] = {}

    def before(self, topic: str, size_bytes: int) -> None:
        """Flush the client if the next record would make a batch too large; call it before each record."""
        limit = self._limits.of(topic, self._batch_bytes) or self._batch_bytes
        changed = limit != self._sizes.setdefault(topic, limit)
        if limit == self._batch_bytes and not changed:
            return
        held = self._held_bytes.get(topic, 0)
        if changed or (held and held + size_bytes > limit):
            self._flush()
            self._held_bytes.clear()
            self._sizes[topic], held = limit, 0
        self._held_bytes[topic] = held + size_bytes

    def refusal(self, error: confluent_kafka.KafkaError, record: confluent_kafka.Message) -> BatchRefused | None:
        """Return what `BatchLimits.refusal` says of a record of these batches."""
        return self._limits.refusal(error, record, self._sizes.get(str(record.topic()), self._batch_bytes))


def _power_of_two(most: int) -> int:
    return 1 << (max(1, most).bit_length() - 1)


def wire_bytes(key: bytes | None, value: bytes | None, headers: list[Header] | None = None) -> int:
    """Return about how many bytes a record has in a batch."""
    size = _HEADER_BYTES * 2 + len(key or b"") + len(value or b"")
    return size + sum(_HEADER_BYTES + len(name) + len(text or b"") for name, text in headers) if headers else size


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
        self._requests: defaultdict[str, int] = defaultdict(int)
        """For each topic the number of requests of several records, whose key names one topic only."""

    def check(self, key: TopicPartitionKey, size: int) -> None:
        """Raise ProducerQueueFull unless a request fits."""
        pending, held = self.pending_bytes, self._bytes_by_key.get(key, 0)
        free = self._max_bytes - pending
        # A request larger than the limit passes when nothing else is pending, or it could never be sent.
        if pending and size > free:
            raise _full(f"{pending} bytes wait", f"{self._max_bytes} may (producer.max_pending_bytes)", pending)
        if held and held + size > free * self._share:
            where = f"partition {key[1]} of topic {key[0]}" if key[1] != SEVERAL else f"topic {key[0]}"
            may = f"it may have {self._share:g} of what is free (producer.partition_share)"
            raise _full(f"{held} bytes wait for {where}", may, held)

    def holds(self, topic: str) -> bool:
        """Return whether records of a topic are pending."""
        return topic in self._requests or any(name == topic for name, _ in self._bytes_by_key)

    def count(self, topics: Collection[str], requests: int) -> None:
        """Add to the requests that have records of these topics."""
        for topic in topics:
            self._requests[topic] += requests
            if not self._requests[topic]:
                del self._requests[topic]

    def take(self, key: TopicPartitionKey, size: int) -> None:
        """Count a request that passes `check`."""
        self.check(key, size)
        self.pending_bytes += size
        self._bytes_by_key[key] += size

    def give_back(self, key: TopicPartitionKey, size: int) -> None:
        """Stop counting a request."""
        self.pending_bytes -= size
        self._bytes_by_key[key] -= size
        if not self._bytes_by_key[key]:
            del self._bytes_by_key[key]


def key_of_request(records: Sequence[OutgoingRecord], partitions: int) -> TopicPartitionKey:
    """Return the partition that a request counts for.

    A request counts as a whole, because looking at each record is expensive. A request to several partitions counts
    for the topic, as one whose partition the client chooses: such requests can starve each other only.

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
