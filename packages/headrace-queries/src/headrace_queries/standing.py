"""Reads the standing queries of a configuration: their statements, and the reactive consumers that push their rows."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from pydantic import ValidationError

from headrace.config.spelling import hint
from headrace.config.yaml_tree import KeyPath
from headrace.errors import ConfigError, StatementRejected
from headrace_queries.engine_protocol import Form
from headrace_queries.push_statement import PushStatement, read_push
from headrace_queries.query_sections import QuerySections
from headrace_queries.standing_query import StandingQueryConfig
from headrace_queries.statement_text import read_statement, tokens_of

_UNNEST: Final = frozenset(("unnest", "unlist"))


class StandingQuery(NamedTuple):
    """A statement over each record of a table's topic."""

    statement: PushStatement
    table: str
    """Name of the table in the file."""
    form: Form
    """Of a row."""


def standing_query(config: QuerySections, query: StandingQueryConfig) -> StandingQuery:
    """Return a standing query.

    Raises:
        StatementRejected: Its statement is not valid, or belongs to a pipeline.
    """
    text = read_statement(query.sql)
    try:
        statement = read_push(text.sql)
    except StatementRejected as cause:
        if needed := cause.parameters.get("needs"):
            raise StatementRejected(
                f"a standing query sees each changed row alone, and {needed} needs more: compute it in a pipeline "
                "whose topic a reactive consumer pushes, and remove this query"
            ) from None
        raise
    if not text.is_push:
        raise StatementRejected("a standing query ends with EMIT CHANGES: add it; POST /query runs a SELECT once")
    if statement.limit is not None:
        raise StatementRejected("a standing query does not end: remove LIMIT")
    for token in tokens_of(text.sql):
        if token.identifier.lower() in _UNNEST:
            raise StatementRejected(f"{token.text} makes several rows of a record: select the list, or use a pipeline")
    table = next((name for name in config.tables if name.lower() == statement.table.lower()), "")
    if not table:
        advice = hint(statement.table, list(config.tables)) if config.tables else "add it to tables"
        raise StatementRejected(f"table {statement.table[:60]!r} does not exist: {advice}")
    return StandingQuery(statement, table, query.rows)


def standing_queries(config: QuerySections) -> Mapping[str, StandingQuery]:
    """Return the standing queries of a checked configuration by name; raises as `standing_query`."""
    return {name: standing_query(config, query) for name, query in config.queries.items()}


def with_standing_queries(config: QuerySections) -> QuerySections:
    """Return a checked configuration in which each standing query is also a reactive consumer of the table's topic.

    Raises:
        ConfigError: A query is not valid.
    """
    try:
        return _with_consumers(config) if config.queries else config
    except (StatementRejected, ValueError) as cause:
        text = cause.description if isinstance(cause, StatementRejected) else _sentence(cause)
        raise ConfigError(f"queries: {text}") from cause


def problems_of(config: QuerySections) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each setting of a standing query that is not valid, and what to do."""
    sound = True
    for name, query in config.queries.items():
        path: KeyPath = ("queries", name)
        problem = ""
        if name in config.reactive_consumers:
            problem = "a reactive consumer has the same name, so commands could not tell them apart: rename one"
        try:
            query.as_consumer(name, config.tables[standing_query(config, query).table])
        except StatementRejected as cause:
            path, problem = (*path, "sql"), cause.description
        except ValueError as cause:
            problem = _sentence(cause)
        if problem:
            sound = False
            yield path, problem
    if sound and config.queries:
        try:
            _with_consumers(config)
        except ValidationError as cause:
            yield ("queries",), _sentence(cause)


def _with_consumers(config: QuerySections) -> QuerySections:
    """Return the configuration with a consumer for each query, checked as if the file had them."""
    made = {
        name: query.as_consumer(name, config.tables[standing_query(config, query).table])
        for name, query in config.queries.items()
    }
    written = {field: getattr(config, field) for field in config.model_fields_set}
    return type(config)(**{**written, "reactive_consumers": {**config.reactive_consumers, **made}})


def _sentence(cause: ValueError) -> str:
    if isinstance(cause, ValidationError):
        return cause.errors(include_url=False, include_input=False)[0]["msg"].removeprefix("Value error, ")
    return str(cause)
