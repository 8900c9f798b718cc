"""Runs push queries over the records of each transaction: once per statement, for all of its subscribers."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import duckdb

from headrace.errors import HeadraceError, QueriesUnavailable, StatementRejected
from headrace.queries.columns import quoted
from headrace.queries.engine.apart import in_parts
from headrace.queries.engine.batch_rows import count_fitting, part_of_fitting, position_of_fitting
from headrace.queries.engine.pull import RowWriter, failure
from headrace.queries.engine.statements import Statements
from headrace.queries.engine.table_feed import TableFeed
from headrace.queries.protocol import Changes, ColumnType, Ended, Form, Positions, PushBegun, Subscribe, ToParent
from headrace.queries.push_statement import PushStatement

EVALUATION_SECONDS: Final = 2.0
"""A statement that takes longer for one transaction is ended."""
_SNAPSHOT_SECONDS: Final = 30.0
_MOST_STATEMENTS: Final = 500
_SNAPSHOT_ROWS: Final = 1_000
_TOO_LONG: Final = "the statement takes too long for the changes of the table: make its condition cheaper"


class Pushes:
    """The push queries of one table. The thread that applies records runs them, and owns the list of them."""

    def __init__(self, feed: TableFeed, statements: Statements, send: Callable[[ToParent], None]) -> None:
        """Take the function that sends a message, from any thread."""
        self._feed = feed
        self._statements = statements
        self._send = send
        self._groups: dict[tuple[PushStatement, Form], list[int]] = {}
        """Numbers of subscriptions."""
        self._columns: dict[int, list[ColumnType]] = {}
        """Those that each subscriber was sent."""
        self._began_at = float("inf")
        """When the evaluation that runs now has begun; infinite if none does."""
        self._limit_seconds = EVALUATION_SECONDS
        self._evaluated: list[int] = []
        """The subscriptions of that evaluation."""
        feed.on_applied = self._applied

    async def subscribe(self, request: Subscribe, keys: Mapping[str, str]) -> None:
        """Begin a subscription, behind the transaction that runs now."""
        try:
            if len(self._groups) >= _MOST_STATEMENTS:
                raise QueriesUnavailable(f"{_MOST_STATEMENTS} different push queries of a table run; end some")
            await self._feed.file.run(self._begin, request, keys)
        except (HeadraceError, duckdb.Error) as cause:
            self._send(failure(request.number, cause))

    async def unsubscribe(self, number: int) -> None:
        """End a subscription, behind its begin if that still waits."""
        await self._feed.file.run(self._remove, number)

    def watch(self) -> list[int]:
        """Interrupt an evaluation that takes too long, and return the subscriptions of one that takes a while."""
        seconds = time.monotonic() - self._began_at
        if seconds > self._limit_seconds:
            self._feed.file.connection.interrupt()
        return self._evaluated if seconds > 0 else []

    @contextlib.contextmanager
    def _watched(self, numbers: list[int], limit_seconds: float) -> Iterator[None]:
        self._evaluated = numbers
        self._limit_seconds = limit_seconds
        self._began_at = time.monotonic()
        try:
            yield
        finally:
            self._began_at = float("inf")

    def _remove(self, number: int) -> None:
        self._columns.pop(number, None)
        for key, numbers in [*self._groups.items()]:
            self._groups[key] = [other for other in numbers if other != number]
            if not self._groups[key]:
                del self._groups[key]

    def _begin(self, request: Subscribe, keys: Mapping[str, str]) -> None:
        """Send the columns and the rows from the positions on, then take the subscription up."""
        file = self._feed.file
        statement = request.statement
        self._statements.check(statement.over(quoted(request.table)), keys, [request.table])
        positions = file.positions()
        with self._watched([request.number], _SNAPSHOT_SECONDS):
            cursor = file.connection.execute(statement.over(file.rows_after(request.after)))
            writer = RowWriter(cursor, request.form)
            self._send(PushBegun(request.number, writer.columns))
            try:
                while request.after is not None and (rows := cursor.fetchmany(_SNAPSHOT_ROWS)):
                    self._send(Changes([request.number], writer.texts(rows), {}))
            except (HeadraceError, duckdb.Error) as cause:
                self._send(Ended(request.number, failure(request.number, cause).reason))
                return
        self._send(Changes([request.number], [], positions))
        self._columns[request.number] = writer.columns
        self._groups.setdefault((statement, request.form), []).append(request.number)

    def _applied(self, positions: Positions) -> None:
        """Run every statement over the records of a transaction."""
        if not self._groups:
            return
        groups = [*self._groups.items()]
        file = self._feed.file
        try:
            file.materialize_arrived()
            count = count_fitting(file.connection)
        except Exception as cause:  # noqa: BLE001 boundary: the rows are in the table, and these clients miss them
            for group, _ in groups:
                self._end(group, cause)
            return
        for (statement, form), numbers in groups:
            try:
                with self._watched(numbers, EVALUATION_SECONDS):
                    self._push(statement, form, numbers, count, positions)
            except Exception as cause:  # noqa: BLE001 boundary: one statement must not stop the others
                self._end((statement, form), cause)

    def _push(self, statement: PushStatement, form: Form, numbers: list[int], count: int, positions: Positions) -> None:
        """Send the rows of a transaction; those before the first record at which the statement fails, then the reason.

        Raises:
            StatementRejected: It fails at a record.
        """
        connection = self._feed.file.connection

        def run(start: int, end: int) -> tuple[int, list[bytes]]:
            cursor = connection.execute(statement.over(part_of_fitting(connection, start, end, count)))
            writer = RowWriter(cursor, form)
            rows = writer.texts(cursor.fetchall())
            if form == "arrays" and any(self._columns[number] != writer.columns for number in numbers):
                raise QueriesUnavailable("the table has other columns now: send the statement again")
            return start, rows

        parts, failed = in_parts(run, count)
        first = min(failed, default=count)
        rows = [row for start, of_part in parts if start < first for row in of_part]
        if rows or not failed:
            self._send(Changes(numbers, rows, {} if failed else positions))
        if failed:
            partition, offset = position_of_fitting(connection, self._feed.file.columns, first)
            reason = failure(0, failed[first]).reason
            raise StatementRejected(
                f"{reason} (at partition {partition}, offset {offset}). TRY_CAST gives NULL instead of an error; "
                "a stream without Last-Event-ID begins behind this record"
            )

    def _end(self, group: tuple[PushStatement, Form], cause: Exception) -> None:
        late = isinstance(cause, duckdb.InterruptException)
        for number in self._groups.pop(group):
            self._send(Ended(number, _TOO_LONG if late else failure(number, cause).reason))
