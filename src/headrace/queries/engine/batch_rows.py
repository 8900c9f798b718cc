"""Records of a batch as rows of a table: which of them fit its columns, and what each row is."""

import contextlib
from collections.abc import Sequence
from typing import Final

import duckdb
import pyarrow as pa

from headrace.config.tables import TableConfig
from headrace.errors import ConfigError
from headrace.queries.columns import STORED, Column, Columns, quoted

ARRIVED: Final = "arrived"
"""The records of the batch, in their order: a temporary table of the connection with the stored columns, `record_seq`
(index in the batch), `record_problem`, `record_gone` (without a value) and `record_bad` (corrupt)."""


def check_types(connection: duckdb.DuckDBPyConnection, config: TableConfig, columns: Sequence[Column]) -> None:
    """Check that values of these columns can be read.

    Raises:
        ConfigError: DuckDB does not accept a type, or cannot read it from JSON.
    """

    def problem(of: Sequence[Column]) -> str:
        try:
            connection.execute(f"SELECT {Columns(config, of).parsed} FROM (SELECT '{{}}' AS value)").fetchall()
        except duckdb.Error as cause:
            return str(cause).partition(" Error: ")[2].splitlines()[0]
        return ""

    for column in columns if columns and problem(columns) else ():
        if why := problem([column]):
            raise ConfigError(f"column {column.name} cannot have type {column.type}: {why}. Use another type")


def load_batch(connection: duckdb.DuckDBPyConnection, columns: Columns, records: pa.Table, *, needs_key: bool) -> int:
    """Make `arrived` of decoded records, and return how many of them are corrupt.

    Args:
        needs_key: Whether a record without a key is corrupt.
    """
    connection.register("raw", records)
    try:
        names = [column.name.removeprefix(STORED) for column in columns.built_in]
        built_in = ", ".join(f"{quoted(name)} AS {quoted(STORED + name)}" for name in names)
        cells = [f"{cell} AS {quoted(column.name)}" for column, cell in zip(columns.values, columns.cells, strict=True)]
        problem = "problem IS NOT NULL" + (" OR key IS NULL" if needs_key else "")
        connection.execute(
            f"CREATE OR REPLACE TEMP TABLE {ARRIVED} AS SELECT seq AS {STORED}seq, problem AS {STORED}problem, "
            f"value IS NULL AS {STORED}gone, {built_in}, "
            f"{', '.join(cells)}, {problem} OR (value IS NOT NULL AND ({columns.misfit})) AS {STORED}bad "
            f"FROM (SELECT *, {columns.parsed} AS r FROM raw)"
        )
    finally:
        with contextlib.suppress(duckdb.Error):  # a failed statement has ended the transaction, and has the reason
            connection.unregister("raw")
    [(count,)] = connection.execute(f"SELECT count(*) FROM {ARRIVED} WHERE {STORED}bad").fetchall()
    return int(count)


def fitting(columns: Columns) -> str:
    """Return the records of `arrived` that fit, in their order, as a relation with the columns of statements."""
    return f"(SELECT {columns.view} FROM {ARRIVED} WHERE NOT {STORED}bad ORDER BY {STORED}seq)"


def corrupt_records(connection: duckdb.DuckDBPyConnection, *, needs_key: bool) -> list[tuple[int, int, int, str]]:
    """Return index in the batch, partition, offset and reason of each corrupt record of `arrived`, in their order."""
    no_key = f"WHEN {STORED}key IS NULL THEN 'it has no key' " if needs_key else ""
    reason = f"CASE WHEN {STORED}problem IS NOT NULL THEN {STORED}problem {no_key}"
    reason += "ELSE 'its value does not fit the columns' END"
    return connection.execute(
        f"SELECT {STORED}seq, {STORED}partition, {STORED}offset, {reason} "
        f"FROM {ARRIVED} WHERE {STORED}bad ORDER BY {STORED}seq"
    ).fetchall()
