"""Records of one instance that were fetched and not delivered."""

import itertools
import operator
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from headrace.records import Record, TopicPartition

Received = Callable[[], Awaitable[bool]]
"""Returns whether a client has received a response."""
_PARTITION: Final = operator.attrgetter("topic", "partition")


async def arrived() -> bool:
    """Return that a response counts as received once it is written."""
    return True


def runs_of(records: Iterable[Record]) -> Iterator[tuple[TopicPartition, list[Record]]]:
    """Yield adjacent records of the same partition together."""
    for partition, run in itertools.groupby(records, _PARTITION):
        yield TopicPartition(*partition), list(run)


class RecordBuffer:
    """Holds records per partition, in the order of their offsets. Partitions take turns to come first in a read."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Bytes of keys and values."""
        self.records = 0
        """Number of records."""
        self._partitions: dict[TopicPartition, deque[Record]] = {}

    @property
    def first_offsets(self) -> dict[TopicPartition, int]:
        """The first buffered offset of each partition."""
        return {partition: records[0].offset for partition, records in self._partitions.items() if records}

    def add(self, partition: TopicPartition, records: Sequence[Record]) -> None:
        """Append records behind those of the same partition."""
        self._partitions.setdefault(partition, deque()).extend(records)
        self.records += len(records)
        self.size_bytes += sum([record.size_bytes for record in records])

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget the records of partitions."""
        for partition in partitions:
            dropped = self._partitions.pop(partition, ())
            self.records -= len(dropped)
            self.size_bytes -= sum([record.size_bytes for record in dropped])

    def take(self, max_bytes: int, max_records: int) -> list[Record]:
        """Remove and return the next records; a first record above `max_bytes` is returned alone."""
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
        """Put back records that were taken, in the same order and before the others."""
        for record in reversed(records):
            self._partitions.setdefault(record.topic_partition, deque()).appendleft(record)
            self.size_bytes += record.size_bytes
        self.records += len(records)


class Read:
    """The records of one read, until its response was written or has failed."""

    def __init__(
        self,
        records: Sequence[Record],
        assignments: Mapping[TopicPartition, str],
        end: Callable[[int, Received | None], None],
    ) -> None:
        """Take `end`: it is called once, with the number of records that were sent and how to check their arrival."""
        self.records = records
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
