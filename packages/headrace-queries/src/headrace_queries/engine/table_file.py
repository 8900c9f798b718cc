"""One table on disk: its rows, the positions they come from, and what it was made with, in one DuckDB file.

A batch of records changes rows and positions in one transaction. So after a crash each record is in the table once.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import ConfigError
from headrace.runtime import ThreadPool
from headrace_queries.columns import STORED, Column, Columns, quoted
from headrace_queries.engine.apart import in_parts
from headrace_queries.engine.batch_rows import (
    ARRIVED,
    FITTING,
    check_types,
    corrupt_records,
    load_batch,
    make_fitting,
    with_problems,
)
from headrace_queries.table_config import TableConfig

_META: Final = "CREATE TABLE IF NOT EXISTS {file}.main.meta(name VARCHAR PRIMARY KEY, value VARCHAR NOT NULL)"
_POSITIONS: Final = "CREATE TABLE IF NOT EXISTS {file}.main.positions(partition INTEGER PRIMARY KEY, next BIGINT)"
_SOUND: Final = f"{STORED}problem IS NULL"
_MOST_KEYS: Final = 2_000
"""DuckDB looks up at most this number of keys in an index."""
_ROWS_PER_KEY: Final = 400
"""Deleting a key by the index takes as long as reading this number of rows."""


class Corrupt(msgspec.Struct):
    """Records that were left out, because their key or value does not fit the table."""

    count: int = 0
    last: str = ""
    """Where the last one is, and why it does not fit."""


class TableFile:
    """The file of one table. Its calls block; `run` runs them on a thread, one at a time."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, name: str, config: TableConfig, path: Path) -> None:
        """Take a connection to which the file is attached as `<name>_file`."""
        self.connection = connection
        self.columns: Columns
        """Known once it is open."""
        self.described: list[tuple[str, str]] = []
        """The columns of statements and their types."""
        self.rows = 0
        """Rows of the table: counting them takes as long as some hundred changes."""
        self.corrupt = Corrupt()
        self.gap = ""
        """The last range of offsets that Kafka had removed before they were read; empty if there was none."""
        self.gap_offsets = 0
        """Offsets of all such ranges."""
        self.run = ThreadPool(f"table {name}", 1).run
        """Runs a call. One whose caller was cancelled still ends before the next begins."""
        self._name = name
        self._config = config
        self._path = path
        self._file = quoted(f"{name}_file")

    @property
    def _table(self) -> str:
        return f"{self._file}.main.rows"

    def open(self, values: list[Column] | None) -> None:
        """Make the table, or check that it was made with this definition; take up columns that were added.

        Raises:
            ConfigError: The definition has changed in another way, or has a type that is not accepted.
        """
        self._prepare()
        check_types(self.connection, self._config, values or [])
        self.columns = Columns(self._config, values)
        with self._transaction():
            self._define(values)
        self.corrupt = msgspec.convert(self._meta("corrupt") or {}, Corrupt)
        self.gap = self._meta("gap") or ""
        self.gap_offsets = self._meta("gap_offsets") or 0
        self.rows = int(self._first(f"SELECT count(*) FROM {self._table}"))
        view = f"memory.main.{quoted(self._name)}"
        run = self.connection.execute
        run(f"CREATE OR REPLACE VIEW {view} AS SELECT {self.columns.view} FROM {self._table}")
        self.described = [(name, kind) for name, kind, *_ in run(f"DESCRIBE {view}").fetchall()]

    def take_up(self, values: list[Column]) -> None:
        """Take up columns that were added to the schema since it was opened.

        Raises:
            ConfigError: The schema has changed in another way; the table keeps its columns.
        """
        before = self.columns
        try:
            self.open(values)
        except BaseException:
            self.columns = before
            raise

    def _define(self, values: list[Column] | None) -> None:
        definition = self._config.model_dump(include={"topic", "kind", "key_format", "value_format"})
        known = self._meta("definition")
        if known is None:
            self._create()
            self._set("definition", definition)
        else:
            if changed := [key for key, value in definition.items() if known.get(key) != value]:
                self._refuse(f"{changed[0]} was {known.get(changed[0])}, and is {definition[changed[0]]} now")
            self._add_columns([Column(*column) for column in self._meta("columns") or []])
        self._set("columns", [[*column] for column in self.columns.stored])
        self._set("values", None if values is None else [[*column] for column in values])

    def open_again(self) -> bool:
        """Open the table with the columns that it has; return whether it has any.

        Raises:
            ConfigError: The definition has changed.
        """
        self._prepare()
        if self._meta("definition") is None:
            return False
        values = self._meta("values")
        self.open(None if values is None else [Column(*column) for column in values])
        return True

    def _prepare(self) -> None:
        self.connection.execute(_META.format(file=self._file))
        self.connection.execute(_POSITIONS.format(file=self._file))

    def _create(self) -> None:
        columns = [f"{quoted(column.name)} {column.type}" for column in self.columns.stored]
        latest = self._config.kind == "latest"
        if latest:
            columns[0] += " USING COMPRESSION uncompressed"  # an index takes ten times as long to forget another key
        self.connection.execute(f"CREATE OR REPLACE TABLE {self._table}({', '.join(columns)})")
        if latest:  # not a PRIMARY KEY, which takes twice as long; `apply` keeps one row per key
            self.connection.execute(f"CREATE INDEX keys ON {self._table}({STORED}key)")

    def _add_columns(self, before: list[Column]) -> None:
        now = {column.name: column.type for column in self.columns.stored}
        for name, kind in before:
            if name not in now:
                self._refuse(f"column {name} is not in the schema any more")
            if now[name] != kind:
                self._refuse(f"column {name} was {kind}, and is {now[name]} now")
        names = {column.name for column in before}
        for name, kind in now.items():
            if name not in names:
                self.connection.execute(f"ALTER TABLE {self._table} ADD COLUMN {quoted(name)} {kind}")

    def _refuse(self, what: str) -> None:
        raise ConfigError(
            f"{what}: revert that, or build the table from its topic again (headrace tables rebuild {self._name})"
        )

    def rebuild(self) -> None:
        """Forget all rows and positions."""
        with self._transaction():
            for table in ("rows", "positions", "meta"):
                self.connection.execute(f"DROP TABLE IF EXISTS {self._file}.main.{table}")
        self.rows = 0
        self.shrink()

    def shrink(self) -> None:
        """Give the space of deleted rows back to the disk, if no statement needs them."""
        with contextlib.suppress(duckdb.Error):
            self.connection.execute(f"CHECKPOINT {self._file}")

    @property
    def topic_id(self) -> str:
        """Kafka's id of the topic whose records the table has; empty if it is not known."""
        return self._meta("topic_id") or ""

    def keep_topic_id(self, value: str) -> None:
        """Write down the id of the topic."""
        self._set("topic_id", value)

    def positions(self) -> dict[int, int]:
        """Return the offset to read next, by partition."""
        return dict(self.connection.execute(f"SELECT partition, next FROM {self._file}.main.positions").fetchall())

    def skip_gap(self, partition: int, first: int, end: int) -> None:
        """Continue behind offsets that Kafka has removed before they were read."""
        self.gap = f"partition {partition}, offsets {first} to {end - 1}"
        self.gap_offsets += end - first
        with self._transaction():
            self._set("gap", self.gap)
            self._set("gap_offsets", self.gap_offsets)
            self._move({partition: end})

    @property
    def size_bytes(self) -> int:
        """Size on disk."""
        return _size_of(self._path) + self._log_bytes

    @property
    def used_bytes(self) -> int:
        """Size on disk without the blocks that later rows take."""
        statement = "SELECT block_size * used_blocks FROM pragma_database_size() WHERE database_name = ?"
        return self._log_bytes + int(self._first(statement, [f"{self._name}_file"]) or 0)

    @property
    def _log_bytes(self) -> int:
        return _size_of(self._path.with_name(self._path.name + ".wal"))

    def apply(self, records: pa.Table, positions: Mapping[int, int]) -> int:
        """Change rows by records, and the positions with them; return how many records are corrupt.

        `arrived` has the records until the next call.

        A record that the table cannot take, as it shows when it is applied alone, is corrupt.

        Raises:
            OutOfMemoryException: These records need too much memory together.
        """
        try:
            return self._apply(records, positions)
        except duckdb.OutOfMemoryException:
            raise
        except duckdb.Error:
            _, failed = in_parts(lambda start, end: self._try(records.slice(start, end - start)), len(records))
            if not failed or any(isinstance(cause, duckdb.OutOfMemoryException) for cause in failed.values()):
                raise
        return self._apply(with_problems(records, failed), positions)

    def _apply(self, records: pa.Table, positions: Mapping[int, int]) -> int:
        with self._transaction():
            corrupt, more_rows = self._change(records)
            if corrupt is not self.corrupt:
                self._set("corrupt", corrupt)
            self._move(positions)
        bad = corrupt.count - self.corrupt.count
        self.corrupt = corrupt
        self.rows += more_rows
        return bad

    def _try(self, records: pa.Table) -> None:
        """Apply records and take that back."""
        self.connection.execute("BEGIN")
        try:
            self._change(records)
        finally:
            with contextlib.suppress(duckdb.Error):
                self.connection.execute("ROLLBACK")

    def _change(self, records: pa.Table) -> tuple[Corrupt, int]:
        """Change rows; return the corrupt records up to now, and how many rows there are more."""
        deleted = 0
        stored = ", ".join(quoted(column.name) for column in self.columns.stored)
        load_batch(self.connection, self.columns, records, needs_key=self._config.kind == "latest")
        found = corrupt_records(self.connection)
        sound = f"FROM {ARRIVED} WHERE {_SOUND}"
        if self._config.kind == "latest":
            if found:
                corrupt = pa.array([seq for seq, *_ in found], pa.int32())
                records = records.filter(pc.invert(pc.is_in(records["seq"], corrupt)))
            keys = records["key"].unique()
            deleted = self._delete(keys)
            sound += f" AND NOT {STORED}gone"
            if len(keys) < len(records):
                newest = f"SELECT max({STORED}seq) FROM {ARRIVED} WHERE {_SOUND} GROUP BY {STORED}key"
                sound += f" AND {STORED}seq IN ({newest})"
        more_rows = int(self._first(f"INSERT INTO {self._table}({stored}) SELECT {stored} {sound}")) - deleted
        if not found:
            return self.corrupt, more_rows
        _, partition, offset, problem = found[-1]
        last = f"partition {partition}, offset {offset}: {problem}"
        return Corrupt(self.corrupt.count + len(found), last), more_rows

    def _delete(self, keys: pa.Array) -> int:
        """Delete the rows of keys that have arrived; return how many. INSERT OR REPLACE takes many times as long."""
        among = f"SELECT {STORED}key FROM {ARRIVED} WHERE {_SOUND}"  # reads all rows of the table
        found: list[str | bytes] = []
        if len(keys) <= _MOST_KEYS and len(keys) * _ROWS_PER_KEY <= max(self.rows, _MOST_KEYS):
            found = keys.to_pylist()
            among = ", ".join("?" * len(found))
        if not len(keys):
            return 0
        return int(self._first(f"DELETE FROM {self._table} WHERE {STORED}key IN ({among})", found))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self.connection.execute("BEGIN")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(duckdb.Error):  # a failed COMMIT has ended it
                self.connection.execute("ROLLBACK")
            raise

    def arrived(self) -> duckdb.DuckDBPyRelation:
        """Return the last transaction's records that fit, with the columns of statements."""
        make_fitting(self.connection, self.columns)
        return self.connection.sql(f"SELECT * FROM {FITTING} ORDER BY rowid")

    def spans_after(self, positions: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Return by partition the first offset of a row from these positions on, and the one behind the last row."""
        cases = "".join(f" WHEN {partition} THEN {offset}" for partition, offset in positions.items())
        first = f"CASE {STORED}partition{cases} ELSE 0 END" if cases else "0"
        found = self.connection.execute(
            f"SELECT {STORED}partition, min({STORED}offset), max({STORED}offset) + 1 FROM {self._table} "
            f"WHERE {STORED}offset >= {first} GROUP BY ALL ORDER BY ALL"
        ).fetchall()
        return {partition: (at, end) for partition, at, end in found}

    def rows_between(self, partition: int, first: int, end: int) -> duckdb.DuckDBPyRelation:
        """Return the rows of records of a partition between offsets, in their order, with the columns of statements."""
        offset = f"{STORED}offset"
        return self.connection.sql(
            f"SELECT {self.columns.view} FROM {self._table} WHERE {STORED}partition = {int(partition)} "
            f"AND {offset} >= {int(first)} AND {offset} < {int(end)} ORDER BY {offset}"
        )

    def delete_old(self) -> int:
        """Delete the rows whose time is over, and return how many."""
        if self._config.retention_seconds is None:
            return 0
        oldest = time.time() - self._config.retention_seconds
        deleted = int(self._first(f"DELETE FROM {self._table} WHERE {STORED}timestamp < to_timestamp(?)", [oldest]))
        self.rows -= deleted
        return deleted

    def _move(self, positions: Mapping[int, int]) -> None:
        """Keep positions; those of partitions that have some are updated, which is planned in a third of the time."""
        table = f"{self._file}.main.positions"
        cases = " ".join(f"WHEN {partition} THEN {offset}" for partition, offset in positions.items())
        among = ", ".join(map(str, positions))
        update = f"UPDATE {table} SET next = CASE partition {cases} END WHERE partition IN ({among})"
        if positions and self._first(update) < len(positions):
            pairs = ", ".join(f"({partition}, {offset})" for partition, offset in positions.items())
            self.connection.execute(f"INSERT OR REPLACE INTO {table} VALUES {pairs}")

    def _meta(self, name: str) -> Any:
        text = self._first(f"SELECT value FROM {self._file}.main.meta WHERE name = ?", [name])
        return None if text is None else msgspec.json.decode(text)

    def _first(self, statement: str, parameters: Sequence[object] = ()) -> Any:
        """Return the first value of a result, None if there is none, and read the result to its end.

        While a result is not read to its end, the connection gives no rows as Arrow.
        """
        found = self.connection.execute(statement, parameters).fetchall()
        return found[0][0] if found else None

    def _set(self, name: str, value: object) -> None:
        text = msgspec.json.encode(value).decode()
        self.connection.execute(f"INSERT OR REPLACE INTO {self._file}.main.meta VALUES (?, ?)", [name, text])


def _size_of(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_size
    return 0
