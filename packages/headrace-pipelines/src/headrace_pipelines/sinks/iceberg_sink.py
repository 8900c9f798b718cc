"""The sink `iceberg`: a table of Iceberg. How a batch is written is in `driver/iceberg.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, SecretStr

from headrace_pipelines.sinks.sink import BatchWriter, FlowFacts, FlowInDriver, Sink
from headrace_pipelines.sources import ColumnName, texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_FILE: Final = "sqlite:///"


class IcebergSink(Sink):
    """A table of Iceberg. Each micro-batch is one commit of the table, with its number: exactly once.

    The table is created if it is missing, and gets new columns of the flow."""

    kind: ClassVar = "iceberg"
    references: ClassVar = ("catalog",)
    requires: ClassVar = ("iceberg", "a sink of Iceberg")

    iceberg: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]
    """Namespace and name of the table, such as `lake.orders`."""
    catalog: Annotated[dict[str, SecretStr], BeforeValidator(lambda value: texts(value) if value else value)]
    """Properties of the catalog by pyiceberg's names, such as `type: sql`, `uri` and `warehouse`, and its `name`.
    References work here, such as `${file:password}`."""
    partition_by: list[ColumnName] = []
    """Columns by whose values the files of a table are grouped, when the sink creates it."""
    mode: Literal["append"] = "append"
    """Spark's output mode: every row is added."""
    accept_unknown_batch: bool = False
    """Write a micro-batch although it is not known whether it was written before."""

    @property
    def guarantee(self) -> str:
        """The number of a micro-batch is in the commit with its rows."""
        return "exactly once"

    @property
    def in_driver(self) -> bool:
        """The catalog is one of the driver."""
        return True

    def problems(self, flow: FlowFacts) -> Iterator[str]:
        """A catalog is named by its properties."""
        yield from super().problems(flow)
        if "uri" not in self.catalog and "type" not in self.catalog:
            yield "sink.catalog names no catalog: give type, uri and warehouse"

    def batches(self, flow: FlowInDriver) -> BatchWriter | None:
        """Return what writes each micro-batch in a commit of the table."""
        from headrace_pipelines.driver.exactly_once_sink import ExactlyOnceSink
        from headrace_pipelines.driver.iceberg import as_written

        return ExactlyOnceSink(
            flow.name,
            lambda query: self.target(flow, query),
            flow.checkpoint,
            accepts=self.accept_unknown_batch,
            read=lambda batch, number: as_written(batch.toArrow()),
        )

    def target(self, flow: FlowInDriver, query: str) -> Any:
        """Return the table for the batches of a query; paths start from the pipeline file."""
        from headrace_pipelines.driver.iceberg import IcebergBatches

        catalog = {name: value.get_secret_value() for name, value in self.catalog.items()}
        if catalog.get("uri", "").startswith(_FILE):
            catalog["uri"] = _FILE + flow.path(catalog["uri"].removeprefix(_FILE))
        if "warehouse" in catalog and catalog.get("type") == "sql":
            catalog["warehouse"] = flow.path(catalog["warehouse"])
        return IcebergBatches(catalog, self.iceberg, self.partition_by, flow.group, query)

    def writer(self, rows: DataFrame, flow: FlowInDriver, batches: BatchWriter | None) -> DataStreamWriter:
        """Return a writer to the batches."""
        assert batches
        return rows.writeStream.foreachBatch(batches)
