"""Which reader reads a dead letter: Headrace's own first, then those of features."""

import functools
from collections.abc import Sequence
from typing import Protocol

from headrace.delivery.dead_letter import Origin, origin_of
from headrace.feature import features, imported
from headrace.kafka import Admin
from headrace.records import Header, Record

ReadDeadLetter = tuple[Record, Origin, Sequence[Header]]


class ForeignDeadLetters(Protocol):
    """Reads what other products write to dead letter topics."""

    def read(self, headers: Sequence[Header], timestamp_ms: int) -> Origin | None:
        """Return the history of a record with these headers and this timestamp; None if no reader reads it."""

    async def originals(self, admin: Admin, dead_letters: Sequence[ReadDeadLetter]) -> dict[int, Record]:
        """Return the records that dead letters of one partition were, if still there, by offset of the dead letter."""


@functools.cache
def foreign_readers() -> Sequence[ForeignDeadLetters]:
    """Return the readers of the installed features."""
    return [imported(one.dead_letters) for one in features() if one.dead_letters]


def read_origin(record: Record, headers: Sequence[Header]) -> Origin | None:
    """Return the history of a dead letter, or None if no reader reads it."""
    found = (one.read(headers, record.timestamp_ms) for one in foreign_readers())
    return origin_of(headers) or next((one for one in found if one), None)
