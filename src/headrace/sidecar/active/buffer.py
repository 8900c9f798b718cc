"""Records of one instance that were fetched and not delivered yet."""

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from headrace.records import Record, TopicPartition

_PARTITION: Final = operator.attrgetter("topic", "partition")


def runs_of(records: Iterable[Record]) -> Iterator[tuple[TopicPartition, list[Record]]]:
    """Yield neighbours of the same partition together."""
    for partition, run in itertools.groupby(records, _PARTITION):
        yield TopicPartition(*partition), list(run)


class RecordBuffer:
    """Keeps records per partition in the order of their offsets. Partitions take turns at the head of a read."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Bytes of keys and values."""
        self.records = 0
        """Number of records."""
        self.first: dict[TopicPartition, int] = {}
        """Offset of the first record of each partition since its records were dropped."""
        self._partitions: dict[TopicPartition, deque[Record]] = {}

    @property
    def first_offsets(self) -> dict[TopicPartition, int]:
        """The first offset that waits in each partition."""
        return {partition: records[0].offset for partition, records in self._partitions.items() if records}

    def add(self, partition: TopicPartition, records: Sequence[Record]) -> None:
        """Append records that follow those of the same partition."""
        self.first.setdefault(partition, records[0].offset)
        self._partitions.setdefault(partition, deque()).extend(records)
        self.records += len(records)
        self.size_bytes += sum([record.size_bytes for record in records])

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget the records of partitions."""
        for partition in partitions:
            self.first.pop(partition, None)
            dropped = self._partitions.pop(partition, ())
            self.records -= len(dropped)
            self.size_bytes -= sum([record.size_bytes for record in dropped])

    def take(self, max_bytes: int, max_records: int) -> list[Record]:
        """Remove and return the next records of one partition; a first one of more than `max_bytes` comes alone."""
        taken: list[Record] = []
        size = 0
        full = False
        for partition in list(self._partitions):
            waiting = self._partitions.pop(partition)
            while waiting and not full:
                record = waiting[0]
                full = len(taken) >= max_records or (bool(taken) and size + record.size_bytes > max_bytes)
                if not full:
                    size += record.size_bytes
                    taken.append(waiting.popleft())
            if waiting:
                self._partitions[partition] = waiting  # behind the others
            if full:
                break
        self.size_bytes -= size
        self.records -= len(taken)
        return taken

    def put_back(self, records: Sequence[Record]) -> None:
        """Put records that were taken in front of what is there; in the order in which they were taken."""
        for record in reversed(records):
            self._partitions.setdefault(record.topic_partition, deque()).appendleft(record)
            self.size_bytes += record.size_bytes
        self.records += len(records)


class Read:
    """The records of one read, until its answer is written or has failed."""

    def __init__(self, records: Sequence[Record], end: Callable[[int], None]) -> None:
        """Take what is called once with the number of delivered records."""
        self.records = records
        self._end = end
        self._ended = False

    def end(self, delivered: int) -> None:
        """End the read: the first records were delivered, the others return to the buffer. Only one call counts."""
        if not self._ended:
            self._ended = True
            self._end(delivered)
