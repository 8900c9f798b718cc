"""Tables that are kept from topics, and the engine that answers SQL over them."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from headrace.config.section import Count, FormatName, Number, PositiveSeconds, Section, TopicName

_MIB = 1 << 20


def _not_reserved(name: str) -> str:
    if name.lower().startswith(("pg_", "duckdb_", "sqlite_", "pragma_")) or name.lower() == "information_schema":
        raise ValueError(f"{name} is a name of DuckDB's own catalogue: use another")
    return name


TableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$"), AfterValidator(_not_reserved)]


class TableConfig(Section):
    """A table of SQL that is kept from one topic, on the disk of this process."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_alias=True, validate_by_name=True)

    topic: TopicName
    """Topic to read from its start; records of aborted transactions are not seen."""
    kind: Literal["latest", "log"] = "latest"
    """`latest`: a row per key, from its newest record; a record without a value deletes the row. `log`: a row per
    record."""
    value_schema: Annotated[str | None, Field(alias="schema", min_length=1)] = None
    """Columns and their types as in SQL's CREATE TABLE: `item STRING, n BIGINT`. Formats of the schema registry have
    those of the newest schema of `<topic>-value`. Others without it have one column: `value`. A field that is absent is
    null, and a number is rounded to the type of its column."""
    key_format: FormatName = "string"
    """Format of the keys. A key of another format than `string` and `binary` is JSON text."""
    value_format: FormatName = "json"
    """Format of the values."""
    retention_seconds: PositiveSeconds | None = None
    """Age by its timestamp at which a row is deleted. By default no row is."""
    max_bytes: Annotated[int, Field(ge=_MIB), Number] = 4096 * _MIB
    """Size of the table's file at which the table stops, and readiness shows it. With `retention_seconds` it stays
    smaller."""

    @model_validator(mode="after")
    def _has_columns(self) -> Self:
        if self.value_schema is not None and self.value_format == "binary":
            raise ValueError("value_format binary has no columns: remove schema, or write value_format: json")
        return self


class SqlConfig(Section):
    """The process that keeps the tables and runs statements over them."""

    internal: ClassVar = frozenset(("max_rows",))

    memory_bytes: Annotated[int, Field(ge=64 * _MIB), Number] = 256 * _MIB
    """Memory of tables and statements. A statement that needs more is rejected. The process is restarted if it needs
    twice as much and 256 MiB more."""
    max_rows: Count = 10_000
    """Most rows of a response, and its default."""


MAX_TIMEOUT_SECONDS = 60.0
"""Longest time limit that a request with a statement may set."""
