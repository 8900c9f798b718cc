"""The sink `format`: whatever Spark can write as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from headrace_pipelines.sinks.sink import BatchWriter, FlowInDriver, Sink
from headrace_pipelines.sources import Options, texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class FormatSink(Sink):
    """Any format that Spark can write as a stream: of Spark, of a jar, or a Python data source."""

    kind: ClassVar = "format"

    format: Annotated[str, Field(min_length=1)]
    """Name of the format, such as `parquet`. Its jar is named by `spark.jars` in
    `driver.settings`, its Python package is installed."""
    options: Options = {}
    """Options of the format, by its names. `path` is relative to the pipeline file; secrets are references, such as
    `${env:NAME}`."""

    @property
    def only_writer(self) -> tuple[str, str] | None:
        """Its folder, if it has one."""
        paths = [str(value) for name, value in self.options.items() if name.lower() == "path"]
        return (paths[0], "and both would use one log of batches: write to another path") if paths else None

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return Spark's writer of the format."""
        options = texts(self.options)
        # Spark's names of options have no case.
        paths = {name: flow.path(value) for name, value in options.items() if name.lower() == "path"}
        return rows.writeStream.format(self.format).options(**{**options, **paths})
