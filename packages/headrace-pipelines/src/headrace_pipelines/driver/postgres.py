"""Micro-batches into a table of PostgreSQL, each exactly once: its rows and its number are committed together."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import psycopg
import pyarrow
from psycopg import sql
from pyarrow import csv
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, BinaryType, MapType, StructField, StructType, TimestampType

from headrace.errors import PipelineInvalid, SinkUnavailable
from headrace_pipelines.sinks.changes import DELETED, SEQUENCE

LEDGER: Final = "_headrace_batches"
"""Table with the number of the next batch of each query."""
SEQUENCES: Final = "_headrace_sequences"
"""Table with the sequence of the last change of each key, also of a deleted one, by target."""
_SEQUENCES_COLUMNS: Final = (
    f'{SEQUENCES} (target text, key text, sequence text COLLATE "C" NOT NULL, deleted boolean NOT NULL, '
    "changed timestamptz NOT NULL, PRIMARY KEY (target, key))"
)
_LEDGER_COLUMNS: Final = f"{LEDGER} (query text PRIMARY KEY, next_batch bigint NOT NULL, digest text)"
_CHANGES: Final = f'ADD {SEQUENCE} text COLLATE "C", ADD {DELETED} boolean'
_LIMIT_SECONDS: Final = 30
_OF_VALUES: Final = ("22", "23")
"""Classes of errors that are about values: data and constraints. Their texts quote values of rows."""
_OF_STATEMENTS: Final = "42"
"""Class of errors that are about names, types and rights."""
_NO_RIGHT: Final = "42501"
_NO_UNIQUE_KEY: Final = "42P10"
_AT_COLUMN: Final = re.compile(r"COPY \w+, line \d+, column (\w+)")


def as_texts(rows: DataFrame) -> DataFrame:
    """Return rows with every column as the text that PostgreSQL reads; nested columns are JSON."""

    def text(field: StructField) -> Column:
        column = f.col(f"`{field.name}`")
        if isinstance(field.dataType, BinaryType):
            return f.concat(f.lit("\\x"), f.hex(column))
        if isinstance(field.dataType, TimestampType):  # with its offset, which is not UTC in every session
            return f.concat(column.cast("string"), f.date_format(column, "XXXXX"))
        nested = isinstance(field.dataType, ArrayType | MapType | StructType)
        return f.to_json(column) if nested else column.cast("string")

    return rows.select(*(text(field).alias(field.name) for field in rows.schema.fields))


class PostgresBatches:
    """Writes the batches of one query."""

    def __init__(
        self, login: Mapping[str, Any], table: str, keys: Sequence[str], query: str, *, sequence_by: str = ""
    ) -> None:
        """Prepare.

        Args:
            login: How to reach the database, as parameters of libpq.
            table: Table that gets the rows.
            keys: Columns of a unique key; without them rows are added.
            query: Name of the query in the table of numbers.
            sequence_by: What the sequence of a row is; empty if rows have none that is kept.
        """
        self._target = ""
        """What has the sequences in common; empty if the rows have none that is kept."""
        self._sequence_by = sequence_by
        self._login = {"connect_timeout": _LIMIT_SECONDS, **login}
        self._table = table
        self._keys = keys
        self._query = query
        self._connection: Any = None
        self._next: int | None = None
        self.digest = ""

    def open(self) -> int | None:
        """Connect, and wait for a commit of a predecessor."""
        self.close()
        with self._errors():
            self._connection = psycopg.connect(autocommit=True, **self._login)
            self._connection.execute(f"SET timezone TO 'UTC'; SET lock_timeout TO '{_LIMIT_SECONDS}s'")
            self._create(LEDGER, _LEDGER_COLUMNS)
            if self._sequence_by:
                self._create(SEQUENCES, _SEQUENCES_COLUMNS)
                name = _identifier(self._table).as_string(self._connection)
                found = self._connection.execute("SELECT to_regclass(%s)::text", [name]).fetchone()  # `public.w` is `w`
                self._target = f"{found[0]} by {self._sequence_by}"
            ledger = f"SELECT next_batch, digest FROM {LEDGER} WHERE query = %s FOR UPDATE"
            found = self._connection.execute(ledger, [self._query]).fetchone()
        self._next = found[0] if found else None
        self.digest = (found and found[1]) or ""
        return self._next

    def write(self, number: int, rows: pyarrow.Table, digest: str = "") -> None:
        """Write rows, as texts, and the number of the next batch in one transaction."""
        with self._errors(number), self._connection.transaction():
            self._set_next(number + 1, digest)
            if rows.num_rows:
                self._copy(rows)
                self._merge(rows.column_names)
        self._next = number + 1

    def poll(self) -> None:
        """Do nothing: a connection needs no care."""

    def close(self) -> None:
        """Close the connection."""
        if self._connection:
            self._connection.close()

    def _create(self, name: str, columns: str) -> None:
        if self._connection.execute("SELECT to_regclass(%s)", [name]).fetchone() == (None,):
            again = psycopg.errors  # another flow may create it at the same time
            with contextlib.suppress(again.DuplicateTable, again.DuplicateObject, again.UniqueViolation):
                self._connection.execute(f"CREATE TABLE {columns}")

    def _set_next(self, number: int, digest: str) -> None:
        """Set the number. It comes first, because its lock keeps out another process with this query."""
        if self._next is None:
            changed = self._connection.execute(
                f"INSERT INTO {LEDGER} VALUES (%s, %s, %s)", [self._query, number, digest]
            )
        else:
            update = f"UPDATE {LEDGER} SET next_batch = %s, digest = %s WHERE query = %s AND next_batch = %s"
            changed = self._connection.execute(update, [number, digest, self._query, self._next])
        if changed.rowcount != 1:
            raise SinkUnavailable(f"another process also writes the batches of {self._query}: stop one of them")

    def _copy(self, rows: pyarrow.Table) -> None:
        columns, of_table = _names(rows.column_names), _names(_of_table(rows.column_names))
        new = sql.SQL("CREATE TEMP TABLE headrace_rows ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA")
        self._connection.execute(new.format(of_table, _identifier(self._table)))
        self._connection.execute(f"ALTER TABLE headrace_rows ADD headrace_row bigserial, {_CHANGES}")
        text = io.BytesIO()
        csv.write_csv(rows, text, csv.WriteOptions(include_header=False))
        copy = sql.SQL("COPY headrace_rows ({}) FROM STDIN (FORMAT csv)").format(columns)
        with self._connection.cursor().copy(copy) as stream:
            stream.write(text.getbuffer())

    def _merge(self, columns: Sequence[str]) -> None:
        """Write the rows to the table; of several with one key the last counts."""
        source = "headrace_rows"
        if DELETED in columns:
            source, columns = "headrace_newest", _of_table(columns)
            self._keep_newest()
        keys, all_columns = self._keys, _names(columns)
        one = sql.SQL("DISTINCT ON ({})").format(_names(keys)) if keys else sql.SQL("")
        order = sql.SQL(", ").join([*map(sql.Identifier, keys), sql.SQL("headrace_row DESC")])
        insert = sql.SQL("INSERT INTO {} ({}) SELECT {} {} FROM {} ORDER BY {}")
        statement = insert.format(_identifier(self._table), all_columns, one, all_columns, sql.SQL(source), order)
        others = [sql.Identifier(name) for name in columns if name not in keys]
        change = sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(name) for name in others)
        action = sql.SQL("UPDATE SET {}").format(change) if others else sql.SQL("NOTHING")
        conflict = sql.SQL(" ON CONFLICT ({}) DO {}").format(_names(keys), action) if keys else sql.SQL("")
        self._connection.execute(statement + conflict)

    def _keep_newest(self) -> None:
        """Make a table of the newest row of each key that the target may get, and delete the rows that are deleted.

        The lock keeps out other flows with this target, so no change comes between the comparison and the write.
        """
        keys, execute = _names(self._keys), self._connection.execute
        newest = "CREATE TEMP TABLE headrace_newest ON COMMIT DROP AS SELECT DISTINCT ON ({0}) * FROM headrace_rows "
        newest += f"ORDER BY {{0}}, {SEQUENCE} DESC, headrace_row DESC"
        execute(sql.SQL(newest).format(keys))
        if self._sequence_by:
            key = sql.SQL("jsonb_build_array({})::text").format(keys)
            execute("SELECT pg_advisory_xact_lock(hashtext(%s), hashtext(%s))", [SEQUENCES, self._target])
            late = f"DELETE FROM headrace_newest USING {SEQUENCES} old WHERE target = %s AND old.key = {{}} "
            execute(sql.SQL(f"{late} AND old.sequence > {SEQUENCE}").format(key), [self._target])
            kept = f"INSERT INTO {SEQUENCES} SELECT %s, {{}}, {SEQUENCE}, {DELETED}, now() FROM headrace_newest "
            kept += "ON CONFLICT (target, key) DO UPDATE SET (sequence, deleted, changed) = "
            execute(
                sql.SQL(f"{kept}(EXCLUDED.sequence, EXCLUDED.deleted, EXCLUDED.changed)").format(key), [self._target]
            )
        same = sql.SQL(" AND ").join(sql.SQL("old.{0} = new.{0}").format(sql.Identifier(name)) for name in self._keys)
        delete = sql.SQL(f"DELETE FROM {{}} old USING headrace_newest new WHERE new.{DELETED} AND {{}}")
        execute(delete.format(_identifier(self._table), same))
        execute(f"DELETE FROM headrace_newest WHERE {DELETED}")

    @contextlib.contextmanager
    def _errors(self, number: int | None = None) -> Iterator[None]:
        """Raise errors of PostgreSQL as errors of the sink, without values of rows."""
        try:
            yield
        except psycopg.Error as cause:
            to, table, keys, state = self._login, self._table, self._keys, cause.sqlstate or ""
            found = cause.diag.message_primary or str(cause)
            where = f"PostgreSQL {to['host']}:{to['port']}, database {to['dbname']}"
            text = f"{where}: {'; '.join(found.splitlines())} ({type(cause).__name__})"
            if state.startswith(_OF_VALUES) and cause.diag.table_name != LEDGER:
                at = _AT_COLUMN.search(cause.diag.context or "")
                column = cause.diag.column_name or (at[1] if at else "")
                constraint = cause.diag.constraint_name or "of texts, such as no NUL"
                what = f"column {column}" if column else f"constraint {constraint}"
                text = f"{where}, table {table}, {what}: rejected a value of batch {number} "
                text += f"({type(cause).__name__}): correct the flow's SQL, or the table"
            elif state == _NO_RIGHT:
                own = {LEDGER: _LEDGER_COLUMNS, **({SEQUENCES: _SEQUENCES_COLUMNS} if self._sequence_by else {})}
                rights = f"SELECT, INSERT, UPDATE{', DELETE' if self._sequence_by else ''}"
                text += f": GRANT {rights} ON {', '.join([table, *own])} TO {to['user']}, and create "
                text += f"{' and '.join(own.values())} if the user may not create tables"
            elif state == _NO_UNIQUE_KEY:
                text += (
                    f": the sink finds a row again by its keys, so ALTER TABLE {table} ADD UNIQUE ({', '.join(keys)})"
                )
            elif state.startswith(_OF_STATEMENTS):
                text += f": correct the flow's SQL, sink.keys, or the table {table}"
            else:
                raise SinkUnavailable(text) from None
            raise (SinkUnavailable if state == _NO_RIGHT else PipelineInvalid)(text) from None


def _of_table(columns: Sequence[str]) -> list[str]:
    """Return the columns that the table has."""
    return [name for name in columns if name not in (SEQUENCE, DELETED)]


def _names(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _identifier(name: str) -> sql.Identifier:
    return sql.Identifier(*name.split("."))
