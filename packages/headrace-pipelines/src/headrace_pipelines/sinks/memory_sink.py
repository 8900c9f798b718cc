"""The sink `memory`: a table in the driver, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from headrace_pipelines.sinks.sink import BatchWriter, FlowInDriver, Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class MemorySink(Sink):
    """A table in the driver's memory, for tests."""

    kind: ClassVar = "memory"

    memory: Literal[True]
    """Keep the rows in a table that has the flow's name."""

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return Spark's writer to a table."""
        return rows.writeStream.format("memory")
