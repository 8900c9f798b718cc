"""Runs push queries over the records of each transaction: once per statement, for all of its subscribers."""

import contextlib
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import duckdb
import pyarrow as pa

from headrace.errors import HeadraceError, QueriesUnavailable
from headrace_queries.engine.evaluations import OUTLIVED, Evaluations
from headrace_queries.engine.pull import MOST_BYTES, failure
from headrace_queries.engine.table_feed import TableFeed
from headrace_queries.engine_protocol import (
    Changes,
    ColumnType,
    Ended,
    Evaluate,
    Evaluated,
    EvaluationBatch,
    Form,
    Positions,
    PushBegun,
    RequestFailed,
    Subscribe,
    ToParent,
)
from headrace_queries.push_statement import PushStatement

_MOST_STATEMENTS: Final = 500
_MOST_SECONDS: Final = 30.0
"""Of all statements over the records of a transaction: the table waits for them."""
_FIRST_OFFSETS: Final = 100
_MOST_OFFSETS: Final = 1_000_000
_LARGE_BYTES: Final = 1 << 20
"""Of the rows of a step of a snapshot; the next one has more offsets after a smaller one, and fewer after a larger."""
_MOST_TIMES: Final = 8
"""Rows of more than this multiple are not sent in one step."""
_TOO_SLOW: Final = f"more than {MOST_BYTES >> 20} MiB of changes wait for the rows that the table has: select fewer"
_OTHERS: Final = f"the push queries of the table took more than {_MOST_SECONDS:g} s: send the statement again"
_Group = tuple[PushStatement, Form]


class _Arrived(NamedTuple):
    """The records of a transaction, and the push queries of that moment."""

    groups: list[tuple[_Group, list[int]]]
    batch: EvaluationBatch | None
    """None if they could not be had."""


class _WaitingChanges:
    """Changes for a subscriber that still gets the rows that the table has."""

    def __init__(self) -> None:
        self.changes: list[Changes] = []
        self.size = 0


