"""`/query` and `/tables`: statements over the tables of this process, their rows by key, and their states."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from headrace import errors
from headrace.config.http import HttpConfig
from headrace.errors import NotFound, StatementRejected
from headrace.http.auth.principals import READ
from headrace.http.endpoint import ADMINISTER, JSON, JSON_BODY, NDJSON, Call, CallEvent, Endpoint, Errors, Rule, require
from headrace.http.messages import HttpResponse, decode_body, decode_query
from headrace.http.request import ClientGone, HttpRequest, RequestHead
from headrace.runtime import run_while
from headrace_queries.engine_process import QueryEngine
from headrace_queries.engine_protocol import Form, Row, Rows, TableStatus
from headrace_queries.ksqldb import KSQL_JSON, QueryBody
from headrace_queries.ksqldb_routes import caller_of, read_statement_body, readable_of, run_ksqldb
from headrace_queries.ksqldb_statements import KsqldbStatements
from headrace_queries.push_stream import EVENTS, LAST_EVENT_ID, positions_of, stream_events
from headrace_queries.statement_text import read_statement
from headrace_queries.table_config import MAX_TIMEOUT_SECONDS, SqlConfig

ARROW: Final = "application/vnd.apache.arrow.stream"
TABLE: Final = "/tables/{name}"
_MORE: Final = b"x-headrace-more"
_DEFAULT_SECONDS: Final = 10.0
_MOMENT_SECONDS: Final = 0.05
_MAY_READ: Final = Rule((READ,), "consume")
_FAILURES: Final[Errors] = (errors.TooManyRequests, errors.QueriesUnavailable)
_UNUSUAL: Final = frozenset(
    b"content-length expect transfer-encoding upgrade x-headrace-forwarded x-scope-token".split()
)
"""Headers of a request for a row that a task serves."""


class SqlQuery(msgspec.Struct, forbid_unknown_fields=True):
    """A statement, and limits of its result."""

    sql: str
    """One SELECT over tables of this process, in the SQL of DuckDB."""
    params: list[Any] | dict[str, Any] = []
    """Values of `?` by position, or of `$name` by name."""
    limit: Annotated[int, Meta(ge=1)] | None = None
    """Most rows of the response; by default, and at most, 10,000."""
    timeout_seconds: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_SECONDS)] = _DEFAULT_SECONDS
    """When the statement is interrupted."""


class ResultColumn(msgspec.Struct):
    """A column of a result."""

    name: str
    type: str
    """In DuckDB."""


class SqlResult(msgspec.Struct):
    """The rows of a statement."""

    columns: list[ResultColumn]
    rows: list[dict[str, Any]]
    more: bool
    """Whether the result has more rows than a limit allows."""


class Tables(msgspec.Struct):
    """The tables of this process that the caller may read."""

    tables: list[TableStatus]


class EventQuery(msgspec.Struct, forbid_unknown_fields=True):
    """A push query in a URL, for EventSource."""

    sql: str


@dataclasses.dataclass(eq=False)
class QueryEndpoints:
    """Runs statements over the tables of this process."""

    _found: QueryEngine | None
    """None if the process has no tables, but a ksqlDB server."""
    _statements: KsqldbStatements
    _http: HttpConfig
    _sql: SqlConfig

    @Endpoint(
        "POST",
        "/query",
        "query",
        "Run a SELECT over the tables of this process, or a push query with EMIT CHANGES",
        _MAY_READ,
        {200: (SqlResult, NDJSON, ARROW, EVENTS, KSQL_JSON)},
        {JSON: SqlQuery, KSQL_JSON: QueryBody},
        example={"sql": "SELECT 1 AS one"},
        errors=(*JSON_BODY, errors.RequestBodyMissing, StatementRejected, *_FAILURES),
        error_media=KSQL_JSON,
        headers={
            "Accept": f"{JSON}, {NDJSON} (an object per line), {ARROW}; for a push query {EVENTS}",
            "Last-Event-ID": "Id of the last event that the client of a push query has processed",
        },
        whole=True,
    )
    async def query(self, request: HttpRequest) -> None:
        body = await read_statement_body(request, self._http)
        if _has_ksql(body):
            readable = readable_of(request, self._found)
            await run_ksqldb(request, decode_body(body, QueryBody), self._statements, readable)
            return
        query = decode_body(body, SqlQuery)
        accept = request.head.headers.get(b"accept", b"").decode("latin-1").lower()
        if EVENTS in accept:
            if query.params:
                raise StatementRejected("a push query has no params: write the values into the statement")
            await self._events(request, query.sql)
            return
        form: Form = "arrow" if ARROW in accept else "objects"
        await request.response.send(_response(await _rows_of(self._ask(request, query, form), request), accept))

    @Endpoint(
        "GET",
        "/query",
        "streamQuery",
        "Run a push query as server-sent events, for EventSource",
        _MAY_READ,
        {200: EVENTS},
        query=EventQuery,
        errors=(StatementRejected, *_FAILURES),
        headers={"Last-Event-ID": "Id of the last event that the client has processed"},
        whole=True,
    )
    async def events(self, request: HttpRequest) -> None:
        await self._events(request, decode_query(request, EventQuery).sql)

    @property
    def _engine(self) -> QueryEngine:
        return _present(self._found)

    async def _events(self, request: HttpRequest, sql: str) -> None:
        statement = read_statement(sql)
        if not statement.is_push:
            raise StatementRejected("a stream of events needs a push query: write EMIT CHANGES at the end")
        push = self._statements.push_of(statement, readable_of(request, self._engine))
        last = request.head.headers.get(LAST_EVENT_ID, b"").decode("latin-1")
        after = positions_of(last) if last else None
        async with self._engine.push(push, "objects", after, caller_of(request)) as running:
            await run_while(stream_events(running, push.limit, request), request.body.closed())

    def _ask(self, request: HttpRequest, query: SqlQuery, form: Form) -> asyncio.Future[Rows]:
        limit = min(query.limit or self._sql.max_rows, self._sql.max_rows)
        readable = readable_of(request, self._engine)
        return self._engine.ask(
            query.sql, query.params, readable, form, limit, query.timeout_seconds, caller_of(request)
        )

    @Endpoint("GET", "/tables", "listTables", "Tables that are kept from topics", _MAY_READ, errors=_FAILURES)
    async def tables(self, call: Call[None, None]) -> Tables:
        readable = readable_of(call.request, self._engine)
        if not self._engine.tables:
            raise errors.QueriesUnavailable()
        return Tables([status for name, status in self._engine.tables.items() if name in readable])

    @Endpoint("GET", TABLE, "showTable", "State and columns of a table", _MAY_READ, errors=(NotFound, *_FAILURES))
    async def table(self, call: Call[None, None]) -> TableStatus:
        name = self._name(call)
        if name not in self._engine.tables:
            raise errors.QueriesUnavailable()
        return self._engine.tables[name]

    @Endpoint(
        "POST",
        f"{TABLE}/rebuild",
        "rebuildTable",
        "Delete the rows of a table and read its topic again",
        ADMINISTER,
        errors=(NotFound, *_FAILURES),
        audited="rebuild",
    )
    async def rebuild(self, call: Call[None, None]) -> None:
        name = call.parameters["name"]
        self._engine.topic_of(name)
        call.event = CallEvent(f"table {name}")
        await self._engine.rebuild(name)

    def _name(self, call: Call[Any, Any]) -> str:
        return _table_of(call.request, self._engine)


class RowRoute:
    """Serves the row of a key, usually without a task of its own."""

    def __init__(self, found: QueryEngine | None) -> None:
        """Take the engine; None if the process has no tables."""
        self._found = found
        self.steps = {RowRoute.load.id: self}
        """What serves an endpoint in steps, by endpoint id."""

    def accepts(self, head: RequestHead) -> bool:
        return head.keep_alive and _UNUSUAL.isdisjoint(head.headers)

    def needs(self, request: HttpRequest) -> tuple[str, str]:
        name, key = _table_of(request, _present(self._found)), request.head.route.parameters["key"]
        if not key.isprintable():
            raise NotFound("a path cannot name this key: send a SELECT with the key in params to POST /query")
        return name, key

    @Endpoint(
        "GET",
        f"{TABLE}/rows/{{key}}",
        "getRow",
        "The row of a key of a table",
        _MAY_READ,
        {200: JSON},
        errors=(NotFound, StatementRejected, *_FAILURES),
        whole=True,
    )
    async def load(self, request: HttpRequest) -> tuple[str, str]:
        return self.needs(request)

    def do(self, needed: tuple[str, str], done: Callable[[asyncio.Future[Row]], None]) -> None:
        _present(self._found).look_up(*needed).add_done_callback(done)

    def respond(self, needed: tuple[str, str], results: asyncio.Future[Row]) -> HttpResponse:
        name, key = needed
        row = results.result().row
        if row is None:
            raise NotFound(f"table {name} has no row with key {key[:60]!r}")
        return HttpResponse(row)


async def _rows_of(requested: asyncio.Future[Rows], request: HttpRequest) -> Rows:
    """Wait for the rows of a statement; interrupt it when its caller leaves."""
    try:
        await asyncio.wait([requested], timeout=_MOMENT_SECONDS)  # most have their rows, and need no look at the client
        if not requested.done() and await run_while(asyncio.wait([requested]), request.body.closed()) is None:
            raise ClientGone
        return requested.result()
    finally:
        requested.cancel()


def _present(engine: QueryEngine | None) -> QueryEngine:
    if engine is None:
        raise NotFound("this process has no tables: add some to its file (tables), or send ksql")
    return engine


def _table_of(request: HttpRequest, engine: QueryEngine) -> str:
    """Return the table that the path of a request names, whose topic the caller may read."""
    name: str = request.head.route.parameters["name"]
    require(request, (READ,), "consume", engine.topic_of(name))
    return name


def _has_ksql(body: bytes) -> bool:
    """Return whether a body is ksqlDB's, which has its statement in `ksql`."""
    try:
        return "ksql" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # decoding it as the usual body names the problem


def _response(result: Rows, accept: str) -> HttpResponse:
    more = [(_MORE, b"true" if result.more else b"false")]
    if ARROW in accept:
        return HttpResponse(result.rows[0], content_type=ARROW.encode(), headers=more)
    if NDJSON in accept:
        return HttpResponse(b"".join(row + b"\n" for row in result.rows), content_type=NDJSON.encode(), headers=more)
    columns = msgspec.json.encode([ResultColumn(column.name, column.type) for column in result.columns])
    text = b'{"columns":%b,"rows":[%b],"more":%b}'
    return HttpResponse(text % (columns, b",".join(result.rows), b"true" if result.more else b"false"))
