"""Which records meet a condition in SQL: `headrace consume --where`."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import duckdb
import msgspec

from headrace.config.tables import TableConfig
from headrace.errors import DecodeError
from headrace.formats.choice import Codecs
from headrace.queries.engine.database import empty_database
from headrace.queries.engine.decoding import Decoder
from headrace.queries.engine.statements import Statements, refused
from headrace.queries.inference import for_fields, structure_of
from headrace.queries.slice import batches_of
from headrace.records import Record

_TABLE: Final = "records"
_COLUMNS: Final = 'seq, key, {value} AS value, partition, "offset", timestamp, headers'
_VALUE: Final = "value"


class RecordFilter:
    """Finds the records that meet a condition."""

    def __init__(self, condition: str, codecs: Codecs, key_format: str, value_format: str) -> None:
        """Check a condition over key, value, partition, offset, timestamp and headers.

        Raises:
            StatementRejected: It is not a condition.
        """
        self._connection = empty_database()
        # CASE, because a closing parenthesis of the condition cannot end it.
        self._statement = f"SELECT seq FROM {_TABLE} WHERE CASE WHEN (\n{condition}\n) THEN true END"
        Statements(self._connection).check(self._statement, {_TABLE: "key"}, [_TABLE])
        self._fields = [*self._paths()]
        """Fields of the value that the condition reads."""
        config = TableConfig(topic=_TABLE, key_format=key_format, value_format=value_format)
        self._decoder = Decoder(config, codecs)
        self._is_binary = value_format == "binary"

    def _paths(self) -> Iterator[list[str]]:
        rows = self._connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [self._statement]).fetchall()
        for names in _columns(msgspec.json.decode(rows[0][0])):
            if names[0].lower() == _VALUE and len(names) > 1:
                yield names[1:]

    async def matching(self, records: Sequence[Record]) -> list[Record]:
        """Return the records that meet the condition.

        Raises:
            DecodeError: A key or value is not of its format.
            StatementRejected: The condition does not fit the records.
            RegistryUnavailable: The registry does not respond.
        """
        batches = batches_of(records)
        await self._decoder.prepare(batches)
        table = self._decoder.to_arrow(batches)
        for at, problem in enumerate(table["problem"].to_pylist() if table["problem"].null_count < len(table) else ()):
            if problem:
                record = records[at]
                raise DecodeError(
                    f"record {record.offset} of {record.topic_partition}: {problem}. "
                    "Choose another --value-format or --key-format"
                )
        self._connection.register("slice", table)
        try:
            view = f"SELECT {_COLUMNS.format(value=self._value())} FROM slice"
            self._connection.execute(f"CREATE OR REPLACE TEMP VIEW {_TABLE} AS {view}")
            return [records[seq] for (seq,) in self._connection.execute(f"{self._statement} ORDER BY seq").fetchall()]
        except duckdb.Error as cause:
            raise refused(cause) from None
        finally:
            self._connection.unregister("slice")

    def _value(self) -> str:
        """Return the expression of the value: an object if the condition reads fields of it, else its text."""
        if not self._fields or self._is_binary:
            return _VALUE
        found = self._connection.execute(
            "SELECT json_group_structure(v) FROM (SELECT TRY_CAST(value AS JSON) AS v FROM slice) "
            "WHERE json_type(v) = 'OBJECT'"
        ).fetchall()
        structure = msgspec.json.encode(for_fields(structure_of(found[0][0]), self._fields)).decode()
        return f"json_transform(TRY_CAST(value AS JSON), '{structure.replace(chr(39), chr(39) * 2)}')"


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
