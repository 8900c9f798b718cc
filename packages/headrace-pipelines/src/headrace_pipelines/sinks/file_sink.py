"""The sink `files`: files in a folder, which Spark writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from headrace_pipelines.sinks.sink import BatchWriter, FlowInDriver, Sink
from headrace_pipelines.sources import ColumnName, Options, texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class FileSink(Sink):
    """Files in a folder. Readers that honour Spark's log of the folder see each row once."""

    kind: ClassVar = "files"

    files: Annotated[str, Field(min_length=1)]
    """Folder, relative to the pipeline file."""
    format: Literal["parquet", "json", "csv", "text"] = "parquet"
    """Format of the files."""
    partition_by: list[ColumnName] = []
    """Columns that become folders."""
    mode: Literal["append"] = "append"
    """Spark's output mode: files are written once."""
    options: Options = {}
    """Further options of Spark's writer of this format."""

    @property
    def guarantee(self) -> str:
        """A repeated micro-batch leaves files that Spark's log does not name."""
        return "exactly once for readers of Spark"

    @property
    def only_writer(self) -> tuple[str, str] | None:
        """The folder, with its log."""
        return self.files, "and both would use one log of batches: write to another folder"

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return Spark's writer of files."""
        writer = rows.writeStream.format(self.format).options(**texts(self.options))
        return writer.partitionBy(*self.partition_by).option("path", flow.path(self.files))
