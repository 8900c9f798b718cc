"""The sink `postgres`: a table of PostgreSQL. How a batch is written is in `driver/postgres.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, SecretStr

from headrace.config.section import Port, Section
from headrace_pipelines.sinks.changes import DELETED, SEQUENCE, ChangeSink, with_changes
from headrace_pipelines.sinks.sink import BatchWriter, FlowInDriver, OutputMode, TableSink
from headrace_pipelines.sources import ColumnName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class PostgresConnection(Section):
    """How to reach a database of PostgreSQL. References work here, such as `${file:password}`."""

    host: Annotated[str, Field(min_length=1)] = "localhost"
    """Name or address of the server."""
    port: Port = 5432
    """Its port."""
    database: Annotated[str, Field(min_length=1)]
    """Name of the database."""
    user: Annotated[str, Field(min_length=1)]
    """User, who needs SELECT, INSERT and UPDATE on the table, with `apply_as_deletes` DELETE too, and may create tables
    or has `_headrace_batches`, and `_headrace_sequences` for `sequence_by`."""
    password: SecretStr = SecretStr("")
    """Password of the user. From a file it is read again when the driver starts."""
    options: dict[str, str] = {}
    """Further parameters of libpq, such as `sslmode: verify-full` and `sslrootcert`."""


class PostgresSink(TableSink, ChangeSink):
    """A table of PostgreSQL. Each micro-batch is one transaction, and its number is committed with it: exactly once.

    Nested columns are written as JSON, and timestamps in UTC."""

    kind: ClassVar = "postgres"
    named_by: ClassVar = "table"
    references: ClassVar = ("postgres",)
    requires: ClassVar = ("postgres", "a sink of PostgreSQL")

    postgres: PostgresConnection
    """The database."""
    table: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$")]
    """Table that has all columns of the flow, with its schema where that is needed: `public.totals`."""
    keys: list[ColumnName] = []
    """Columns of a unique key: a row replaces the row with the same key. Without keys every row is added."""
    mode: OutputMode = "update"
    """Spark's output mode: with `update` an aggregate's row is written whenever it changed."""

    def target(self, flow: FlowInDriver, query: str) -> Any:
        """Return the table for the batches of a query."""
        from headrace_pipelines.driver.postgres import PostgresBatches

        to = self.postgres
        login = {"host": to.host, "port": to.port, "dbname": to.database, "user": to.user}
        return PostgresBatches(
            {**login, "password": to.password.get_secret_value(), **to.options},
            self.table,
            self.keys,
            f"{flow.group}.{query}",
            sequence_by=self.sequence_by or "",
        )

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return a writer to the batches, with each column as the text that PostgreSQL reads."""
        from headrace_pipelines.driver.postgres import as_texts

        if self.change_settings:
            keys = [rows[key] for key in self.keys]
            columns = [f"`{name}`" for name in (*self.written(rows.columns), SEQUENCE, DELETED)]
            rows = with_changes(rows, self, keys).select(*columns)
        return super().writer(as_texts(rows), flow, batches)
