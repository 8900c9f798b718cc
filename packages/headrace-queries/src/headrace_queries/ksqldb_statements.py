"""Runs statements in ksqlDB's dialect: over the tables of this process, or on a ksqlDB server if one is configured."""

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

from headrace.errors import Forbidden, StatementRejected
from headrace_queries.callers import Caller
from headrace_queries.engine_process import QueryEngine
from headrace_queries.engine_protocol import Positions
from headrace_queries.ksqldb import BLANK_SECONDS, KsqlColumn, result_columns, starts_at_earliest
from headrace_queries.ksqldb_server import KsqldbServer
from headrace_queries.push_query import PushQuery
from headrace_queries.push_statement import PushStatement, read_push
from headrace_queries.statement_text import StatementText, read_statement

_PULL_SECONDS: Final = 10.0


class OpenQuery:
    """A statement that runs: its columns, then its rows."""

    def __init__(
        self,
        columns: Sequence[KsqlColumn],
        rows: AsyncIterator[list[bytes]],
        *,
        push: bool,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.id = f"headrace_{uuid4().hex[:12]}"
        """Under which it can be closed."""
        self.columns = columns
        self.rows = rows
        """JSON arrays, in batches; an empty batch is a moment without rows."""
        self.push = push
        self.closed = False
        """Whether a client has closed it; otherwise a push query ends at its limit."""
        self._close = close

    def close(self) -> None:
        """End the rows of a push query soon."""
        self.closed = True
        self._close()


class KsqldbStatements:
    """Runs statements, and knows those that are open by their ids."""

    def __init__(self, engine: QueryEngine | None, server: KsqldbServer | None, max_rows: int) -> None:
        """Take the tables of this process, and the ksqlDB server, which has priority; one of them may be None."""
        self._engine = engine
        self._server = server
        self._max_rows = max_rows
        self._open: dict[str, tuple[str, OpenQuery]] = {}

    @property
    def on_server(self) -> bool:
        """Whether statements run on a ksqlDB server."""
        return self._server is not None

    @contextlib.asynccontextmanager
    async def run(
        self,
        text: str,
        properties: Mapping[str, Any],
        variables: Mapping[str, Any],
        readable: Collection[str],
        caller: Caller,
    ) -> AsyncIterator[OpenQuery]:
        """Run a statement until the end of the context.

        Args:
            text: One SELECT in ksqlDB's dialect.
            properties: Those of the request; `auto.offset.reset` is used.
            variables: Values of `${name}`.
            readable: Tables that the caller may read.
            caller: Who sends it, and may close it.

        Raises:
            StatementRejected: It is not valid, or not run here.
            Forbidden: The caller may not read a table.
            HeadraceError: See `QueryEngine.ask` and `KsqldbServer.query`.
        """
        async with contextlib.AsyncExitStack() as stack:
            if self._server:
                query = await self._on_server(stack, self._server, text, properties, variables)
            else:
                query = await self._on_tables(stack, text, properties, variables, readable, caller)
            self._open[query.id] = caller.owner, query
            try:
                yield query
            finally:
                del self._open[query.id]

    def close(self, query_id: str, owner: str) -> None:
        """End a push query of the same owner.

        Raises:
            StatementRejected: There is none with this id.
        """
        known_owner, query = self._open.get(query_id, ("", None))
        if query is None or known_owner != owner:
            raise StatementRejected(f"No query with id {query_id[:60]} runs here")
        query.close()

    async def _on_server(
        self,
        stack: contextlib.AsyncExitStack,
        server: KsqldbServer,
        text: str,
        properties: Mapping[str, Any],
        variables: Mapping[str, Any],
    ) -> OpenQuery:
        statement = read_statement(text, ksqldb=True, variables=variables)
        rows = await stack.enter_async_context(server.query(text, properties, variables))
        return OpenQuery(rows.columns, aiter(rows), push=statement.is_push, close=rows.close)

    async def _on_tables(
        self,
        stack: contextlib.AsyncExitStack,
        text: str,
        properties: Mapping[str, Any],
        variables: Mapping[str, Any],
        readable: Collection[str],
        caller: Caller,
    ) -> OpenQuery:
        assert self._engine
        statement = read_statement(text, ksqldb=True, variables=variables)
        if not statement.is_push:
            ask = self._engine.ask
            found = await ask(statement.sql, [], readable, "arrays", self._max_rows, _PULL_SECONDS, caller)
            pairs = [(column.name, column.type) for column in found.columns]
            return OpenQuery(result_columns(pairs, statement), _once(found.rows), push=False)
        push = self.push_of(statement, readable)
        after: Positions | None = {} if starts_at_earliest(properties) else None
        running = await stack.enter_async_context(self._engine.push(push, "arrays", after, caller))
        columns = result_columns([(column.name, column.type) for column in running.columns], statement)
        return OpenQuery(columns, _pushed(running, push.limit), push=True, close=running.close)

    def push_of(self, statement: StatementText, readable: Collection[str]) -> PushStatement:
        """Return a push query over a table that the caller may read.

        Raises:
            StatementRejected: It is not a push query, or the table does not exist.
            Forbidden: The caller may not read it.
        """
        assert self._engine
        push = read_push(statement.sql)
        names = {name.lower(): name for name in self._engine.topics}
        name = names.get(push.table.lower())
        if name is None:
            raise StatementRejected(
                f"table {push.table[:60]!r} does not exist: GET /tables lists those of this process"
            )
        if name not in readable:
            raise Forbidden(f"the caller may not read the topic of table {name}")
        return push


async def _once(rows: list[bytes]) -> AsyncIterator[list[bytes]]:
    yield rows


async def _pushed(push: PushQuery, limit: int | None) -> AsyncIterator[list[bytes]]:
    left = limit
    while (taken := await push.take(BLANK_SECONDS)) is not None:
        yield taken.rows[:left]
        if left is not None:
            left -= len(taken.rows)
            if left <= 0:
                return
