"""Micro-batches into a Delta table, each exactly once: its rows and its number are one commit of the table's log."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import pyarrow
import pyarrow.compute
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError, DeltaProtocolError, SchemaMismatchError, TableNotFoundError
from pyarrow import types

from headrace.errors import PipelineInvalid, SinkUnavailable
from headrace.runtime.failpoints import reach
from headrace_pipelines.sinks.changes import DELETED, SEQUENCE
from headrace_pipelines.sinks.lake_tables import errors_of, stored

_MIB: Final = 1 << 20
_SMALL_BYTES: Final = 16 * _MIB
_COMPACTED_BYTES: Final = 64 * _MIB
_MOST_SMALL_FILES: Final = 32
"""Small files of a partition after which they are compacted; also the batches between two looks at them."""
_COMPACTION_SECONDS: Final = 2.0
"""After this time no further partition is compacted before the next batch."""
_VACUUM_SECONDS: Final = 3600.0
_DIGEST: Final = ".digest"
"""Appended to the name of a query: the application whose version is the digest of the last batch, as a number."""
_NOT_IN_NAMES: Final = re.compile(r"[ ,;{}()\n\t=]")
_VALUES: Final = re.compile(r"'[^']*'")
_LASTING: Final = re.compile(r"failed validation check|append-only|not (yet )?supported|Error parsing property")
"""Errors that have the class of those that pass: a constraint of the table, or a property of it."""
_DATA_FILE: Final = re.compile(r"(_change_data/)?([^/]+=[^/]*/)*(part-[^/]+\.parquet|deletion_vector_[^/]+\.bin)")
"""A file of rows, from the folder of the table on."""


class DeltaBatches:
    """Writes the batches of one query."""

    def __init__(
        self, path: str, options: Mapping[str, str], partition_by: Sequence[str], keys: Sequence[str], query: str
    ) -> None:
        """Prepare.

        Args:
            path: Folder or URI of the table.
            options: Table properties, whose names begin with `delta.`, and options of the object store.
            partition_by: Columns that become folders.
            keys: Columns by which a row replaces another one; without them rows are added.
            query: Name of the query in the table's log.
        """
        self._path = path
        self._properties = {name: value for name, value in options.items() if name.startswith("delta.")}
        self._store = {name: value for name, value in options.items() if name not in self._properties}
        self._partition_by = [*partition_by]
        self._keys = keys
        self._query = query
        self._table: DeltaTable | None = None
        self._last: int | None = None
        """Number of the last batch that this process has read or written."""
        self.digest = ""
        self._unseen = 0
        """Batches since small files were last looked for."""
        self._vacuumed: float | None = None

    def open(self) -> int | None:
        """Read the table's log: a batch of a predecessor is in it, or its commit fails."""
        self._table, self._last, self.digest = None, None, ""
        with self._errors():
            try:
                self._table = DeltaTable(self._path, storage_options=self._store)
            except TableNotFoundError:
                return None
            self._last = self._table.transaction_version(self._query)
            digest = self._table.transaction_version(self._query + _DIGEST) or 0
        self.digest = digest.to_bytes(8, signed=True).hex() if digest else ""
        return None if self._last is None else self._last + 1

    def write(self, number: int, rows: pyarrow.Table, digest: str = "") -> None:
        """Write rows and the number of the batch in one commit; then compact small files, if there are many.

        With keys, there is one row of each, and `DELETED` says which ones delete.
        """
        with self._errors(number):
            rows, properties = self._fitting(rows), self._commit_properties(number, digest)
            if self._table and self._table.transaction_version(self._query) != self._last:
                # The library may have read further commits, so that this one would not conflict with them.
                raise SinkUnavailable(f"another process also writes the batches of {self._query}: stop one of them")
            reach("batch.delta.produced")
            if not (self._keys and self._table):
                self._append(rows, properties)
            else:
                self._merge(rows, properties)
                if self._table.transaction_version(self._query) != number:
                    self._append(rows.slice(0, 0), properties)  # the library commits no merge that changes nothing
        reach("batch.delta.committed")
        self._last = number
        self._unseen += 1
        if self._unseen >= _MOST_SMALL_FILES:
            self._tidy()

    def poll(self) -> None:
        """Do nothing: a table needs no care while a batch is written."""

    def _commit_properties(self, number: int, digest: str) -> CommitProperties:
        """Return what fences: of two commits with a transaction of one name the second fails."""
        value = int.from_bytes(bytes.fromhex(digest), signed=True)
        transactions = [Transaction(self._query, number), Transaction(self._query + _DIGEST, value)]
        return CommitProperties({"userMetadata": f"{self._query} batch {number}"}, app_transactions=transactions)

    def _merge(self, rows: pyarrow.Table, properties: CommitProperties) -> None:
        """Replace, add and delete rows by their keys; one that is older than the table's has no effect."""
        assert self._table
        is_newer, there = "true", {field.name for field in self._table.schema().fields}
        if SEQUENCE in rows.column_names and SEQUENCE in there:
            is_newer = f'(t."{SEQUENCE}" IS NULL OR s."{SEQUENCE}" >= t."{SEQUENCE}")'
        merge = self._table.merge(
            rows,
            " AND ".join(f't."{key}" = s."{key}"' for key in self._keys),
            "s",
            "t",
            merge_schema=True,
            streamed_exec=False,  # so that files without these keys are not read
            commit_properties=properties,
        )
        merge.when_matched_delete(f's."{DELETED}" AND {is_newer}').when_matched_update_all(
            f'NOT s."{DELETED}" AND {is_newer}', except_cols=[DELETED]
        ).when_not_matched_insert_all(f'NOT s."{DELETED}"', except_cols=[DELETED]).execute()

    def _append(self, rows: pyarrow.Table, properties: CommitProperties) -> None:
        if self._keys:
            rows = rows.filter(pyarrow.compute.invert(rows[DELETED])).drop_columns([DELETED])
        if self._table:
            write_deltalake(self._table, rows, mode="append", schema_mode="merge", commit_properties=properties)
            return
        write_deltalake(
            self._path,
            rows,
            mode="error",  # if the table is there now, another process made it, perhaps with this batch
            partition_by=self._partition_by or None,
            configuration=self._properties,
            storage_options=self._store,
            commit_properties=properties,
        )
        self._table = DeltaTable(self._path, storage_options=self._store)

    def _fitting(self, rows: pyarrow.Table) -> pyarrow.Table:
        """Return rows with the types that the table has; every column may be null."""
        schema = pyarrow.schema([stored(field) for field in rows.schema])
        for field in schema:
            if types.is_null(field.type) or _NOT_IN_NAMES.search(field.name):
                text = "has no type: cast it" if types.is_null(field.type) else "is not a valid name: write AS and one"
                raise PipelineInvalid(f"table {self._path}, column {field.name} {text} in the flow's SQL")
        if missing := set(self._partition_by) - set(schema.names):
            raise PipelineInvalid(f"sink.partition_by names {sorted(missing)[0]}, which the flow does not have")
        for kind, name in ((schema.field(name).type, name) for name in self._partition_by):
            if types.is_decimal(kind) or types.is_floating(kind) or types.is_binary(kind) or types.is_nested(kind):
                raise PipelineInvalid(
                    f"sink.partition_by: {name} is {kind}, which the library spoils: cast it to STRING"
                )
        if self._table:
            there = pyarrow.schema(self._table.schema().to_arrow())
            known = {field.name: stored(field) for field in there}
            for field in schema:
                if field.name in known and field.type != known[field.name].type:
                    raise PipelineInvalid(
                        f"table {self._path}, column {field.name}: the flow has {field.type}, and the table "
                        f"{known[field.name].type}: cast it in the flow's SQL, or give it another name"
                    )
            if (have := self._table.metadata().partition_columns) != self._partition_by:
                text = f"table {self._path} is partitioned by {', '.join(have) or 'no column'}"
                raise PipelineInvalid(f"{text}: write sink.partition_by: [{', '.join(have)}]")
        return rows.cast(schema)

    def _tidy(self) -> None:
        """Compact the small files of each partition that has many, and remove files that Delta keeps no longer."""
        assert self._table
        self._unseen, began = 0, time.monotonic()
        try:
            for partition in self._crowded():
                self._table.optimize.compact(partition or None, target_size=_COMPACTED_BYTES)
                if time.monotonic() - began > _COMPACTION_SECONDS:
                    self._unseen = _MOST_SMALL_FILES  # continues after the next batch
                    break
            if self._vacuumed is None or began - self._vacuumed > _VACUUM_SECONDS:
                self._vacuumed = began
                self._vacuum(self._table)
        except Exception as cause:  # noqa: BLE001 boundary: the rows are written, and the next look may succeed
            text = f"table {self._path}: small files were not compacted, will retry: {_described(cause)}"
            print(text, file=sys.stderr, flush=True)  # noqa: T201

    def _vacuum(self, table: DeltaTable) -> None:
        """Remove files that Delta keeps no longer. The library would remove those of others from the folder as well."""
        old = table.vacuum(dry_run=True, full=True)
        if others := [file for file in old if not _DATA_FILE.fullmatch(file)]:
            text = f"has files of others, such as {others[0]}, so no old file is removed: move them elsewhere"
            print(f"table {self._path}: its folder {text}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            table.vacuum(dry_run=False, full=True)

    def _crowded(self) -> list[list[tuple[str, str, Any]]]:
        """Return the partitions with many small files, as filters, the most crowded first."""
        assert self._table
        files = pyarrow.table(self._table.get_add_actions(flatten=True))
        names = self._partition_by
        partitions = files.select([f"partition.{name}" for name in names]).to_pylist() if names else [{}] * len(files)
        sizes = files["size_bytes"].to_pylist()
        small = Counter(
            tuple(each.values()) for each, size in zip(partitions, sizes, strict=True) if size < _SMALL_BYTES
        )
        crowded = [values for values, count in small.most_common() if count >= _MOST_SMALL_FILES]
        return [
            [(name, "=", "" if value is None else value) for name, value in zip(names, values, strict=True)]
            for values in crowded
        ]

    def _errors(self, number: int | None = None) -> AbstractContextManager[None]:
        """Raise errors of the library as errors of the sink, without values of rows."""
        doing = "" if number is None else f", batch {number}"
        return errors_of(f"table {self._path}{doing}", _described, _is_away, "sink.options")


def _is_away(cause: Exception) -> bool:
    """Return whether a later try may succeed, such as after a commit of another writer."""
    lasting = isinstance(cause, DeltaProtocolError | SchemaMismatchError) or _LASTING.search(str(cause))
    return isinstance(cause, DeltaError | OSError) and not lasting


def _described(cause: Exception) -> str:
    """Return the first line of an error, without values."""
    line = next(iter(str(cause).splitlines()), "")
    return f"{_VALUES.sub('...', line)} ({type(cause).__name__})"
