"""The sink `console`: the log of the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from headrace.config.section import Count
from headrace_pipelines.sinks.sink import BatchWriter, FlowInDriver, Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class ConsoleSink(Sink):
    """The log of the driver, for trying things out: 20 rows of each micro-batch."""

    kind: ClassVar = "console"
    internal: ClassVar = frozenset(("rows",))

    console: Literal[True]
    """Write the rows of each micro-batch to the driver's log."""
    rows: Count = 20
    """Rows of a micro-batch that are written."""

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return Spark's writer to standard output."""
        return rows.writeStream.format("console").option("numRows", self.rows).option("truncate", False)
