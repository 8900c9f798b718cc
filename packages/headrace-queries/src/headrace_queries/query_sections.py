"""The keys that tables and queries add to `headrace.yaml`."""

from typing import ClassVar

from pydantic import Field, field_validator

from headrace.config.model import HeadraceConfig
from headrace_queries.ksqldb_config import KsqldbConfig
from headrace_queries.standing_query import StandingQueryConfig
from headrace_queries.table_config import SqlConfig, TableConfig, TableName


class QuerySections(HeadraceConfig):
    """The file with the keys of tables and queries."""

    one_process: ClassVar = frozenset(("tables", "queries"))

    tables: dict[TableName, TableConfig] = Field(default_factory=dict)
    """Tables of SQL that are kept from topics, by name. They need the extra `queries`."""
    sql: SqlConfig = SqlConfig()
    """The process that keeps the tables and runs statements over them."""
    queries: dict[str, StandingQueryConfig] = Field(default_factory=dict)
    """Standing queries by name. Each is also a reactive consumer of this name for commands and the HTTP API."""
    ksqldb: KsqldbConfig | None = None
    """Connection to a ksqlDB server. When set, it runs the statements of the ksqlDB endpoints."""

    @field_validator("tables")
    @classmethod
    def _names_differ(cls, tables: dict[str, TableConfig]) -> dict[str, TableConfig]:
        first: dict[str, str] = {}
        for name in tables:
            other = first.setdefault(name.lower(), name)
            if other != name:
                raise ValueError(f"{other} and {name} are the same name in SQL: rename one of them")
        return tables
