"""Turns records into an Arrow table with keys and values as the table's file takes them."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import pyarrow as pa

from headrace.errors import FormatError
from headrace.formats.choice import Codecs
from headrace.formats.stored_values import AUTO, StoredValues
from headrace.records import RecordBatch
from headrace_queries.columns import whole_type

_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Decoder:
    """Decodes the records of one table."""

    def __init__(self, key_format: str, value_format: str, codecs: Codecs) -> None:
        """Prepare; a format may be `auto`."""
        self._key = _Side(key_format, codecs)
        self._value = _Side(value_format, codecs)
        self._known: frozenset[int] = frozenset()
        """Ids of the schemas of values so far."""

    async def prepare(self, batches: Sequence[RecordBatch]) -> bool:
        """Fetch every schema that these records name; return whether a value has another one than those before.

        Raises:
            RegistryUnavailable: The registry does not respond.
        """
        for batch in batches:
            await self._key.prepare(batch.keys)
        before = self._known
        for batch in batches:
            self._known |= await self._value.prepare(batch.values)
        return self._known != before

    def to_arrow(self, batches: Sequence[RecordBatch]) -> pa.Table:
        """Return records in their order; `problem` says why a key or a value cannot be decoded."""
        count = sum(map(len, batches))
        problems: list[str | None] | None = None
        columns = []
        for side, name in (self._key, "keys"), (self._value, "values"):
            column, found = side.decode([*chain.from_iterable(getattr(batch, name) for batch in batches)])
            columns.append(column)
            if found:
                problems = problems or [None] * count
                for at, text in found.items():
                    problems[at] = text
        headers = chain.from_iterable(batch.headers or [None] * len(batch) for batch in batches)
        has_headers = any(batch.headers for batch in batches)
        partitions = chain.from_iterable([batch.topic_partition.partition] * len(batch) for batch in batches)
        return pa.table(
            {
                "seq": pa.array(range(count), pa.int32()),
                "partition": pa.array(partitions, pa.int32()),
                "offset": pa.array(chain.from_iterable(batch.offsets for batch in batches), pa.int64()),
                "timestamp": pa.array(chain.from_iterable(batch.timestamps_ms for batch in batches), pa.int64()),
                "key": columns[0],
                "value": columns[1],
                "headers": pa.array(map(_dicts, headers), _HEADERS) if has_headers else pa.nulls(count, _HEADERS),
                "problem": pa.array(problems, pa.string()) if problems else pa.nulls(count, pa.string()),
            }
        )


def _dicts(headers: Sequence[tuple[str, bytes | None]] | None) -> list[dict[str, Any]] | None:
    return [{"key": name, "value": value} for name, value in headers] if headers else None


class _Side:
    """Keys or values of one format."""

    def __init__(self, format_name: str, codecs: Codecs) -> None:
        self._found = StoredValues(codecs, as_rows=True) if format_name == AUTO else None
        self._reader = codecs.for_reading("string" if self._found else format_name, as_rows=True)
        self._kind = pa.binary() if whole_type(format_name) == "BLOB" else pa.string()

    async def prepare(self, payloads: Sequence[bytes | None]) -> frozenset[int]:
        """Fetch the schemas that these bytes name; return the ids of those that their format needs.

        Raises:
            RegistryUnavailable: One is needed, and the registry does not respond.
        """
        if self._found:
            await self._found.prepare(payloads)
        return await self._reader.prepare(payloads)

    def decode(self, column: list[bytes | None]) -> tuple[pa.Array, dict[int, str]]:
        """Return a column, and why values cannot be decoded, by index."""
        if self._found:
            return self._each(column, self._found_text)
        if not self._reader.names_schemas:
            raw = pa.array(column, pa.binary())
            if self._kind == pa.binary():
                return raw, {}
            try:
                return raw.cast(pa.string()), {}
            except pa.ArrowInvalid:
                return self._each(column, lambda data: data.decode())
        return self._each(column, lambda data: str(self._reader.decode(data) or b"", "utf-8"))

    def _found_text(self, data: bytes) -> str | None:
        """Return a key or value as SQL sees it: bytes that are not text are null."""
        shown = self._found.find(data).shown if self._found else None
        if isinstance(shown, msgspec.Raw):
            return str(bytes(shown), "utf-8")
        return shown if isinstance(shown, str) else None

    def _each(
        self, column: list[bytes | None], decode: Callable[[bytes], str | None]
    ) -> tuple[pa.Array, dict[int, str]]:
        texts: list[str | None] = []
        problems: dict[int, str] = {}
        for at, data in enumerate(column):
            try:
                texts.append(None if data is None else decode(data))
            except UnicodeDecodeError as cause:
                texts.append(None)
                problems[at] = f"not UTF-8 text: {cause.reason} at byte {cause.start}"
            except FormatError as cause:
                texts.append(None)
                problems[at] = cause.description
            except MemoryError:
                raise
            except Exception as cause:  # noqa: BLE001 boundary: whatever a value raises is of its record
                texts.append(None)
                problems[at] = f"it cannot be decoded ({type(cause).__name__})"
        return pa.array(texts, pa.string()), problems