class Pushes:
    """The push queries of one table. The thread that applies records owns the list of them, and evaluates none."""

    def __init__(
        self, feed: TableFeed, beginnings: Evaluations, evaluations: Evaluations, send: Callable[[ToParent], None]
    ) -> None:
        """Take what evaluates statements that begin, what evaluates changes, and the function that sends a message."""
        self._feed = feed
        self._beginnings = beginnings
        self._evaluations = evaluations
        self._send = send
        self._groups: dict[_Group, list[int]] = {}
        """Numbers of subscriptions; for the thread of the file."""
        self._columns: dict[int, list[ColumnType]] = {}
        """Those that each subscriber was sent."""
        self._waiting: dict[int, _WaitingChanges] = {}
        feed.pushes = self

    async def subscribe(self, request: Subscribe) -> None:
        """Begin a subscription, behind the transaction that runs now."""
        number, file = request.number, self._feed.file
        self._waiting[number] = _WaitingChanges()
        try:
            if not self._feed.key_column:
                raise QueriesUnavailable(f"table {request.table} is not available now: GET /tables says why")
            if len(self._groups) >= _MOST_STATEMENTS:
                raise QueriesUnavailable(f"{_MOST_STATEMENTS} different push queries of a table run; end some")
            evaluated = await self._evaluate_one(request, EvaluationBatch(file.described, b""))
            if number not in self._waiting:
                return  # its client has left
            if isinstance(evaluated, Evaluated):
                self._columns[number] = evaluated.columns
                positions, spans = await file.run(self._begin, request)
        except (HeadraceError, duckdb.Error) as cause:
            evaluated = failure(number, cause)
        if not isinstance(evaluated, Evaluated):
            self._forget(number)
            self._send(evaluated or RequestFailed(number, "timeout", OUTLIVED))
            if evaluated is None:
                self._send(Ended(number, OUTLIVED, outlived=True))
            return
        if number not in self._waiting:
            await file.run(self._remove, number)
            return
        self._send(PushBegun(number, evaluated.columns))
        if await self._send_snapshot(request, spans):
            self._send(Changes([number], [], positions))
            if waiting := self._waiting.pop(number, None):
                for changes in waiting.changes:
                    self._send(changes)

    async def unsubscribe(self, number: int) -> None:
        """End a subscription, behind its begin if that still waits."""
        self._forget(number)
        await self._feed.file.run(self._remove, number)

    def _forget(self, number: int) -> None:
        self._columns.pop(number, None)
        self._waiting.pop(number, None)

    def _remove(self, number: int) -> None:
        for key, numbers in [*self._groups.items()]:
            self._groups[key] = [other for other in numbers if other != number]
            if not self._groups[key]:
                del self._groups[key]

    async def _evaluate_one(self, request: Subscribe, batch: EvaluationBatch) -> Evaluated | RequestFailed | None:
        """Return the response for one statement; None if it could not be interrupted."""
        evaluate = Evaluate(request.number, request.statement, request.form)
        async with contextlib.aclosing(self._beginnings.evaluate(batch, [evaluate], self._waits)) as responses:
            async for _, response in responses:
                return response
        raise QueriesUnavailable("the statement was not evaluated")

    def _waits(self, request: Evaluate) -> bool:
        return request.number in self._waiting

    def _begin(self, request: Subscribe) -> tuple[Positions, dict[int, tuple[int, int]]]:
        """Take a subscription up, on the thread of the file; return where its changes begin, and what is before."""
        file = self._feed.file
        positions = file.positions()
        spans = {} if request.after is None else file.spans_after(request.after)
        self._groups.setdefault((request.statement, request.form), []).append(request.number)
        return positions, spans

    async def _send_snapshot(self, request: Subscribe, spans: dict[int, tuple[int, int]]) -> bool:
        """Send the rows that the table has; return whether nothing has ended it.

        The table applies records between the steps. A row that changes meanwhile is among the changes, which wait.
        """
        number, file, step = request.number, self._feed.file, _FIRST_OFFSETS
        for partition, (at, end) in spans.items():
            while at < end:
                if number not in self._waiting:
                    return False
                until = min(at + step, end)
                try:
                    stream = await file.run(self._rows_between, partition, at, until)
                    if len(stream) > _MOST_TIMES * _LARGE_BYTES and until > at + 1:
                        step = (until - at + 1) // _MOST_TIMES + 1
                        continue
                    response = await self._evaluate_one(request, EvaluationBatch(file.described, stream))
                except (HeadraceError, duckdb.Error) as cause:
                    response = failure(number, cause)
                if not isinstance(response, Evaluated):
                    reason = response.reason if response else OUTLIVED
                    self._send(Ended(number, reason, outlived=response is None))
                    await self.unsubscribe(number)
                    return False
                if response.rows:
                    self._send(Changes([number], response.rows, {}))
                if response.problem:
                    self._send(Ended(number, response.problem))
                    await self.unsubscribe(number)
                    return False
                at = until
                step = min(step * 4, _MOST_OFFSETS) if len(stream) < _LARGE_BYTES else max(step // 4, 1)
        return True

    def _rows_between(self, partition: int, first: int, end: int) -> bytes:
        return _stream_of(self._feed.file.rows_between(partition, first, end))

    def take_arrived(self) -> _Arrived | None:
        """Return the records of the last transaction, on the thread of the file; None without a subscriber."""
        if not self._groups:
            return None
        groups = [(key, [*numbers]) for key, numbers in self._groups.items()]
        try:
            return _Arrived(groups, EvaluationBatch(self._feed.file.described, _stream_of(self._feed.file.arrived())))
        except Exception:  # noqa: BLE001 boundary: the rows are in the table, and these clients miss them
            return _Arrived(groups, None)

    async def applied(self, arrived: _Arrived, positions: Positions) -> None:
        """Run every statement over the records of a transaction."""
        requests = [Evaluate(at, *key) for at, (key, _) in enumerate(arrived.groups)]
        ended = 0
        ends_at = time.monotonic() + _MOST_SECONDS
        try:
            if arrived.batch is None:
                raise QueriesUnavailable("the changes need more memory than there is: send the statement again")
            evaluating = self._evaluations.evaluate(arrived.batch, requests, lambda request: True)
            async with contextlib.aclosing(evaluating) as responses:
                async for request, response in responses:
                    if time.monotonic() > ends_at:
                        raise QueriesUnavailable(_OTHERS)
                    key, numbers = arrived.groups[request.number]
                    ended = request.number + 1
                    if isinstance(response, Evaluated):
                        await self._push(key, numbers, response, positions)
                    else:
                        await self._end(key, response.reason if response else OUTLIVED, outlived=response is None)
        except HeadraceError as cause:
            for key, _ in arrived.groups[ended:]:
                await self._end(key, cause.description)

    async def _push(self, key: _Group, numbers: list[int], evaluated: Evaluated, positions: Positions) -> None:
        columns = [self._columns.get(number, evaluated.columns) for number in numbers]
        if key[1] == "arrays" and any(known != evaluated.columns for known in columns):
            await self._end(key, "the table has other columns now: send the statement again")
            return
        rows, before = evaluated.rows, {} if evaluated.problem else positions
        if direct := [number for number in numbers if number not in self._waiting]:
            self._send(Changes(direct, rows, before))
        for number in numbers:
            if waiting := self._waiting.get(number):
                waiting.changes.append(Changes([number], rows, before))
                waiting.size += sum(map(len, rows))
                if waiting.size > MOST_BYTES:
                    self._send(Ended(number, _TOO_SLOW))
                    await self.unsubscribe(number)
        if evaluated.problem:
            await self._end(key, evaluated.problem)

    async def _end(self, key: _Group, reason: str, *, outlived: bool = False) -> None:
        for number in await self._feed.file.run(self._groups.pop, key, []):
            self._forget(number)
            self._send(Ended(number, reason, outlived))


def _stream_of(relation: duckdb.DuckDBPyRelation) -> bytes:
    """Return rows as an Arrow stream."""
    reader = relation.to_arrow_reader(_MOST_OFFSETS)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream
