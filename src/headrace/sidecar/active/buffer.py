"""Records of one instance that were fetched and not delivered."""

import bisect
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from headrace.records import RecordBatch, TopicPartition

Received = Callable[[], Awaitable[bool]]
"""Returns whether a client has received a response."""


async def arrived() -> bool:
    """Return that a response counts as received once it is written."""
    return True


def split(batches: Iterable[RecordBatch], count: int) -> tuple[list[RecordBatch], list[RecordBatch]]:
    """Return the first records, and the others."""
    first: list[RecordBatch] = []
    others: list[RecordBatch] = []
    for batch in batches:
        own = min(count, len(batch))
        count -= own
        if own:
            first.append(batch if own == len(batch) else batch[:own])
        if own < len(batch):
            others.append(batch[own:] if own else batch)
    return first, others


class RecordBuffer:
    """Holds records per partition, in the order of their offsets. Partitions take turns to come first in a read."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Bytes of keys and values."""
        self.records = 0
        """Number of records."""
        self._partitions: dict[TopicPartition, deque[RecordBatch]] = {}

    @property
    def first_offsets(self) -> dict[TopicPartition, int]:
        """The first buffered offset of each partition."""
        return {partition: batches[0].offsets[0] for partition, batches in self._partitions.items()}

    def add(self, batch: RecordBatch) -> None:
        """Append records behind those of the same partition."""
        self._partitions.setdefault(batch.topic_partition, deque()).append(batch)
        self._count(batch, 1)

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget the records of partitions."""
        for partition in partitions:
            for batch in self._partitions.pop(partition, ()):
                self._count(batch, -1)

    def take(self, max_bytes: int, max_records: int) -> list[RecordBatch]:
        """Remove and return the next records; a first record above `max_bytes` is returned alone."""
        taken: list[RecordBatch] = []
        others: list[RecordBatch] = []
        for partition in list(self._partitions):
            waiting = self._partitions.pop(partition)
            while waiting and not others:
                count = _fitting(waiting[0], max_bytes, max_records)
                first, others = split([waiting.popleft()], count if count or taken else min(1, max_records))
                waiting.extendleft(others)
                for batch in first:
                    self._count(batch, -1)
                    max_bytes -= batch.size_bytes
                    max_records -= len(batch)
                taken += first
            if waiting:
                self._partitions[partition] = waiting  # behind the others
            if others:
                break
        return taken

    def put_back(self, batches: Sequence[RecordBatch]) -> None:
        """Put back records that were taken, in the same order and before the others."""
        for batch in reversed(batches):
            self._partitions.setdefault(batch.topic_partition, deque()).appendleft(batch)
            self._count(batch, 1)

    def _count(self, batch: RecordBatch, sign: int) -> None:
        self.records += sign * len(batch)
        self.size_bytes += sign * batch.size_bytes


def _fitting(batch: RecordBatch, max_bytes: int, max_records: int) -> int:
    """Return how many of the first records have at most that many bytes."""
    if batch.size_bytes <= max_bytes:
        return min(len(batch), max_records)
    return min(bisect.bisect(list(itertools.accumulate(batch.sizes)), max_bytes), max_records)


class Read:
    """The records of one read, until its response was written or has failed."""

    def __init__(
        self,
        batches: Sequence[RecordBatch],
        assignments: Mapping[TopicPartition, str],
        end: Callable[[int, Received | None], None],
    ) -> None:
        """Take `end`: it is called once, with the number of records that were sent and how to check their arrival."""
        self.batches = batches
        self.assignments = assignments
        """The name of each partition's assignment, for clients."""
        self._end = end
        self._ended = False

    def end(self, sent: int, received: Received | None = arrived) -> None:
        """End the read: the first records were sent, the others return to the buffer. Only the first call counts.

        Args:
            sent: How many.
            received: Returns later whether the client has received them; if None, the client must name them.
        """
        if not self._ended:
            self._ended = True
            self._end(sent, received)
