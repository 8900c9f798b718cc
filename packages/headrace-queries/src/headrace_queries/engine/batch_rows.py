"""Records of a batch as rows of a table: which of them fit its columns, and what each row is."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import ConfigError
from headrace_queries.columns import STORED, TIME, Column, Columns, quoted
from headrace_queries.engine.apart import in_parts
from headrace_queries.table_config import TableConfig

ARRIVED: Final = "arrived"
"""The records of the batch, in their order: a temporary table of the connection with the stored columns, `record_seq`
(index in the batch), `record_gone` (without a value) and `record_problem` (why it is corrupt; NULL if it is not)."""
FITTING: Final = "fitting"
"""Those of `arrived` that fit, in their order and with the columns of statements: a temporary table."""
_PART: Final = "part"


def check_types(connection: duckdb.DuckDBPyConnection, config: TableConfig, columns: Sequence[Column]) -> None:
    """Check that values of these columns can be read.

    Raises:
        ConfigError: DuckDB does not accept a type, or cannot read it from JSON.
    """

    def problem(of: Sequence[Column]) -> str:
        try:
            read = Columns(config, of)
            row = f"SELECT *, {read.parsed} AS r FROM (SELECT '{{}}' AS value)"
            connection.execute(f"SELECT {', '.join(read.cells)}, {read.misfit} FROM ({row})").fetchall()
        except duckdb.Error as cause:
            return str(cause).partition(" Error: ")[2].splitlines()[0]
        return ""

    for column in columns if columns and problem(columns) else ():
        if why := problem([column]):
            raise ConfigError(f"column {column.name} cannot have type {column.type}: {why}. Use another type")


def load_batch(connection: duckdb.DuckDBPyConnection, columns: Columns, records: pa.Table, *, needs_key: bool) -> None:
    """Make `arrived` of decoded records; each column has the type of the file there, as all who read it show it.

    Args:
        needs_key: Whether a record without a key is corrupt.
    """
    connection.register("raw", records)
    try:
        built_in = ["k", "partition", quoted("offset"), TIME, "headers"]
        stored = zip([*built_in, *columns.cells], columns.stored, strict=True)
        cells = ", ".join(f"{cell} AS {quoted(column.name)}" for cell, column in stored)
        no_key = "WHEN key IS NULL THEN 'it has no key' " if needs_key else ""
        connection.execute(
            f"CREATE OR REPLACE TEMP TABLE {ARRIVED} AS SELECT seq AS {STORED}seq, value IS NULL AS {STORED}gone, "
            f"{cells}, "
            f"CASE WHEN problem IS NOT NULL THEN problem {no_key}"
            f"WHEN key IS NOT NULL AND k IS NULL THEN 'its key is not JSON' "
            f"WHEN {TIME} IS NULL THEN 'its timestamp is not in milliseconds: ' || timestamp "
            f"WHEN value IS NOT NULL AND ({columns.misfit}) THEN 'its value does not fit the columns' "
            f"END AS {STORED}problem FROM (SELECT *, {columns.parsed_key} AS k, {columns.parsed} AS r FROM raw)"
        )
    finally:
        with contextlib.suppress(duckdb.Error):  # a failed statement has ended the transaction, and has the reason
            connection.unregister("raw")


def load_each(connection: duckdb.DuckDBPyConnection, columns: Columns, records: pa.Table, *, needs_key: bool) -> None:
    """Make `arrived` outside of a transaction; a record that cannot be loaded is corrupt."""

    def load(start: int, end: int) -> None:
        load_batch(connection, columns, records.slice(start, end - start), needs_key=needs_key)

    _, failed = in_parts(load, len(records))
    if failed:
        load_batch(connection, columns, with_problems(records, failed), needs_key=needs_key)


def with_problems(records: pa.Table, failed: Mapping[int, Exception]) -> pa.Table:
    """Return decoded records of which these are corrupt, by index; the reason has nothing of the record in it."""
    problems = records["problem"].to_pylist()
    for at, cause in failed.items():
        problems[at] = problems[at] or f"the table cannot take it ({type(cause).__name__})"
    fails = pa.array([at in failed for at in range(len(records))])
    for name in "key", "value", "headers":  # so that nothing in it is converted again
        kept = pc.if_else(fails, pa.scalar(None, records[name].type), records[name])
        records = records.set_column(records.schema.get_field_index(name), name, kept)
    return records.set_column(records.schema.get_field_index("problem"), "problem", pa.array(problems, pa.string()))


def corrupt_records(connection: duckdb.DuckDBPyConnection) -> list[tuple[int, int, int, str]]:
    """Return index in the batch, partition, offset and reason of each corrupt record of `arrived`, in their order."""
    cells = f"{STORED}seq, {STORED}partition, {STORED}offset, {STORED}problem"
    found = connection.execute(f"SELECT {cells} FROM {ARRIVED} WHERE {STORED}problem IS NOT NULL").fetchall()
    return sorted(found)


def make_fitting(connection: duckdb.DuckDBPyConnection, columns: Columns) -> None:
    """Make `fitting`, so that many statements do not plan the same conversion each."""
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE {FITTING} AS SELECT {columns.view} FROM {ARRIVED} "
        f"WHERE {STORED}problem IS NULL ORDER BY {STORED}seq"
    )


def count_fitting(connection: duckdb.DuckDBPyConnection) -> int:
    """Return how many records `fitting` has."""
    [(count,)] = connection.execute(f"SELECT count(*) FROM {FITTING}").fetchall()
    return int(count)


def part_of_fitting(connection: duckdb.DuckDBPyConnection, start: int, end: int, count: int) -> str:
    """Return a table with a range of `fitting`."""
    if (start, end) == (0, count):
        return FITTING
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE {_PART} AS SELECT * FROM {FITTING} "
        f"WHERE rowid >= {start} AND rowid < {end} ORDER BY rowid"
    )
    return _PART


def position_of_fitting(connection: duckdb.DuckDBPyConnection, names: Sequence[str], at: int) -> tuple[int, int]:
    """Return partition and offset of a record of `fitting`, whose columns have these names in their order."""
    first, second = (quoted(name) for name in names[-4:-2])  # as `Columns.shown` has them, before time and headers
    [position] = connection.execute(f"SELECT {first}, {second} FROM {FITTING} WHERE rowid = {at}").fetchall()
    return position
