"""The sink `delta`: a Delta table. How a batch is written is in `delta_batches.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from headrace_pipelines.sinks.changes import DELETED, SEQUENCE, ChangeSink, newest, with_changes
from headrace_pipelines.sinks.sink import BatchWriter, FlowInDriver, TableSink
from headrace_pipelines.sources import ColumnName, Options, texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class DeltaSink(TableSink, ChangeSink):
    """A Delta table. Each micro-batch is one commit of its log, which holds its number too: exactly once.

    New columns of the flow become columns of the table."""

    kind: ClassVar = "delta"
    requires: ClassVar = ("delta", "a sink of Delta")

    delta: Annotated[str, Field(min_length=1)]
    """Folder of the table, relative to the pipeline file, or its URI, such as `s3://lake/orders`. The table is created
    if it does not exist."""
    keys: list[ColumnName] = []
    """Columns of a key: a row replaces the row with the same key. Without keys every row is added."""
    partition_by: list[ColumnName] = []
    """Columns that become folders; those of the table, if it exists."""
    mode: Literal["append", "update"] = "update"
    """Spark's output mode: with `update` an aggregate's row is written whenever it changed."""
    options: Options = {}
    """Properties of a new table, whose names begin with `delta.`, and options of the object store, by the names of the
    `deltalake` library."""

    def target(self, flow: FlowInDriver, query: str) -> Any:
        """Return the table for the batches of a query."""
        from headrace_pipelines.sinks.delta_batches import DeltaBatches

        path = self.delta if "://" in self.delta else flow.path(self.delta)
        return DeltaBatches(path, texts(self.options), self.partition_by, self.keys, f"{flow.group}.{query}")

    def rows(self, batch: DataFrame) -> Any:
        """Return the rows of a micro-batch; with keys the newest of each, and its sequence if it has one."""
        rows = newest(batch, self.keys) if self.keys else batch
        return (rows if self.sequence_by else rows.drop(SEQUENCE)).toArrow()

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return a writer to the batches; with keys, of rows that say whether they delete, and how new they are."""
        if self.keys:
            changes = with_changes(rows, self, [rows[f"`{key}`"] for key in self.keys])
            rows = changes.select(*(f"`{name}`" for name in [*self.written(rows.columns), SEQUENCE, DELETED]))
        return super().writer(rows, flow, batches)
