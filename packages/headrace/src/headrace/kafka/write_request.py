"""The records of one call of `Producer.send`, and what becomes known about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from headrace import errors
from headrace.records import OutgoingRecord, Produced, WrittenRecords

ProduceResult = Produced | errors.HeadraceError
"""Where a record was written, or why not. `KafkaTimeout` and `FatalKafkaError` mean: unknown."""
Results = Sequence[ProduceResult]
"""One per record, in their order."""
Done = Callable[[Results], None]
_OF_A_BATCH = errors.RecordRefused, errors.RecordTooLarge
"""What Kafka reports for all records of a batch when it refuses one of them."""
SEVERAL: Final = -1
TopicPartitionKey = tuple[str, int]
"""A topic, and the partition of all records of a request; `SEVERAL` if there are more or the client chooses."""


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The bytes of one request, counted in a budget."""

    key: TopicPartitionKey
    size_bytes: int


UNCOUNTED: Final = Claim(("", SEVERAL), 0)


def failures_of(results: Results) -> list[errors.HeadraceError]:
    """Return the errors among results."""
    if isinstance(results, WrittenRecords):
        return []
    return [result for result in results if isinstance(result, errors.HeadraceError)]


class WriteRequest(msgspec.Struct, eq=False):
    """The records of one `send`, or of a transaction: their results, and how many still wait for a report."""

    # For good
    records: Sequence[OutgoingRecord]
    claim: Claim
    _post: Callable[[WriteRequest], None]
    """Gets the request with all results."""
    done: Done | None
    # What is known so far
    results: Any
    """A list of `None` in the beginning, `Results` in the end."""
    in_order: bool = False
    is_alone: bool = False  # whether each record has a batch of its own
    is_suspected: bool = False  # whether Kafka refused a batch, and not certainly each record of it
    _reported: int = 0  # written by the side that takes reports
    _refused: int = 0  # written by the loop only

    def reported(self, index: int, count: int, results: Results) -> None:
        """Take the results of so many records from an index on; always on the same thread."""
        if count == len(self.records):
            self.results = results
        else:
            self.results[index : index + count] = results
        if type(results) is not WrittenRecords:
            self.is_suspected |= any(isinstance(result, _OF_A_BATCH) for result in results)
        self._reported += count
        # Each side counts its own and then reads the other's; the later one sees the sum. If both see it, the
        # request is posted twice, and the second time it is done already.
        if self._reported + self._refused == len(self.records):
            self._post(self)

    def refuse(self, index: int, error: errors.HeadraceError) -> None:
        """Record that the client did not take a record, on the loop."""
        self.results[index] = error
        self._refused += 1
        if self._reported + self._refused == len(self.records):
            self._post(self)

    def suspects(self) -> list[int]:
        """Return which records must be written again, each alone, to find those that Kafka refuses.

        With `in_order` also later records of their keys, although they are acknowledged.
        """
        found, keys = list[int](), set[tuple[str, bytes]]()
        for index, (record, result) in enumerate(zip(self.records, self.results, strict=True)):
            key = (record.topic, record.key or b"")
            if isinstance(result, _OF_A_BATCH) or (key in keys and type(result) is Produced):
                found.append(index)
                if self.in_order and record.key is not None:
                    keys.add(key)
        return found
