"""What a consumer tells whoever takes its records; the delivery pump answers to it without either knowing the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.lifecycle import Deadline
from headrace.records import Committed, Record, TopicPartition


class Listener(Protocol):
    """Takes the records of a consumer. Every method runs on the loop."""

    def on_assigned(
        self, partitions: Mapping[TopicPartition, int], committed: Mapping[TopicPartition, Committed]
    ) -> None:
        """Partitions are ours from now on: partition to assignment epoch, and where the group stands in them."""

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        """Records arrived, in offset order, never empty."""

    def on_end(self, partition: TopicPartition, epoch: int, position: int) -> None:
        """The end of the partition is reached at `position`: everything below it was handed over or does not exist."""

    def on_gap(self, partition: TopicPartition, offsets: int) -> None:
        """So many offsets are no longer in the log and were passed, as a written policy says."""

    async def on_revoked(
        self, partitions: Sequence[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, Committed]:
        """Finish what is in flight for these partitions, and return what to commit for them.

        Returns within the deadline; past it, what is unfinished is abandoned and will be delivered elsewhere.
        """

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Partitions belong to somebody else already: drop everything, commit nothing."""
