"""Runs statements and look-ups by key: how many at a time, how long, how much memory, rows and bytes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import duckdb
import msgspec
import pyarrow as pa

from headrace.errors import Forbidden, HeadraceError, QueriesUnavailable, StatementRejected
from headrace.runtime import Service, ThreadPool
from headrace_queries.columns import quoted
from headrace_queries.engine.database import end_if_broken
from headrace_queries.engine.statements import Statements, refused
from headrace_queries.engine_protocol import Ask, ColumnType, Form, Lookup, RequestFailed, Row, Rows, ToParent

_AT_A_TIME: Final = 4
_CHUNK: Final = 500
MOST_BYTES: Final = 16 * 1024 * 1024
"""Limit of the rows of a response."""
_AGAIN_SECONDS: Final = 0.1
"""An interrupt that comes before the statement begins has no effect, so it is repeated."""
_MOMENT_SECONDS: Final = 0.2
_MOST_INTERRUPTS: Final = 50
"""A statement that is still at work after this number does not end in time."""
_MEMORY: Final = (
    "the statement needs more memory than sql.memory_bytes allows: select fewer rows or columns, or raise it; "
    "what outgrows one machine belongs to a pipeline"
)
_encode = msgspec.json.Encoder(decimal_format="number", enc_hook=str).encode


class RowWriter:
    """Turns rows of a cursor into the form that a caller wants."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection, form: Form, *, leave_out: int = 0) -> None:
        """Take a cursor that has run a statement; the rows come without this number of first columns."""
        description = (cursor.description or [])[leave_out:]
        self.columns = [ColumnType(column[0], str(column[1])) for column in description]
        self._names = _distinct([column.name for column in self.columns])
        self._json = [at for at, column in enumerate(self.columns) if column.type == "JSON"]
        self._objects = form == "objects"

    def texts(self, rows: Sequence[Sequence[Any]]) -> list[bytes]:
        """Return rows as JSON text.

        Raises:
            StatementRejected: A value has no form in JSON.
        """
        try:
            return [self._text(row) for row in rows]
        except (TypeError, ValueError, msgspec.MsgspecError) as cause:
            raise StatementRejected(f"a value has no form in JSON: {cause}; cast its column to VARCHAR") from None

    def _text(self, row: Sequence[Any]) -> bytes:
        if self._json:
            cells = list(row)
            for at in self._json:
                cells[at] = None if cells[at] is None else _json_cell(cells[at])
            row = cells
        return _encode(dict(zip(self._names, row, strict=True)) if self._objects else row)


