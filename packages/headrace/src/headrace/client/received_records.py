"""What a client knows of the records of one instance: which have arrived, were returned, or must be read again."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace.client.exchange import ClientRecord
from headrace.errors import CommitRefused
from headrace.records import TopicPartition


class ReadPosition(NamedTuple):
    """The next offset to read, and the assignment in which the one before was read."""

    offset: int
    assignment: str = ""

    def entry(self, partition: TopicPartition) -> dict[str, Any]:
        """Return it as in request bodies."""
        named = {"assignment": self.assignment} if self.assignment else {}
        return {"topic": partition.topic, "partition": partition.partition, "offset": self.offset, **named}


def partition_of(entry: Mapping[str, Any]) -> TopicPartition:
    """Return the partition of an entry of a response."""
    return TopicPartition(entry["topic"], entry["partition"])


class _Span(NamedTuple):
    """Offsets of a partition, without the end."""

    first: int
    end: int


Done = dict[tuple[TopicPartition, str], _Span]
"""By partition and assignment. If a partition has two, both are sent, and the earlier one is rejected."""


class ReceivedRecords:
    """The records of an instance by partition; it sends no request."""

    def __init__(self) -> None:
        # Since the last commit
        self.done: Done = {}
        """Records returned to the caller."""
        # While partitions are assigned
        self.next: dict[TopicPartition, ReadPosition] = {}
        """After the last record that has arrived, or where a later seek leads."""
        # Until the next read
        self.back: dict[TopicPartition, ReadPosition] = {}
        """Where partitions must be read again, before anything else."""
        self.moved = set[TopicPartition]()
        """Partitions with a seek; records received before it are not returned any more."""
        self.ready = deque[ClientRecord]()
        """Records that have arrived for an iteration and have not been returned yet."""

    @property
    def partitions(self) -> set[TopicPartition]:
        """All partitions with a position or a record."""
        ready = {TopicPartition(record.topic, record.partition) for record in self.ready}
        return {*self.next, *self.back, *ready, *(partition for partition, _ in self.done)}

    def arrived(self, record: ClientRecord) -> None:
        """Count a record as arrived."""
        self.next[TopicPartition(record.topic, record.partition)] = ReadPosition(record.offset + 1, record.assignment)

    def take(self, record: ClientRecord) -> bool:
        """Count a record as returned to the caller; return False if it must not be, because of a seek."""
        partition = TopicPartition(record.topic, record.partition)
        if partition in self.moved:
            return False
        key = partition, record.assignment
        first = self.done[key].first if key in self.done else record.offset
        self.done[key] = _Span(first, record.offset + 1)
        return True

    def read_ready_again(self) -> None:
        """Read the records again that have arrived for an iteration and were not returned."""
        for record in reversed(self.ready):
            partition = TopicPartition(record.topic, record.partition)
            if partition not in self.moved:
                self.back[partition] = ReadPosition(record.offset, record.assignment)
        self.ready.clear()

    def forget(self, ended: Done) -> None:
        """Stop counting offsets as uncommitted."""
        for key, span in ended.items():
            if key in self.done:
                self.done[key] = self.done[key]._replace(first=span.end)
                if self.done[key].end <= span.end:
                    del self.done[key]

    def refused(self, done: Done, error: CommitRefused) -> None:
        """Read uncommitted records again, if the assignment is still valid."""
        gone = {(partition_of(one), one.get("assignment", "")) for one in error.parameters.get("refused", ())}
        for (partition, assignment), span in done.items():
            if (partition, assignment) not in gone:
                self.back[partition] = ReadPosition(span.first, assignment)
                self.moved.add(partition)
            elif partition in self.next and self.next[partition].assignment == assignment:
                del self.next[partition]
        self.done = {key: span for key, span in self.done.items() if key not in done}

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget what is known of partitions, because of a seek."""
        dropped = set(partitions)
        for partition in dropped:
            self.next.pop(partition, None)
            self.back.pop(partition, None)
        self.done = {key: span for key, span in self.done.items() if key[0] not in dropped}
        self.moved |= dropped
