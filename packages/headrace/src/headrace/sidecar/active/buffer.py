"""Records of one instance that were fetched and not delivered."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from headrace.records import RecordBatch, TopicPartition


class _Waiting:
    """Batches of one partition. Small reads take a large batch in parts, so what is left is not copied each time."""

    def __init__(self) -> None:
        self.batches: deque[RecordBatch] = deque()
        self.taken = 0
        """How many records of the first batch were taken."""

    def take(self, max_bytes: int, max_records: int, *, any_size: bool) -> RecordBatch | None:
        """Remove and return the next records of the first batch; None if its first record is too large.

        `any_size` allows a first record of any size.
        """
        batch = self.batches[0]
        start = end = self.taken
        for size in batch.sizes[start : start + max_records]:
            if size > max_bytes and not (any_size and end == start):
                break
            max_bytes -= size
            end += 1
        if end == start:
            return None
        self.taken = end
        if 2 * end > len(batch):  # the rest is less, and what was taken must not stay in memory
            self.batches.popleft()
            self.taken = 0
            if end < len(batch):
                self.batches.appendleft(batch[end:])
        return batch[start:end] if end - start < len(batch) else batch

    def put_back(self, batch: RecordBatch) -> None:
        """Put records before the others."""
        if self.taken:
            self.batches[0] = self.batches[0][self.taken :]
            self.taken = 0
        self.batches.appendleft(batch)


class RecordBuffer:
    """Holds records per partition, in the order of their offsets. Partitions take turns to come first in a read."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Bytes of keys and values."""
        self.records = 0
        self._partitions: dict[TopicPartition, _Waiting] = {}

    @property
    def first_offsets(self) -> dict[TopicPartition, int]:
        """The first buffered offset of each partition."""
        return {partition: each.batches[0].offsets[each.taken] for partition, each in self._partitions.items()}

    def add(self, batch: RecordBatch) -> None:
        """Append records behind those of the same partition."""
        self._of(batch.topic_partition).batches.append(batch)
        self._count(batch, 1)

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            if waiting := self._partitions.pop(partition, None):
                for batch in waiting.batches:
                    self._count(batch[waiting.taken :], -1)
                    waiting.taken = 0

    def take(self, max_bytes: int, max_records: int) -> list[RecordBatch]:
        """Remove and return the next records; a first record above `max_bytes` is returned alone."""
        taken: list[RecordBatch] = []
        for partition in list(self._partitions):
            waiting = self._partitions.pop(partition)
            while waiting.batches and (batch := waiting.take(max_bytes, max_records, any_size=not taken)):
                self._count(batch, -1)
                max_bytes -= batch.size_bytes
                max_records -= len(batch)
                taken.append(batch)
            if waiting.batches:
                self._partitions[partition] = waiting  # behind the others
                break
        return taken

    def put_back(
        self, batches: Sequence[RecordBatch], sent: int, current: Collection[TopicPartition]
    ) -> list[RecordBatch]:
        """Put back records that were taken, except the first, which were sent; return these.

        The others come before the rest of their partitions, in the same order. Those of partitions that are not
        `current` any more are dropped.
        """
        first: list[RecordBatch] = []
        others: list[RecordBatch] = []
        for batch in batches:
            own = min(sent, len(batch))
            sent -= own
            if own:
                first.append(batch if own == len(batch) else batch[:own])
            if own < len(batch) and batch.topic_partition in current:
                others.append(batch[own:] if own else batch)
        for batch in reversed(others):
            self._of(batch.topic_partition).put_back(batch)
            self._count(batch, 1)
        return first

    def _of(self, partition: TopicPartition) -> _Waiting:
        return self._partitions.setdefault(partition, _Waiting())

    def _count(self, batch: RecordBatch, sign: int) -> None:
        self.records += sign * len(batch)
        self.size_bytes += sign * batch.size_bytes