def _json_cell(text: str) -> msgspec.Raw | str:
    """Return JSON text in one line; a string of it if only DuckDB takes it as JSON: NaN, or a thousand levels."""
    try:
        return msgspec.Raw(msgspec.json.format(text, indent=-1).encode())
    except (msgspec.DecodeError, RecursionError):
        return text


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names in which a repeated one has a number."""
    seen: dict[str, int] = defaultdict(int)
    found = []
    for name in names:
        found.append(f"{name}_{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


class _KeyRequest(NamedTuple):
    """A request for the row of a key, which is found together with others."""

    number: int
    table: str
    key: str
    selected: str
    """The list of a SELECT."""
    form: Form
    respond: Callable[[Rows | RequestFailed], None]


class Pulls(Service):
    """Runs requests on its threads; each thread has a cursor."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        statements: Statements,
        keys: Mapping[str, str],
        send: Callable[[ToParent], None],
        latest: Collection[str] = (),
    ) -> None:
        """Prepare.

        Args:
            connection: Of the database.
            statements: Checks those of callers.
            keys: All tables, each with its key column if it is available.
            send: Sends responses.
            latest: Tables with one row per key.
        """
        super().__init__("statements")
        self._statements = statements
        self._keys = keys
        self._latest = {name.lower(): name for name in latest}
        self._send = send
        self._threads = ThreadPool("statement", _AT_A_TIME)
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self._idle = [connection.cursor() for _ in range(_AT_A_TIME)]
        self._running: dict[int, _RunningStatement] = {}
        self._waiting: dict[int, asyncio.TimerHandle] = {}
        """Time limits of statements that wait for the row of a key."""
        self._lookup_thread = ThreadPool("lookup", 1)
        self._lookup_cursor = connection.cursor()
        self._lookups: list[_KeyRequest] = []

    async def start(self) -> None:
        """Start nothing: a request starts a task."""

    def ask(self, request: Ask) -> None:
        """Begin a statement; its response is sent soon after its time limit at the latest.

        A statement that asks for a key is looked up with others. It is run by itself if it is new or fails so: then
        its caller gets the error of its own text.
        """
        query = self._key_query(request)
        if not query:
            self._run_alone(request, request.timeout_seconds)
            return
        timer = self._waiting[request.number] = asyncio.get_running_loop().call_later(
            request.timeout_seconds, self._expire, request.number
        )

        def respond(response: Rows | RequestFailed) -> None:
            if self._waiting.pop(request.number, None) is None:
                return  # its caller has left, or its time is over
            timer.cancel()
            if isinstance(response, RequestFailed) or sum(map(len, response.rows)) > MOST_BYTES:
                self._run_alone(request, timer.when() - asyncio.get_running_loop().time())
            else:
                self._send(response)

        table, key, selected = query
        self._join(_KeyRequest(request.number, table, key, selected, request.form, respond))

    def _key_query(self, request: Ask) -> tuple[str, str, str] | None:
        """Return table, key and columns of a statement that asks for the row of a key, and may do so."""
        statement = self._statements.accepted(request.sql)
        if statement is None or statement.key_query is None or request.form == "arrow":
            return None
        selected, name, column = statement.key_query
        table = self._latest.get(name.lower(), "")
        params = request.params if isinstance(request.params, list) else []
        if not table or [type(value) for value in params] != [str] or self._keys[table].lower() != column.lower():
            return None
        with contextlib.suppress(HeadraceError):
            self._statements.check(request.sql, self._keys, request.readable)
            return table, params[0], selected
        return None

    def _expire(self, number: int) -> None:
        """End the wait of a statement for the row of a key."""
        if timer := self._waiting.pop(number, None):
            timer.cancel()
            text = "other statements were at work until its time limit: send this again after a pause"
            self._send(RequestFailed(number, "unavailable", text))

    def _run_alone(self, request: Ask, limit_seconds: float) -> None:
        running = self._running[request.number] = _RunningStatement(limit_seconds)
        self.spawn(self._ask(request, running), f"request {request.number}")

    def slow(self) -> list[int]:
        """Return the statements that have been at work for a moment."""
        return [number for number, running in self._running.items() if running.is_slow]

    def outlived(self) -> list[int]:
        """Return the statements that do not end although they are interrupted over and over."""
        return [number for number, running in self._running.items() if running.interrupts > _MOST_INTERRUPTS]

    def cancel(self, number: int) -> None:
        """Interrupt a statement."""
        self._expire(number)
        if running := self._running.get(number):
            self._interrupt(number, running)

    def _interrupt(self, number: int, running: _RunningStatement) -> None:
        if self._running.get(number) is running:
            running.interrupt()
            asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._interrupt, number, running)

    async def _ask(self, request: Ask, running: _RunningStatement) -> None:
        response: ToParent
        loop = asyncio.get_running_loop()
        timer = loop.call_later(running.limit_seconds, self._interrupt, request.number, running)
        try:
            async with running.turn:
                await self._turns.acquire()
            response = await self._in_turn(request, running)
        except Exception as cause:  # noqa: BLE001 boundary: whatever a statement raises is its caller's response
            if running.turn.expired():
                text = f"other statements were at work for {request.timeout_seconds:g} s: send this again after a pause"
                response = RequestFailed(request.number, "unavailable", text)
            elif running.is_late:
                text = (
                    f"the statement was interrupted after {request.timeout_seconds:g} s: make it cheaper, or give it "
                )
                response = RequestFailed(request.number, "timeout", text + "more time (timeout_seconds)")
            else:
                response = failure(request.number, cause)
        finally:
            timer.cancel()
            del self._running[request.number]
        self._send(response)

    async def _in_turn(self, request: Ask, running: _RunningStatement) -> Rows:
        try:
            return await self._threads.run(self._run, request, running)
        finally:
            self._turns.release()

    def _run(self, request: Ask, running: _RunningStatement) -> Rows:
        """Run a statement, on a thread."""
        cursor = self._idle.pop()
        try:
            with running.interrupting(cursor):
                statement = self._statements.check(request.sql, self._keys, request.readable)
                cursor.execute("BEGIN TRANSACTION READ ONLY")
                running.check()
                if request.form == "arrow":
                    return _arrow(cursor, request, running)
                cursor.execute(request.sql, request.params or None)
                return _rows(cursor, request, running)
        except duckdb.BinderException as cause:
            raise refused(cause, _columns(cursor, statement.tables)) from None
        finally:
            with contextlib.suppress(duckdb.Error):  # a rejected statement has not begun a transaction
                cursor.execute("ROLLBACK")
            self._idle.append(cursor)

    def look_up(self, request: Lookup) -> None:
        """Find the row of a key."""

        def respond(response: Rows | RequestFailed) -> None:
            if isinstance(response, Rows):
                self._send(Row(request.number, next(iter(response.rows), None)))
            else:
                self._send(response)

        self._join(_KeyRequest(request.number, request.table, request.key, "*", "objects", respond))

    def _join(self, request: _KeyRequest) -> None:
        """Find a row; the requests that arrive meanwhile are the next ones."""
        self._lookups.append(request)
        if len(self._lookups) == 1:
            self.spawn(self._look_up_all(), "look-ups")

    async def _look_up_all(self) -> None:
        await asyncio.sleep(0)  # for those that have arrived with it
        while self._lookups:
            requests = self._lookups[:_CHUNK]
            responses: Sequence[Rows | RequestFailed]
            try:
                responses = await self._lookup_thread.run(self._look_up, requests)
            except Exception as cause:  # noqa: BLE001 boundary: it gets no thread, and later ones may get one
                text = f"the look-up did not begin: {cause!r}; send it again"
                responses = [RequestFailed(request.number, "unavailable", text) for request in requests]
            by_number = {response.number: response for response in responses}
            for request in requests:
                request.respond(by_number[request.number])
            del self._lookups[: len(requests)]  # others have arrived behind them

    def _look_up(self, requests: Sequence[_KeyRequest]) -> list[Rows | RequestFailed]:
        alike: dict[tuple[str, str, Form], list[_KeyRequest]] = defaultdict(list)
        for request in requests:
            alike[request.table, request.selected, request.form].append(request)
        return [response for joined in alike.values() for response in self._look_up_together(joined)]

    def _look_up_together(self, requests: Sequence[_KeyRequest]) -> list[Rows | RequestFailed]:
        """Find rows that differ in their keys only."""
        try:
            return self._rows_of(requests)
        except Exception as cause:  # noqa: BLE001 boundary: one request must not stop the others
            if len(requests) > 1:
                return [response for request in requests for response in self._look_up_together([request])]
            return [failure(requests[0].number, cause)]

    def _rows_of(self, requests: Sequence[_KeyRequest]) -> list[Rows | RequestFailed]:
        """Return the row of each request; a statement for each key would take several times as long."""
        _, table, _, selected, form, _ = requests[0]
        if not self._keys[table]:
            raise QueriesUnavailable(f"table {table} is not available now: GET /tables says why")
        key = quoted(self._keys[table])
        marks = ", ".join("?" * len(requests))
        statement = f"SELECT {key}, {selected} FROM {quoted(table)} WHERE {key} IN ({marks})"
        cursor = self._lookup_cursor.execute(statement, [request.key for request in requests])
        rows = cursor.fetchall()
        writer = RowWriter(cursor, form, leave_out=1)
        texts = writer.texts([row[1:] for row in rows])
        if len(requests) == 1:
            return [Rows(requests[0].number, writer.columns, texts, more=False)]
        # A key of another type than text is not found by the text of a request.
        if not all(isinstance(row[0], str) for row in rows):
            return [response for request in requests for response in self._rows_of([request])]
        by_key = {row[0]: [text] for row, text in zip(rows, texts, strict=True)}
        return [Rows(request.number, writer.columns, by_key.get(request.key, []), more=False) for request in requests]


