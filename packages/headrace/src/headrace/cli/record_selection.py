"""Which records `headrace consume` prints: those that meet a condition in SQL."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from headrace.config.format_list import ANY_SCHEMA
from headrace.extras import hook
from headrace.formats.choice import Codecs
from headrace.formats.stored_values import AUTO, StoredValues
from headrace.records import Record, RecordBatch

_TEXT: Final = "string"
Matching = Callable[[Sequence[Record]], Awaitable[list[Record]]]


class SqlCondition:
    """Finds the records that meet a condition; where the format is `auto`, each record has its own."""

    def __init__(
        self,
        condition: str,
        codecs: Codecs,
        formats: tuple[str, str],
        sides: tuple[StoredValues, StoredValues],
        report: Callable[[str], None],
    ) -> None:
        """Check the condition; `formats` and `sides` are those of keys and of values; `report` gets what is left out.

        Raises:
            EnvironmentProblem: A library is missing.
            StatementRejected: It is not a condition.
        """
        self._filter = hook("record_filter", "headrace consume --where")
        self._condition = condition
        self._codecs = codecs
        self._formats = formats
        self._sides = sides
        self._report = report
        self._filters: dict[tuple[str, ...], Any] = {}
        self._filter_of(tuple(_TEXT if name == AUTO else name for name in formats))

    def _filter_of(self, formats: tuple[str, ...]) -> Any:
        if formats not in self._filters:
            self._filters[formats] = self._filter(self._condition, self._codecs, formats[0], formats[1], self._report)
        return self._filters[formats]

    async def select(self, batch: RecordBatch) -> RecordBatch:
        """Return the records of a batch that meet the condition.

        Raises:
            StatementRejected: The condition does not fit records of any kind.
        """
        groups: dict[tuple[str, ...], list[Record]] = {}
        if AUTO in self._formats:
            for side, column in zip(self._sides, (batch.keys, batch.values), strict=True):
                await side.prepare(column)
            for record in batch:
                formats, seen = self._as_seen(record)
                groups.setdefault(formats, []).append(seen)
        else:
            groups[self._formats] = [*batch]
        offsets: set[int] = set()
        for formats, records in groups.items():
            offsets.update(record.offset for record in await self._filter_of(formats).matching(records))
        return batch.select([at for at, offset in enumerate(batch.offsets) if offset in offsets])

    def _as_seen(self, record: Record) -> tuple[tuple[str, ...], Record]:
        """Return the formats of a record, and the record as SQL sees it: bytes that are not text are null."""
        formats, payloads = [], []
        for name, side, data in zip(self._formats, self._sides, (record.key, record.value), strict=True):
            shown = side.shown([data])[0] if name == AUTO else None
            formats.append(name if name != AUTO else ANY_SCHEMA if isinstance(shown, msgspec.Raw) else _TEXT)
            payloads.append(None if isinstance(shown, bytes) else data)
        return tuple(formats), msgspec.structs.replace(record, key=payloads[0], value=payloads[1])
