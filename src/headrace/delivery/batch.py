"""What is delivered together: records of one lane, and what they have been through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.delivery.protocols import DeadLetter
from headrace.records import Record


class Batch(NamedTuple):
    """Records that are delivered together, and their history."""

    records: Sequence[Record]
    attempt: int = 1
    first_failed_at: float = 0.0
    """Seconds since the epoch; 0 before the first failure."""
    refusals: int = 0
    """How often the destination did not take these records though it took others."""
    began_at: float = 0.0
    """In order `key` and at the first try: when it was taken, of the clock that only grows."""
    is_apart: bool = False
    """Whether it has a slow key, or one that may be."""
    letters: Sequence[DeadLetter] = ()
    """Dead letters of these records: then they are to be written, and nothing is to be delivered."""

    def has(self, offset: int) -> bool:
        """Whether a record is part of it."""
        records = self.records
        if not records or not records[0].offset <= offset <= records[-1].offset:
            return False
        return any(record.offset == offset for record in records)

    def without(self, offset: int) -> tuple[Record, Batch] | None:
        """Return a record and the batch without it, or None if it is not part of it."""
        if not self.has(offset):
            return None
        record = next(record for record in self.records if record.offset == offset)
        left = [other for other in self.records if other is not record]
        letters = [letter for letter in self.letters if letter.record.offset != offset]
        return record, self._replace(records=left, letters=letters)
