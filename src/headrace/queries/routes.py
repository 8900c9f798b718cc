"""`/query` and `/tables`: statements over the tables of this process, their rows by key, and their states."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from headrace import errors
from headrace.config.http import HttpConfig
from headrace.config.tables import SqlConfig
from headrace.errors import NotFound, StatementRejected
from headrace.http.asgi import ClientGone, Receive, Scope, Send, client_closed, headers_of
from headrace.http.auth.principals import READ
from headrace.http.endpoint import (
    ADMINISTER,
    JSON,
    JSON_BODY,
    NDJSON,
    Call,
    CallEvent,
    Endpoint,
    Errors,
    Rule,
    principal_of,
    require,
)
from headrace.http.messages import HttpResponse, decode_body, read_json
from headrace.queries.engine_process import QueryEngine
from headrace.queries.protocol import Form, Rows, TableStatus
from headrace.runtime import run_while

ARROW: Final = "application/vnd.apache.arrow.stream"
TABLE: Final = "/tables/{name}"
_MORE: Final = b"x-headrace-more"
_DEFAULT_SECONDS: Final = 10.0
_MAY_READ: Final = Rule((READ,), also="consume")
_FAILURES: Final[Errors] = (errors.TooManyRequests, errors.QueriesUnavailable)


class SqlQuery(msgspec.Struct, forbid_unknown_fields=True):
    """A statement, and limits of its result."""

    sql: str
    """One SELECT over tables of this process, in the SQL of DuckDB."""
    params: list[Any] | dict[str, Any] = []
    """Values of `?` by position, or of `$name` by name."""
    limit: Annotated[int, Meta(ge=1)] | None = None
    """Most rows of the response; by default, and at most, `sql.max_rows`."""
    timeout_seconds: Annotated[float, Meta(gt=0)] = _DEFAULT_SECONDS
    """When the statement is interrupted; at most `sql.max_timeout_seconds`."""


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


@dataclasses.dataclass(eq=False)
class QueryEndpoints:
    """Runs statements over the tables of this process."""

    _engine: QueryEngine
    _http: HttpConfig
    _sql: SqlConfig

    @Endpoint(
        "POST",
        "/query",
        "query",
        "Run one SELECT over the tables of this process",
        _MAY_READ,
        {200: (SqlResult, NDJSON, ARROW)},
        {JSON: SqlQuery},
        example={"sql": "SELECT 1 AS one"},
        errors=(*JSON_BODY, errors.RequestBodyMissing, StatementRejected, *_FAILURES),
        headers={"Accept": f"{JSON}, {NDJSON} (an object per line) or {ARROW}"},
        asgi=True,
    )
    async def query(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        body = await read_json(receive, headers, self._http)
        if not body:
            raise errors.RequestBodyMissing("send a statement: " + '{"sql": "SELECT ..."}')
        request = decode_body(body, SqlQuery)
        accept = headers.get(b"accept", b"").decode("latin-1").lower()
        form: Form = "arrow" if ARROW in accept else "objects"
        rows = await run_while(self._ask(scope, request, form), client_closed(receive))
        if rows is None:
            raise ClientGone
        await _response(rows, accept).send(send)

    async def _ask(self, scope: Scope, request: SqlQuery, form: Form) -> Rows:
        most = self._sql.max_timeout_seconds
        if request.timeout_seconds > most:
            raise errors.InvalidRequest(f"timeout_seconds is more than {most:g} (sql.max_timeout_seconds)")
        limit = min(request.limit or self._sql.max_rows, self._sql.max_rows)
        return await self._engine.ask(
            request.sql, request.params, self._readable(scope), form, limit, request.timeout_seconds
        )

    @Endpoint("GET", "/tables", "listTables", "Tables that are kept from topics", _MAY_READ)
    async def tables(self, call: Call[None, None]) -> Tables:
        readable = self._readable(call.scope)
        return Tables([status for name, status in self._engine.tables.items() if name in readable])

    @Endpoint("GET", TABLE, "showTable", "State and columns of a table", _MAY_READ, errors=(NotFound, *_FAILURES))
    async def table(self, call: Call[None, None]) -> TableStatus:
        name = self._name(call)
        if name not in self._engine.tables:
            raise errors.QueriesUnavailable()
        return self._engine.tables[name]

    @Endpoint(
        "GET",
        f"{TABLE}/rows/{{key}}",
        "getRow",
        "The row of a key of a table",
        _MAY_READ,
        {200: JSON},
        errors=(NotFound, StatementRejected, *_FAILURES),
    )
    async def row(self, call: Call[None, None]) -> HttpResponse:
        name = self._name(call)
        key = call.parameters["key"]
        row = await self._engine.look_up(name, key)
        if row is None:
            raise NotFound(f"table {name} has no row with key {key[:60]!r}")
        return HttpResponse(row)

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
        """Return the table of a request, whose topic the caller may read."""
        name = call.parameters["name"]
        require(call.scope, (READ,), "consume", self._engine.topic_of(name))
        return name

    def _readable(self, scope: Scope) -> Sequence[str]:
        principal = principal_of(scope)
        topics = self._engine.topics
        return [name for name in topics if principal is None or principal.may((READ,), "consume", topics[name])]


def _response(result: Rows, accept: str) -> HttpResponse:
    more = [(_MORE, b"true" if result.more else b"false")]
    if ARROW in accept:
        return HttpResponse(result.rows[0], content_type=ARROW.encode(), headers=more)
    if NDJSON in accept:
        return HttpResponse(b"".join(row + b"\n" for row in result.rows), content_type=NDJSON.encode(), headers=more)
    columns = msgspec.json.encode([ResultColumn(column.name, column.type) for column in result.columns])
    text = b'{"columns":%b,"rows":[%b],"more":%b}'
    return HttpResponse(text % (columns, b",".join(result.rows), b"true" if result.more else b"false"))
