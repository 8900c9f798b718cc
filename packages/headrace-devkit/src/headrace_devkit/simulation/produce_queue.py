"""What waits for one partition, what is in flight to it, and how both are numbered. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from headrace_devkit.simulation.offsets import Partition
from headrace_devkit.simulation.partition_log import Header
from headrace_devkit.simulation.transaction_coordinator import ProducerEpoch

_RECORD_OVERHEAD_BYTES = 7


class QueuedRecord:
    """A record until its report."""

    __slots__ = (
        "callback",
        "deadline",
        "headers",
        "key",
        "number",
        "partition",
        "queued_at",
        "timestamp_ms",
        "topic",
        "value",
    )

    def __init__(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[Header],
        timestamp_ms: int,
        callback: Callable[[Any, Any], object] | None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.key = key
        self.value = value
        self.headers = headers
        self.timestamp_ms = timestamp_ms
        self.callback = callback
        self.queued_at = 0.0
        self.deadline = 0.0
        self.number = 0
        """In its partition's queue; one that is dropped leaves a gap in the sequence numbers."""

    @property
    def size_bytes(self) -> int:
        return len(self.key or b"") + len(self.value or b"")


class ProducedBatch:
    """Records that are sent in one request."""

    __slots__ = ("first_sequence", "is_purged", "producer", "records", "tries")

    def __init__(self, records: Sequence[QueuedRecord], first_sequence: int, producer: ProducerEpoch | None) -> None:
        self.records = list(records)
        self.first_sequence = first_sequence
        self.producer = producer
        self.tries = 0
        self.is_purged = False


class ProduceQueue:
    """The records of one partition."""

    def __init__(self, key: Partition) -> None:
        self.key = key
        self.waiting: deque[QueuedRecord] = deque()
        self.again: list[ProducedBatch] = []
        """Batches to be sent again, by their sequence numbers."""
        self.in_flight: list[ProducedBatch] = []
        self.acknowledged = 0
        """The sequence number that the next acknowledged batch begins with."""
        self.not_before = 0.0
        self._next_number = 0
        self._base = 0
        """The number of the record whose sequence number is 0 in this epoch."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.again)

    def put(self, record: QueuedRecord) -> None:
        """Add a record at the end."""
        record.number = self._next_number
        self._next_number += 1
        self.waiting.append(record)

    def take(self, most_bytes: int, most_records: int) -> tuple[list[QueuedRecord], bool]:
        """Return the records of the next batch, which stay in the queue, and whether it can take no more."""
        found: list[QueuedRecord] = []
        size = 0
        for record in self.waiting:
            size += record.size_bytes + _RECORD_OVERHEAD_BYTES
            if found and (size > most_bytes or len(found) >= most_records or record.number != found[-1].number + 1):
                break
            found.append(record)
        return found, len(found) < len(self.waiting)

    def batch(self, records: Sequence[QueuedRecord], producer: ProducerEpoch | None) -> ProducedBatch:
        """Remove the first records, and return the batch of them."""
        for _ in records:
            self.waiting.popleft()
        return ProducedBatch(records, records[0].number - self._base, producer)

    def renumber(self) -> None:
        """Begin at 0, in a new epoch: what was to be sent again gets other sequence numbers."""
        before = [record for batch in self.again for record in batch.records]
        self.waiting.extendleft(reversed(before))
        self.again.clear()
        self.acknowledged = 0
        self._base = self.waiting[0].number if self.waiting else self._next_number

    def skip(self, count: int) -> None:
        """Leave no gap for records that an abort has dropped. Source: librdkafka, `rd_kafka_toppar_purge_queues`."""
        self._base += count

    def drop(self, picks: Callable[[QueuedRecord], bool]) -> list[QueuedRecord]:
        """Remove records that are not in flight, and return them."""
        found = [record for batch in self.again for record in batch.records if picks(record)]
        for batch in self.again:
            batch.records = [record for record in batch.records if not picks(record)]
        self.again = [batch for batch in self.again if batch.records]
        found += filter(picks, self.waiting)
        self.waiting = deque(record for record in self.waiting if not picks(record))
        return found
