"""A destination that gets rows instead of records: those of a standing query, evaluated by the engine of tables."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from headrace.delivery.outcomes import HANDED_OFF, Delivery, Destination, Reply
from headrace.errors import DestinationUnavailable, HeadraceError, StatementRejected
from headrace.records import RecordBatch, TopicPartition
from headrace_queries.engine_process import QueryEngine
from headrace_queries.engine_protocol import Problem
from headrace_queries.standing import StandingQuery

_ENDINGS: Final = 3
"""Records that were evaluated at this many ends of the engine in a row are taken apart."""
_MOST_SUSPECTS: Final = 1_000
_Range = tuple[TopicPartition, int, int]


class FilteredDestination:
    """Completes records that a standing query leaves out, and delivers the rows of the others."""

    def __init__(self, engine: QueryEngine, query: StandingQuery, rows: Destination) -> None:
        """Take the destination of the rows: it gets records whose values are rows."""
        self._engine = engine
        self._query = query
        self._rows = rows
        self._endings: Counter[_Range] = Counter()
        """How often the engine ended while it evaluated these records."""

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        """Deliver the rows of records that pass; one that has none because of its value is a dead letter."""
        records = RecordBatch.of(delivery.records)
        try:
            rows, problems = await self._evaluate(records)
        except StatementRejected as cause:
            return [_failed(type(cause).__name__, cause.description, shared=len(records) > 1)] * len(records)
        replies = [HANDED_OFF] * len(records)
        for index, (kind, reason) in problems.items():
            replies[index] = _failed("DecodeError" if kind == "unfit" else "StatementRejected", reason)
            if kind == "memory":  # others may have it: this record is tried again, and each attempt counts
                replies[index] = replies[index]._replace(permanent=False, reached=True)
        if passed := [index for index, row in enumerate(rows) if row is not None]:
            chosen = records.select(passed)
            batch = RecordBatch(
                chosen.topic_partition,
                chosen.offsets,
                chosen.timestamps_ms,
                chosen.keys,
                [rows[index] for index in passed],
                chosen.headers,
                chosen.sizes,
            )
            sent = await self._rows.deliver(delivery._replace(records=batch))
            for index, reply in zip(passed, sent, strict=True):
                replies[index] = reply
        return replies

    async def _evaluate(self, records: RecordBatch) -> tuple[Sequence[bytes | None], dict[int, Problem]]:
        position = (records.topic_partition, records.offsets[0], records.offsets[-1])
        if self._endings[position] >= _ENDINGS:
            del self._endings[position]
            raise StatementRejected(f"the process that evaluates the statement ended {_ENDINGS} times at it")
        try:
            found = await self._engine.filter(self._query, records)
        except StatementRejected:
            raise
        except HeadraceError as cause:
            if cause.parameters.get("interrupted"):
                if len(self._endings) >= _MOST_SUSPECTS:
                    self._endings.clear()
                self._endings[position] += 1
            raise DestinationUnavailable(f"waiting for table {self._query.table}: {cause.description}") from cause
        self._endings.pop(position, None)
        return found.rows, found.problems


def _failed(error: str, reason: str, *, shared: bool = False) -> Reply:
    return Reply(error, reason, reached=False, permanent=True, shared=shared)