class _RunningStatement:
    """A statement at work."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.is_late = False
        self.interrupts = 0
        """Of its work. They are counted, because a process that is paused does not interrupt."""
        self.turn = asyncio.timeout(limit_seconds)
        """Bounds how long the statement waits for a thread."""
        self._ends_at = time.monotonic() + limit_seconds
        self._cursor: duckdb.DuckDBPyConnection | None = None
        self._began_at = 0.0

    @contextlib.contextmanager
    def interrupting(self, cursor: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Let interrupts end what this cursor does meanwhile."""
        self._cursor = cursor
        self._began_at = time.monotonic()
        try:
            self.check()
            yield
        finally:
            self._cursor = None

    @property
    def is_slow(self) -> bool:
        """Whether it has been at work for a moment."""
        return self._cursor is not None and time.monotonic() - self._began_at > _MOMENT_SECONDS

    def interrupt(self) -> None:
        """End the statement; called on the loop."""
        self.is_late = True
        with contextlib.suppress(RuntimeError):  # it does not wait: it has not begun, or it has its thread
            self.turn.reschedule(0)
        if (cursor := self._cursor) is not None:
            self.interrupts += 1
            cursor.interrupt()

    def check(self) -> None:
        """Raise TimeoutError past the limit."""
        if self.is_late or time.monotonic() >= self._ends_at:
            self.is_late = True
            raise TimeoutError


