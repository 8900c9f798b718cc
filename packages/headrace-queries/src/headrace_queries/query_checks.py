"""What commands check of tables and queries without a process."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version

from headrace.config.model import HeadraceConfig
from headrace.config.yaml_tree import KeyPath
from headrace.consumers.feature_checks import FeatureChecks
from headrace.consumers.preconditions import Finding
from headrace.errors import EnvironmentProblem, HeadraceError
from headrace.extras import require
from headrace_queries.ksqldb_config import KsqldbConfig
from headrace_queries.query_sections import QuerySections


class QueryChecks(FeatureChecks):
    """Tables, standing queries, and the libraries and servers that they need."""

    def problems(self, config: HeadraceConfig) -> Iterable[tuple[KeyPath, str]]:
        whole = config.section(QuerySections)
        if not whole.queries:
            return ()
        from headrace_queries.standing import problems_of

        return problems_of(whole)

    def slow_problems(self, config: HeadraceConfig) -> Iterator[tuple[KeyPath, str]]:
        """Yield those that only DuckDB and the parser of types find, too."""
        problems, whole = [*self.problems(config)], config.section(QuerySections)
        if whole.tables and not problems:
            with contextlib.suppress(EnvironmentProblem):  # making the process reports the missing library
                _require_duckdb()
                from headrace_queries.engine.filter import schema_problem, statement_problem
                from headrace_queries.standing import standing_queries

                for name, table in whole.tables.items():
                    if text := schema_problem(table):
                        problems.append((("tables", name, "schema"), text))
                for name, query in standing_queries(whole).items() if not problems else ():
                    if text := statement_problem(query.statement, whole.tables[query.table]):
                        problems.append((("queries", name, "sql"), text))
        yield from problems

    def completed(self, config: HeadraceConfig) -> HeadraceConfig:
        """Return a configuration in which each standing query is also a reactive consumer."""
        whole = config.section(QuerySections)
        if not whole.queries:
            return config
        from headrace_queries.standing import with_standing_queries

        return with_standing_queries(whole)

    def loads_libraries(self, config: HeadraceConfig) -> bool:
        return bool(config.section(QuerySections).tables)

    def memory_bytes(self, config: HeadraceConfig) -> int:
        whole = config.section(QuerySections)
        return whole.sql.memory_bytes if whole.tables else 0

    def disk_bytes(self, config: HeadraceConfig) -> int:
        return sum(table.max_bytes for table in config.section(QuerySections).tables.values())

    async def machine(self, config: HeadraceConfig) -> Sequence[Finding]:
        found, whole = [], config.section(QuerySections)
        if whole.tables:
            try:
                _require_duckdb()
                found.append(Finding("machine", "DuckDB", "ok", version("duckdb")))
            except EnvironmentProblem as error:
                found.append(Finding("machine", "DuckDB", "failing", "no", error.description))
        if whole.ksqldb:
            found.append(await _ksqldb(whole.ksqldb))
        return found


def _require_duckdb() -> None:
    require("queries", "SQL over topics and tables")


async def _ksqldb(config: KsqldbConfig) -> Finding:
    from headrace.runtime import SystemClock
    from headrace_queries.ksqldb_server import KsqldbServer

    server = KsqldbServer(config, SystemClock())
    try:
        await server.check()
    except HeadraceError as error:
        return Finding("ksqlDB server", "reachable", "failing", "no", error.description)
    finally:
        await server.close()
    return Finding("ksqlDB server", "reachable", "ok", "yes")
