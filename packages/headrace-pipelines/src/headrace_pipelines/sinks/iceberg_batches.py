"""Micro-batches into a table of Iceberg, each exactly once: its rows and its number are in one commit of the table."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

import pyarrow
from pyiceberg import exceptions
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from requests import RequestException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError

from headrace.errors import PipelineInvalid, SinkUnavailable
from headrace.runtime.failpoints import reach
from headrace_pipelines.sinks.lake_tables import errors_of, stored

_CONFLICTS: Final = (exceptions.CommitFailedException, exceptions.TableAlreadyExistsError, IntegrityError)
_ATTEMPTS: Final = 20
_AWAY: Final = (
    OSError,
    RequestException,
    SQLAlchemyError,
    exceptions.CommitStateUnknownException,
    exceptions.RESTError,
    exceptions.NoSuchTableError,
)
"""What may be right later: the catalog or the store cannot be reached, or rejects the login."""
_SHOWN: Final = ("type", "warehouse")
"""Properties of a catalog that errors may show."""
_LONGEST_TEXT: Final = 500
_MAX_AGE: Final = "history.expire.max-snapshot-age-ms"
_EXPIRE_EVERY: Final = 100
_CLOCK_SECONDS: Final = 60
"""Other engines reject a table whose snapshots are more out of order."""
_PROPERTIES: Final = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    "commit.manifest-merge.enabled": "true",
    _MAX_AGE: "600000",
}
"""Properties of a table that the sink creates. They bound what each commit reads and writes."""


class IcebergBatches:
    """Writes the batches of one query. A property of the table has the number of the next one.

    Unlike a snapshot, a property does not expire. A commit succeeds only if no other writer committed since the
    number was read; otherwise the number is read again.
    """

    def __init__(
        self, catalog: Mapping[str, str], table: str, partition_by: Sequence[str], group: str, query: str
    ) -> None:
        """Prepare.

        Args:
            catalog: Properties of the catalog, as pyiceberg has them.
            table: Namespace and name.
            partition_by: Columns whose values partition a table that is created.
            group: Name of the flow, which no other flow has.
            query: Id of the query, which is new with each checkpoint.
        """
        self._properties = dict(catalog)
        self._table = table
        self._partition_by = list(partition_by)
        self._key = f"{group}.batch"
        self._query = query
        self._catalog: Catalog | None = None
        self._next: int | None = None
        self.digest = ""

    def open(self) -> int | None:
        """Connect to the catalog, and read the number of the next batch."""
        self.close()
        with self._errors():
            name = self._properties.get("name", "default")
            self._catalog = load_catalog(name, **{k: v for k, v in self._properties.items() if k != "name"})
            self._next, self.digest = self._state_of(self._loaded())
        return self._next

    def write(self, number: int, rows: pyarrow.Table, digest: str = "") -> None:
        """Write rows and the number of the next batch in one commit. After a commit of another writer, try again."""
        with self._errors():
            rows = rows.cast(pyarrow.schema([stored(field) for field in rows.schema]))
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    self._commit(number, rows, digest)
                    break
                except _CONFLICTS:
                    if attempt == _ATTEMPTS:
                        text = f"{attempt} commits of batch {number} met one of another writer"
                        raise SinkUnavailable(f"Iceberg table {self._table}: {text}") from None
            reach("batch.iceberg.committed")
        self._next = number + 1

    def poll(self) -> None:
        """Do nothing: a catalog needs no care."""

    def close(self) -> None:
        """Close the connections to the catalog."""
        if self._catalog:
            self._catalog.close()
            self._catalog = None

    def _state_of(self, table: Table | None) -> tuple[int | None, str]:
        query, number, digest = (table.properties.get(self._key, "") if table else "").split() or ("", "", "")
        return (int(number), digest.strip("-")) if query == self._query else (None, "")

    def _commit(self, number: int, rows: pyarrow.Table, digest: str) -> None:
        table = self._loaded() or self._created(rows)
        if self._state_of(table)[0] != self._next:
            raise SinkUnavailable(f"another process also writes the batches of {self._key}: stop one of them")
        if (ahead := table.metadata.last_updated_ms / 1000 - time.time()) > _CLOCK_SECONDS:
            # pyiceberg would write it, and Java's engines could not read the table: they want times in order.
            raise SinkUnavailable(f"Iceberg table {self._table} was changed {ahead:.0f} s after now: correct the clock")
        columns = [field.name for field in table.spec().fields]
        if self._partition_by and columns != self._partition_by:
            has = ", ".join(columns) or "none"
            raise PipelineInvalid(f"Iceberg table {self._table} has partitions by {has}: correct sink.partition_by")
        if number % _EXPIRE_EVERY == 0 and (age := table.properties.get(_MAX_AGE)):
            oldest = datetime.datetime.now(datetime.UTC) - datetime.timedelta(milliseconds=int(age))
            table.maintenance.expire_snapshots().older_than(oldest).commit()
        table.metadata = _view_of(table)
        reach("batch.iceberg.produced")
        with table.transaction() as transaction:
            transaction.update_schema().union_by_name(rows.schema).commit()
            transaction.set_properties({self._key: f"{self._query} {number + 1} {digest or '-'}"})
            transaction.append(rows, {"headrace-flow": self._key, "headrace-batch": str(number)})

    def _loaded(self) -> Table | None:
        assert self._catalog
        try:
            return self._catalog.load_table(self._table)
        except exceptions.NoSuchTableError:
            return None

    def _created(self, rows: pyarrow.Table) -> Table:
        assert self._catalog
        self._catalog.create_namespace_if_not_exists(self._table.rpartition(".")[0])
        create = self._catalog.create_table_transaction(self._table, rows.schema, properties=_PROPERTIES)
        with create, create.update_spec() as spec:
            for column in self._partition_by:
                spec.add_identity(column)
        return self._catalog.load_table(self._table)

    def _errors(self) -> AbstractContextManager[None]:
        """Raise errors of pyiceberg as errors of the sink, without secrets of the catalog."""
        where = f"Iceberg table {self._table}"
        return errors_of(where, self._without_secrets, lambda cause: isinstance(cause, _AWAY), "sink.catalog")

    def _without_secrets(self, cause: Exception) -> str:
        """Return the text and the type of an error; values of the catalog's properties are replaced by their names."""
        text = " ".join(str(getattr(cause, "orig", None) or cause).split())
        secrets = {name: value for name, value in self._properties.items() if name not in _SHOWN and len(value) > 3}
        with contextlib.suppress(ArgumentError):
            secrets["password"] = make_url(secrets.get("uri", "")).password or ""
        for name, value in secrets.items():
            text = text.replace(value, f"<{name}>") if value else text
        return f"{text[:_LONGEST_TEXT]} ({type(cause).__name__})"


def _view_of(table: Table) -> TableMetadata:
    """Return the metadata from which a transaction is made; the catalog applies it to what it has.

    pyiceberg would try again on top of another writer's commit, without a look at the number, so it may not. It copies
    all metadata about 30 times per commit, so old snapshots are left out.
    """
    snapshot = table.current_snapshot()
    properties = {**table.properties, "commit.retry.num-retries": "0"}
    left = {"snapshots": [snapshot] if snapshot else [], "snapshot_log": [], "properties": properties}
    return table.metadata.model_copy(update=left)
