"""The sink `iceberg`: a table of Iceberg. How a batch is written is in `iceberg_batches.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, SecretStr

from headrace_pipelines.sinks.sink import FlowFacts, FlowInDriver, TableSink
from headrace_pipelines.sources import ColumnName, texts

_FILE: Final = "sqlite:///"


class IcebergSink(TableSink):
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

    def problems(self, flow: FlowFacts) -> Iterator[str]:
        """A catalog is named by its properties."""
        yield from super().problems(flow)
        if "uri" not in self.catalog and "type" not in self.catalog:
            yield "sink.catalog names no catalog: give type, uri and warehouse"

    def target(self, flow: FlowInDriver, query: str) -> Any:
        """Return the table for the batches of a query; paths start from the pipeline file."""
        from headrace_pipelines.sinks.iceberg_batches import IcebergBatches

        catalog = {name: value.get_secret_value() for name, value in self.catalog.items()}
        if catalog.get("uri", "").startswith(_FILE):
            catalog["uri"] = _FILE + flow.path(catalog["uri"].removeprefix(_FILE))
        if "warehouse" in catalog and catalog.get("type") == "sql":
            catalog["warehouse"] = flow.path(catalog["warehouse"])
        return IcebergBatches(catalog, self.iceberg, self.partition_by, flow.group, query)
