"""The records of one request to a producer: their results, and which of them must be written again alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import confluent_kafka

from headrace import errors
from headrace.kafka.byte_budget import Claim
from headrace.records import OutgoingRecord, Produced

ProduceResult = Produced | errors.HeadraceError
"""Where a record was written, or why not. `KafkaTimeout` and `FatalKafkaError` mean: unknown."""
Results = list[ProduceResult]
"""One per record, in their order."""
Done = Callable[[Results], None]
_OF_A_BATCH = errors.RecordRefused, errors.RecordTooLarge
"""What Kafka reports for all records of a batch when it refuses one of them."""


class Request:
    """The records of one `send`: their results, and how many still wait for a report."""

    callbacks: Callbacks

    def __init__(
        self,
        records: Sequence[OutgoingRecord],
        claim: Claim,
        post: Callable[[Request], None],
        done: Done,
        result: Callable[[Any, Any], ProduceResult],
    ) -> None:
        """Prepare; `post` gets the request with all results, `result` translates a report without an offset."""
        # For good
        self.records = records
        self.claim = claim
        self.in_order = False
        self.is_alone = False  # whether each record has a batch of its own
        self.done: Done | None = done
        self._post = post
        self._result = result
        # What is known so far
        self.results: list[Any] = [None] * len(records)
        self.is_suspected = False  # whether Kafka refused a batch, and not certainly each record of it
        self.delivered = 0  # written by the delivery thread only
        self.refused = 0  # written by the loop only

    def reported(self, index: int, error: confluent_kafka.KafkaError | None, record: Any) -> None:
        """Take one delivery report, on the delivery thread."""
        offset = None
        if error is None:
            try:
                offset = record.offset()
            except SystemError:  # the client raises a fatal error in the first call of this report
                offset = record.offset()
        if offset is None:
            self.results[index] = result = self._result(error, record)
            self.is_suspected |= isinstance(result, _OF_A_BATCH)
        else:
            self.results[index] = Produced(record.partition(), offset)
        self.delivered += 1
        # Each side counts its own and then reads the other's; the later one sees the sum. If both see it, the
        # request is posted twice, and the second time it is done already.
        if self.delivered + self.refused == len(self.results):
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

    def refuse(self, index: int, error: errors.HeadraceError) -> None:
        """Record that the client did not take a record, on the loop."""
        self.results[index] = error
        self.refused += 1
        if self.delivered + self.refused == len(self.results):
            self._post(self)


class Callbacks:
    """Delivery callbacks by index, for one request after the other: creating them costs half as much as `produce`."""

    request: Request

    def __init__(self) -> None:
        self._made: list[Callable[[Any, Any], None]] = []

    def between(self, first: int, end: int) -> list[Callable[[Any, Any], None]]:
        """Return those of the records from index `first` to before `end`."""
        self._made += [functools.partial(self._report, index) for index in range(len(self._made), end)]
        return self._made[first:end]

    def _report(self, index: int, error: Any, record: Any) -> None:
        self.request.reported(index, error, record)
