"""Evaluates standing queries over records of deliveries: which of them pass, and what the row of each is."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import duckdb

from headrace.errors import ConfigError, HeadraceError, QueriesUnavailable, StatementRejected
from headrace.formats.choice import Codecs
from headrace.records import RecordBatch, TopicPartition
from headrace.runtime import Service, ThreadPool
from headrace_queries.columns import Columns, declared, needs_registry, quoted
from headrace_queries.engine.apart import in_parts
from headrace_queries.engine.batch_rows import (
    check_types,
    corrupt_records,
    count_fitting,
    load_each,
    make_fitting,
    part_of_fitting,
)
from headrace_queries.engine.database import empty_database, end_if_broken
from headrace_queries.engine.decoding import Decoder
from headrace_queries.engine.pull import RowWriter, failure
from headrace_queries.engine.statements import Statements, refused
from headrace_queries.engine.table_feed import TableFeed
from headrace_queries.engine_protocol import Filter, Filtered, Form, Problem, RequestFailed, ToParent
from headrace_queries.push_statement import PushStatement
from headrace_queries.query_sections import QuerySections
from headrace_queries.standing import standing_queries
from headrace_queries.table_config import TableConfig

log = logging.getLogger(__name__)

LIMIT_SECONDS: Final = 30.0
"""Each batch has its response within this time."""
_EVALUATION_SECONDS: Final = 5.0
_AT_A_TIME: Final = 2
_ROWID: Final = "rowid"
"""DuckDB's number of a row in a table, which `*` does not select."""
_TOO_LONG: Final = f"the statement took more than {_EVALUATION_SECONDS:g} s for it: make its condition cheaper"