def _columns(cursor: duckdb.DuckDBPyConnection, tables: Collection[str]) -> list[str]:
    """Return the columns of tables, whose names are in lower case."""
    with contextlib.suppress(duckdb.Error):  # its transaction may have ended already
        cursor.execute("ROLLBACK")
    found = "SELECT column_name FROM duckdb_columns() WHERE database_name = 'memory' AND lower(table_name) IN "
    return [name for (name,) in cursor.execute(f"{found} (SELECT unnest(?))", [[*tables]]).fetchall()]


def _rows(cursor: duckdb.DuckDBPyConnection, request: Ask, running: _RunningStatement) -> Rows:
    results = RowWriter(cursor, request.form)
    texts: list[bytes] = []
    size = 0
    while rows := cursor.fetchmany(min(_CHUNK, request.max_rows + 1 - len(texts))):
        running.check()
        for text in results.texts(rows):
            size += len(text)
            if len(texts) == request.max_rows or size > MOST_BYTES:
                return Rows(request.number, results.columns, texts, more=True)
            texts.append(text)
    return Rows(request.number, results.columns, texts, more=False)


def _arrow(cursor: duckdb.DuckDBPyConnection, request: Ask, running: _RunningStatement) -> Rows:
    relation = cursor.sql(request.sql, params=request.params or None)
    columns = [ColumnType(name, str(kind)) for name, kind in zip(relation.columns, relation.types, strict=True)]
    reader = relation.to_arrow_reader(_CHUNK)
    sink = io.BytesIO()
    left = request.max_rows
    more = False
    with pa.ipc.new_stream(sink, reader.schema) as writer:
        for batch in reader:
            running.check()
            more = batch.num_rows > left or sink.tell() > MOST_BYTES
            if more:
                writer.write_batch(batch.slice(0, left if sink.tell() <= MOST_BYTES else 0))
                break
            writer.write_batch(batch)
            left -= batch.num_rows
    return Rows(request.number, columns, [sink.getvalue()], more)


def failure(number: int, cause: BaseException) -> RequestFailed:
    """Return what the caller of a request gets for an error; end this process if DuckDB runs nothing more."""
    end_if_broken(cause)
    if isinstance(cause, Forbidden):
        return RequestFailed(number, "forbidden", cause.description)
    if isinstance(cause, QueriesUnavailable):
        return RequestFailed(number, "unavailable", cause.description)
    if isinstance(cause, HeadraceError):
        return RequestFailed(number, "invalid", cause.description)
    if isinstance(cause, duckdb.OutOfMemoryException):
        return RequestFailed(number, "memory", _MEMORY)
    if isinstance(cause, duckdb.Error):
        return RequestFailed(number, "invalid", refused(cause).description)
    return RequestFailed(
        number, "invalid", f"a value of the result has no form here: {cause!r}; cast its column to VARCHAR"
    )
