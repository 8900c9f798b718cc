"""The queries of one process: the engine of its tables, and the endpoints of SQL."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.consumers.preconditions import TopicRequirement
from headrace.errors import ConfigError
from headrace.kafka.internal_topics import InternalTopics
from headrace.process_context import ProcessContext
from headrace.runtime import Clock, ServerWatch, Service
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace_queries.query_sections import QuerySections

if TYPE_CHECKING:  # what a configuration does not name is not imported
    from headrace.delivery.outcomes import Destination
    from headrace_queries.engine_process import QueryEngine
    from headrace_queries.standing import StandingQuery


class QueryParts(Parts):
    """The engine, if the configuration has tables; the ksqlDB server, if it names one; and their endpoints."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        config, consumers = context.config.section(QuerySections), needed.of(ConsumersParts).consumers
        self._services: list[Service] = []
        engine: QueryEngine | None = None
        if config.tables:
            from headrace_queries.engine_process import QueryEngine
            from headrace_queries.standing import standing_queries

            engine = QueryEngine(config, context.clock)
            self._services.append(engine)
            for name, query in standing_queries(config).items():
                consumers.filters[name] = functools.partial(_filtered, engine, query)
        consumers.reload_checks.append(functools.partial(_same_queries, config))
        consumers.requirements += required_topics(config, needed.of(ConsumersParts).internal)
        if engine or config.ksqldb:
            self.endpoints = self._endpoints(config, context.clock, engine)

    def services(self) -> Sequence[Service]:
        return self._services

    def _endpoints(self, config: QuerySections, clock: Clock, engine: QueryEngine | None) -> Sequence[object]:
        from headrace_queries.ksqldb_routes import KsqldbEndpoints
        from headrace_queries.ksqldb_server import KsqldbServer
        from headrace_queries.ksqldb_statements import KsqldbStatements
        from headrace_queries.routes import QueryEndpoints, RowRoute

        server = KsqldbServer(config.ksqldb, clock) if config.ksqldb else None
        if server:
            self._services += [*filter(None, [server.tls]), ServerWatch("ksqlDB server", server, clock)]
        statements = KsqldbStatements(engine, server, config.sql.max_rows)
        queries = QueryEndpoints(engine, statements, config.http, config.sql)
        return [queries, RowRoute(engine), KsqldbEndpoints(statements, engine, config.http)]


def required_topics(config: HeadraceConfig, internal: InternalTopics) -> Iterable[tuple[KafkaConfig, TopicRequirement]]:
    """Return what tables need of the topics they are kept from, and the cluster of each."""
    tables = config.section(QuerySections).tables
    if not tables:
        return
    from headrace_queries.table_topics import judge_table

    for name, table in tables.items():
        reader = f"table {name}"
        judge = functools.partial(judge_table, reader, table)
        yield config.kafka, TopicRequirement(reader, "", [table.topic], judge=judge)


def _same_queries(old: QuerySections, new: HeadraceConfig) -> None:
    if new.section(QuerySections).queries != old.queries:
        raise ConfigError("a change of queries needs a restart of the process")


def _filtered(engine: QueryEngine, query: StandingQuery, rows: Destination) -> Destination:
    from headrace_queries.filtered_destination import FilteredDestination

    return FilteredDestination(engine, query, rows)