class Filters(Service):
    """Evaluates batches on its threads; each thread has a cursor."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        tables: Mapping[str, TableConfig],
        feeds: Mapping[str, TableFeed],
        codecs: Codecs,
        statements: Statements,
        send: Callable[[ToParent], None],
    ) -> None:
        """Take all tables, and the function that sends responses."""
        super().__init__("standing queries")
        self._tables = tables
        self._feeds = feeds
        self._statements = statements
        self._send = send
        self._decoders = {name: Decoder(table.key_format, table.value_format, codecs) for name, table in tables.items()}
        self._threads = ThreadPool("standing query", _AT_A_TIME)
        self._idle = [connection.cursor() for _ in range(_AT_A_TIME)]
        self._busy: dict[duckdb.DuckDBPyConnection, float] = {}
        """When the evaluation of each cursor at work is late."""

    async def start(self) -> None:
        """Start nothing: a batch starts a task."""

    def filter(self, request: Filter) -> None:
        """Begin a batch."""
        self.spawn(self._filter(request), f"batch {request.number}")

    def interrupt_late(self) -> None:
        """Interrupt evaluations that take too long; called on the loop, over and over."""
        for cursor, end in list(self._busy.items()):  # threads change it
            if time.monotonic() > end:
                cursor.interrupt()

    async def _filter(self, request: Filter) -> None:
        response: ToParent
        arrived_at = time.monotonic()
        try:
            batch = _batch(request, self._tables[request.table].topic)
            await self._decoders[request.table].prepare([batch])
            response = await self._threads.run(self._evaluate, request, batch, arrived_at)
        except Exception as cause:  # noqa: BLE001 boundary: whatever a statement raises is the caller's response
            response = _failure(request.number, cause)
        self._send(response)

    def _evaluate(self, request: Filter, batch: RecordBatch, arrived_at: float) -> Filtered:
        """Evaluate a batch, on a thread."""
        if time.monotonic() > arrived_at + LIMIT_SECONDS - _EVALUATION_SECONDS:
            raise QueriesUnavailable("too many batches of standing queries wait; raise batch.max_records")
        table = self._tables[request.table]
        columns = self._columns(request.table, table)
        records = self._decoders[request.table].to_arrow([batch])
        cursor = self._idle.pop()
        self._busy[cursor] = time.monotonic() + _EVALUATION_SECONDS
        try:
            text = request.statement.over(quoted(request.table))
            self._statements.check(text, dict.fromkeys(self._tables, "key"), [request.table])
            load_each(cursor, columns, records, needs_key=table.kind == "latest")
            problems: dict[int, Problem] = {at: ("unfit", why) for at, _, _, why in corrupt_records(cursor)}
            rows, failed = _rows(cursor, columns, request.statement, request.form)
        finally:
            del self._busy[cursor]
            self._idle.append(cursor)
        sound = [index for index in range(len(batch)) if index not in problems]
        problems |= {sound[at]: _problem(cause) for at, cause in failed.items()}
        return Filtered(request.number, _spread(rows, sound, len(batch)), problems)

    def _columns(self, name: str, table: TableConfig) -> Columns:
        if not needs_registry(table):
            return _declared_columns(table)
        if not self._feeds[name].key_column:
            raise QueriesUnavailable(f"the columns of table {name} are not known yet: GET /tables says why")
        return self._feeds[name].file.columns


def report_misfits(config: QuerySections) -> None:
    """Log the standing queries that do not fit the declared columns of their table; their records wait."""
    for name, query in standing_queries(config).items():
        if problem := statement_problem(query.statement, config.tables[query.table]):
            log.error("queries.%s.sql: %s; its records wait, correct it and restart", name, problem)


def statement_problem(statement: PushStatement, table: TableConfig) -> str:
    """Return why a statement does not fit the columns of a table; empty if it does, or they are in the registry.

    It is run over a record that has no field, so that constants of a wrong type are seen.
    """
    if needs_registry(table):
        return ""
    connection = empty_database()
    name = statement.table
    try:
        columns = _declared_columns(table)
        shown = dict(columns.shown)
        empty = ", ".join(f"NULL::{column.type} AS {quoted(shown[column.name])}" for column in columns.stored)
        Statements(connection).check(statement.over(quoted(name)), {name: "key"}, [name])
        connection.execute(f"CREATE TEMP TABLE {quoted(name)} AS SELECT {empty}")
        _check_rowid(columns)
        connection.execute(statement.over(quoted(name))).fetchall()
    except HeadraceError as cause:
        return cause.description
    except duckdb.Error as cause:
        return refused(cause).description
    finally:
        connection.close()
    return ""


def schema_problem(table: TableConfig) -> str:
    """Return why a table cannot have its declared columns; empty if it can, or has none."""
    connection = empty_database()
    try:
        check_types(connection, table, declared(table.value_schema) if table.value_schema else [])
    except ConfigError as cause:
        return cause.description
    finally:
        connection.close()
    return ""


def _declared_columns(table: TableConfig) -> Columns:
    return Columns(table, declared(table.value_schema) if table.value_schema else None)


def _batch(request: Filter, topic: str) -> RecordBatch:
    return RecordBatch(
        TopicPartition(topic, request.partition),
        request.offsets,
        request.timestamps_ms,
        request.keys,
        request.values,
        request.headers,
        [],
    )


def _rows(
    cursor: duckdb.DuckDBPyConnection, columns: Columns, statement: PushStatement, form: Form
) -> tuple[dict[int, bytes], dict[int, Exception]]:
    """Return the row of each record that passes, and the error of each at which the statement fails.

    Both are by the index among the records that fit.
    """
    _check_rowid(columns)
    make_fitting(cursor, columns)
    count = count_fitting(cursor)
    numbered = statement._replace(columns=f"{_ROWID}, {statement.columns}")

    def run(start: int, end: int) -> list[tuple[int, bytes]]:
        found = cursor.execute(numbered.over(part_of_fitting(cursor, start, end, count))).fetchall()
        texts = RowWriter(cursor, form, leave_out=1).texts([row[1:] for row in found])
        return [(start + row[0], text) for row, text in zip(found, texts, strict=True)]

    parts, failed = in_parts(run, count)
    found = [pair for part in parts for pair in part]
    rows = dict(found)
    if len(rows) < len(found):
        raise QueriesUnavailable("the statement makes several rows of a record: select a list, or use a pipeline")
    return rows, failed


def _problem(cause: Exception) -> Problem:
    failed = failure(0, cause)
    return "memory" if failed.kind == "memory" else "failed", failed.reason


def _check_rowid(columns: Columns) -> None:
    if any(name.lower() == _ROWID for _, name in columns.shown):
        raise StatementRejected(f"a table with a column {_ROWID} has no standing queries: use a pipeline")


def _spread(rows: Mapping[int, bytes], sound: list[int], count: int) -> list[bytes | None]:
    found: list[bytes | None] = [None] * count
    for at, text in rows.items():
        found[sound[at]] = text
    return found


def _failure(number: int, cause: BaseException) -> RequestFailed:
    """Return why a batch is not evaluated: its records wait, except for one that takes too much time alone."""
    if isinstance(cause, duckdb.InterruptException):
        return RequestFailed(number, "timeout", _TOO_LONG)
    end_if_broken(cause)
    if isinstance(cause, duckdb.Error):
        cause = refused(cause)
    if isinstance(cause, HeadraceError):
        return RequestFailed(number, "unavailable", cause.description)
    log.error("a batch of a standing query is not evaluated", exc_info=cause)
    return RequestFailed(number, "unavailable", f"the statement is not evaluated: {cause!r}"[:500])
