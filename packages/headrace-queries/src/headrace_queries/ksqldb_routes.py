"""ksqlDB's endpoints `/query-stream` and `/close-query`, and light-4j's `/ksqldb/active`."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Collection
from typing import Final

from headrace import errors
from headrace.config.http import HttpConfig
from headrace.errors import HeadraceError, RequestBodyMissing, StatementRejected
from headrace.http.auth.principals import READ
from headrace.http.endpoint import JSON_BODY, Call, Endpoint, Errors, Rule, owner_of, require
from headrace.http.messages import HttpResponse, decode_body, media_type, read_body
from headrace.http.request import UNREAD_SECONDS, HttpRequest
from headrace.runtime import run_while
from headrace_queries.callers import Caller
from headrace_queries.engine_process import QueryEngine
from headrace_queries.ksqldb import (
    DELIMITED,
    JSON,
    KSQL_JSON,
    REQUEST_TYPES,
    CloseQueryBody,
    QueryBody,
    QueryStreamBody,
    Renderer,
    error_body,
    query_renderer,
    query_stream_renderer,
)
from headrace_queries.ksqldb_active import TIMEOUT_SECONDS, ActiveQuery, objects, refused
from headrace_queries.ksqldb_statements import KsqldbStatements, OpenQuery

_MAY_READ: Final = Rule((READ,), "consume")
_FAILURES: Final[Errors] = (errors.TooManyRequests, errors.QueriesUnavailable, errors.KsqldbUnavailable)


def readable_of(request: HttpRequest, engine: QueryEngine | None) -> Collection[str]:
    """Return the tables that the caller of a request may read."""
    principal = request.caller.principal
    topics = engine.topics if engine else {}
    return [name for name in topics if principal is None or principal.may((READ,), "consume", topics[name])]


def caller_of(request: HttpRequest) -> Caller:
    """Return the caller of a request."""
    return Caller(owner_of(request), request.client_address)


def require_all_topics(request: HttpRequest) -> None:
    """Raise a scope error unless the caller may read every topic.

    A ksqlDB server sees one user, Headrace, so the patterns of a caller cannot be checked there.
    """
    require(request, (READ,), "consume", "*")


async def read_statement_body(request: HttpRequest, settings: HttpConfig) -> bytes:
    """Return the body of a request with a statement.

    Raises:
        RequestBodyMissing: It is empty.
        ContentTypeMismatch: It is neither JSON nor ksqlDB's.
    """
    body = await read_body(request, settings)
    if not body:
        raise RequestBodyMissing('send a statement: {"sql": "SELECT ..."}')
    if media_type(request.head.headers).decode("latin-1") not in REQUEST_TYPES:
        raise errors.ContentTypeMismatch(f"send JSON with Content-Type {JSON} or {KSQL_JSON}")
    return body


async def run_ksqldb(
    request: HttpRequest, body: QueryBody | QueryStreamBody, statements: KsqldbStatements, readable: Collection[str]
) -> None:
    """Run a statement of ksqlDB, and send its rows as they arrive in ksqlDB's format."""
    is_stream = isinstance(body, QueryStreamBody)
    text = body.sql if isinstance(body, QueryStreamBody) else body.ksql
    properties = body.properties if isinstance(body, QueryStreamBody) else body.streamsProperties
    accept = request.head.headers.get(b"accept", b"").decode("latin-1").lower()
    running = statements.run(text, properties, body.sessionVariables, readable, caller_of(request))
    async with contextlib.AsyncExitStack() as stack:
        try:
            if statements.on_server:
                require_all_topics(request)
            query = await stack.enter_async_context(running)
        except HeadraceError as error:
            await request.response.send(HttpResponse(error_body(error, text), error.status, KSQL_JSON.encode()))
            return
        renderer = query_stream_renderer(accept, push=query.push) if is_stream else query_renderer(push=query.push)
        await run_while(_stream(query, renderer, request), request.body.closed())


async def _stream(query: OpenQuery, renderer: Renderer, request: HttpRequest) -> None:
    request.is_streaming = True
    request.response.last_bytes = renderer.error
    head = [(b"content-type", renderer.media_type.encode()), (b"cache-control", b"no-store")]
    await request.response.start(200, head)
    await request.response.write(renderer.header(query.id, query.columns))
    async for rows in query.rows:
        if not await request.response.write_through(renderer.rows(rows) or renderer.blank, UNREAD_SECONDS):
            return
    await request.response.end(renderer.end(limit_reached=not query.closed))


@dataclasses.dataclass(eq=False)
class KsqldbEndpoints:
    """Runs statements in the ways of ksqlDB and light-4j."""

    _statements: KsqldbStatements
    _engine: QueryEngine | None
    _http: HttpConfig

    @Endpoint(
        "POST",
        "/query-stream",
        "runQueryStream",
        "Run a pull or push query as ksqlDB does",
        _MAY_READ,
        {200: (DELIMITED, list, KSQL_JSON)},
        {JSON: QueryStreamBody, KSQL_JSON: QueryStreamBody},
        example={"sql": "SELECT 1 AS one;"},
        errors=(*JSON_BODY, RequestBodyMissing, StatementRejected, *_FAILURES),
        error_media=KSQL_JSON,
        headers={"Accept": f"{DELIMITED} (default), {JSON} or {KSQL_JSON}"},
        whole=True,
    )
    async def query_stream(self, request: HttpRequest) -> None:
        body = decode_body(await read_statement_body(request, self._http), QueryStreamBody)
        await run_ksqldb(request, body, self._statements, readable_of(request, self._engine))

    @Endpoint(
        "POST",
        "/close-query",
        "closeQuery",
        "End a push query",
        _MAY_READ,
        {200: ()},
        {JSON: CloseQueryBody, KSQL_JSON: CloseQueryBody},
        errors=(*JSON_BODY, StatementRejected),
        error_media=KSQL_JSON,
        whole=True,
    )
    async def close_query(self, request: HttpRequest) -> None:
        body = decode_body(await read_body(request, self._http), CloseQueryBody)
        try:
            self._statements.close(body.queryId, owner_of(request))
        except StatementRejected as error:
            await request.response.send(HttpResponse(error_body(error), error.status, KSQL_JSON.encode()))
            return
        await request.response.send(HttpResponse(b"", 200))

    @Endpoint(
        "POST",
        "/ksqldb/active",
        "runActiveQuery",
        "Run a statement as light-4j's sidecar does",
        _MAY_READ,
        {200: list},
        example={"query": "SELECT 1 AS one;"},
        errors=(StatementRejected, errors.AuthTokenScopeMismatch),
    )
    async def active(self, call: Call[ActiveQuery, None]) -> HttpResponse:
        if self._statements.on_server:
            require_all_topics(call.request)
        try:
            call.body.statement()
            running = self._statements.run(
                call.body.text,
                call.body.query_properties(),
                {},
                readable_of(call.request, self._engine),
                caller_of(call.request),
            )
            async with asyncio.timeout(TIMEOUT_SECONDS), running as query:
                rows = await _present_rows(query)
                return HttpResponse(objects(query.columns, rows))
        except TimeoutError:
            raise refused(StatementRejected(f"no response within {TIMEOUT_SECONDS:g} s")) from None
        except HeadraceError as error:
            raise refused(error) from error


async def _present_rows(query: OpenQuery) -> list[bytes]:
    """Return the rows of a pull query; of a push query those that are there now."""
    found: list[bytes] = []
    async for rows in query.rows:
        if query.push and not rows:
            break
        found += rows
    return found
