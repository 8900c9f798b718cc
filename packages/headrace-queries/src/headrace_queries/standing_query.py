"""Standing queries: statements over changes of a table whose rows are pushed to a backend."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.config.backend import BackendMode, RowsBackend
from headrace.config.consumers import ReactiveConsumerConfig, RowsConfig
from headrace.config.section import GroupName
from headrace_queries.table_config import TableConfig

_MODES = ("results", "status", "single")


class QueryBackend(RowsBackend):
    """The HTTP endpoint that rows of a query are posted to."""

    mode: BackendMode = "status"
    """Content of a request, and meaning of its response. `status`: a JSON array of rows; 2xx means that all succeeded.
    `results`: the same array; the response has one result per row. `single`: one row per request."""


class StandingQueryConfig(RowsConfig):
    """One statement whose rows are pushed to a backend: a reactive consumer of the table's topic, and a filter."""

    sql: Annotated[str, Field(min_length=1)]
    """`SELECT columns FROM table [WHERE condition] EMIT CHANGES` over a table of this file. Each record of its topic is
    seen alone; one that the condition leaves out is completed without a request."""
    rows: Literal["objects", "arrays"] = "objects"
    """Form of a row: a JSON object, or an array of its values without names, as the light-4j sidecar has it."""
    group: GroupName | None = None
    """Consumer group; by default `headrace.query.<name>`."""
    backend: QueryBackend
    """Where rows are posted, as a JSON array of them; in mode `single`, one row per request. By default its mode is
    `status`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.backend.mode not in _MODES:
            raise ValueError(
                f"backend.mode is {self.backend.mode}, which posts records, and a query has rows: write status, "
                "results or single"
            )
        self.as_consumer("check", TableConfig(topic="check"))
        return self

    def as_consumer(self, name: str, table: TableConfig) -> ReactiveConsumerConfig:
        """Return the reactive consumer that pushes the rows.

        Raises:
            ValueError: Settings do not fit each other, or the topic of the table.
        """
        chosen = {field: getattr(self, field) for field in self.model_fields_set - {"sql", "rows", "group", "backend"}}
        return ReactiveConsumerConfig.model_validate(
            {
                "topics": [table.topic],
                "group": self.group or f"headrace.query.{name}",
                "backend": self.backend,
                "key_format": table.key_format,
                "value_format": table.value_format,
                **chosen,
            }
        )
