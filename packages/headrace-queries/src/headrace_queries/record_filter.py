"""Which records meet a condition in SQL: `headrace consume --where`."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import duckdb
import msgspec
import pyarrow as pa

from headrace.formats.choice import Codecs
from headrace.records import Record
from headrace_queries.columns import TIME
from headrace_queries.engine.apart import in_parts
from headrace_queries.engine.database import empty_database
from headrace_queries.engine.decoding import Decoder
from headrace_queries.engine.statements import Statements, refused
from headrace_queries.inference import Structure, for_fields, structure_of
from headrace_queries.slice import batches_of

_TABLE: Final = "records"
_COLUMNS: Final = f'seq, key, {{value}} AS value, partition, "offset", {TIME} AS timestamp, headers'
_VALUE: Final = "value"
_STRUCTURES: Final = (
    "SELECT CASE WHEN json_type(v) = 'OBJECT' THEN json_structure(v)::VARCHAR END "
    "FROM (SELECT seq, TRY_CAST(value AS JSON) AS v FROM slice) ORDER BY seq"
)


class RecordFilter:
    """Finds the records that meet a condition; each is judged by its own fields and their types."""

    def __init__(
        self, condition: str, codecs: Codecs, key_format: str, value_format: str, report: Callable[[str], None]
    ) -> None:
        """Check a condition over key, value, partition, offset, timestamp and headers.

        Args:
            codecs: Decode keys and values.
            key_format: Of keys; with `auto` each has its own.
            value_format: The same of values.
            report: Gets a sentence about records that are left out, as they do not fit the format or the condition.

        Raises:
            StatementRejected: It is not a condition.
        """
        self._connection = empty_database()
        # CASE, because a closing parenthesis of the condition cannot end it.
        self._statement = f"SELECT seq FROM {_TABLE} WHERE CASE WHEN (\n{condition}\n) THEN true END"
        statements = Statements(self._connection)
        statements.check(self._statement, {_TABLE: "key"}, [_TABLE])
        read = _columns(statements.tree(self._statement)) if value_format != "binary" else ()
        self._fields = [names[1:] for names in read if names[0].lower() == _VALUE and len(names) > 1]
        """Fields of the value that the condition reads."""
        self._decoder = Decoder(key_format, value_format, codecs)
        self._report = report

    async def matching(self, records: Sequence[Record]) -> list[Record]:
        """Return the records that meet the condition.

        Raises:
            StatementRejected: The condition does not fit records of any kind.
            RegistryUnavailable: The registry does not respond.
        """
        batches = batches_of(records)
        await self._decoder.prepare(batches)
        table = self._decoder.to_arrow(batches)
        left_out = {at: text for at, text in enumerate(table["problem"].to_pylist()) if text}
        if left_out:
            last = next(reversed(left_out.values()))
            self._left_out(records, left_out, f"{last}. Choose another --value-format or --key-format")
        found: list[int] = []
        for value, indexes in self._by_type(table, left_out).items():
            met, failed = self._evaluate(table, value, indexes)
            found += met
            if failed:
                cause = next(reversed(failed.values()))
                text = refused(cause).description if isinstance(cause, duckdb.Error) else repr(cause)
                self._left_out(records, failed, f"{text}. TRY_CAST gives NULL instead of an error")
        return [records[at] for at in sorted(found)]

    def _left_out(self, records: Sequence[Record], indexes: dict[int, Any], last: str) -> None:
        record = records[max(indexes)]
        where = f"offset {record.offset} of {record.topic_partition}"
        self._report(f"records left out: {len(indexes)}; the last is {where}: {last}")

    def _by_type(self, table: pa.Table, left_out: dict[int, str]) -> dict[str, list[int]]:
        """Return the indexes of records by the expression of their value.

        It is an object if the condition reads fields of it, else the text. So records with the same types of these
        fields are evaluated together, and none changes what the condition means for another.
        """
        sound = [at for at in range(len(table)) if at not in left_out]
        if not self._fields:
            return {_VALUE: sound}
        self._connection.register("slice", table)
        structures = [text for (text,) in self._connection.execute(_STRUCTURES).fetchall()]
        self._connection.unregister("slice")
        expressions = {text: self._object_of(text) for text in {*structures}}
        found: defaultdict[str, list[int]] = defaultdict(list)
        for at in sound:
            found[expressions[structures[at]]].append(at)
        return found

    def _object_of(self, text: str | None) -> str:
        with contextlib.suppress(RecursionError):  # JSON of a thousand levels is as a value that is not an object
            return self._object(structure_of(text))
        return self._object({})

    def _object(self, structure: Structure) -> str:
        text = msgspec.json.encode(for_fields(structure, self._fields)).decode().replace("'", "''")
        return f"json_transform(TRY_CAST(value AS JSON), '{text}')"

    def _evaluate(self, table: pa.Table, value: str, indexes: list[int]) -> tuple[list[int], dict[int, Exception]]:
        """Return those of some records that meet the condition, and the errors of those at which it fails."""

        def run(start: int, end: int) -> list[int]:
            return self._run(table.take(pa.array(indexes[start:end], pa.int64())), value)

        try:
            parts, failed = in_parts(run, len(indexes))
        except duckdb.Error as cause:
            try:
                self._run(table.slice(0, 0), self._object({}) if self._fields else _VALUE)
            except duckdb.Error:
                raise refused(cause) from None
            return [], dict.fromkeys(indexes, cause)  # it fits other records, and not the types of these
        return [at for part in parts for at in part], {indexes[at]: why for at, why in failed.items()}

    def _run(self, table: pa.Table, value: str) -> list[int]:
        self._connection.register("slice", table)
        try:
            view = f"SELECT {_COLUMNS.format(value=value)} FROM slice"
            self._connection.execute(f"CREATE OR REPLACE TEMP VIEW {_TABLE} AS {view}")
            return [seq for (seq,) in self._connection.execute(self._statement).fetchall()]
        finally:
            self._connection.unregister("slice")


def _columns(tree: Any) -> Iterator[list[str]]:
    """Return the parts of each name of a column in a syntax tree."""
    if isinstance(tree, dict):
        if tree.get("class") == "COLUMN_REF":
            yield tree["column_names"]
        for inner in tree.values():
            yield from _columns(inner)
    elif isinstance(tree, list):
        for inner in tree:
            yield from _columns(inner)
