"""The tables as this process sees them: two engine processes, one of them for statements of callers."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Final

from headrace.errors import HeadraceError, NotFound, QueriesUnavailable, StatementRejected, TooManyRequests
from headrace.extras import require
from headrace.records import RecordBatch
from headrace.runtime import Clock, Readiness, Service
from headrace_queries.callers import Caller, CallerEnds
from headrace_queries.engine_child import GRACE_SECONDS, EngineChild
from headrace_queries.engine_protocol import (
    Ask,
    Changes,
    Ended,
    Filter,
    Filtered,
    Form,
    Lookup,
    Positions,
    PushBegun,
    Rebuild,
    RequestFailed,
    Row,
    Rows,
    Slow,
    Statuses,
    Subscribe,
    TableStatus,
    ToParent,
    Unsubscribe,
)
from headrace_queries.push_query import PushQuery
from headrace_queries.push_statement import PushStatement
from headrace_queries.query_sections import QuerySections
from headrace_queries.standing import StandingQuery

log = logging.getLogger(__name__)

_MOST_STATEMENTS: Final = 32
_MOST_OF_CALLER: Final = 3
"""Of the four that run at a time, so that one caller cannot stop the others."""
_MOST_LOOKUPS: Final = 1_000
_LOOKUP_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.1
_MOST_PUSHES: Final = 1_000
_PUSH_SECONDS: Final = 30.0
_FILTER_SECONDS: Final = 30.0
_UNSETTLED: Final = ("starting", "catching up")
_ENDED: Final = "the process that keeps the tables has ended meanwhile, and is restarted: send the request again"


def require_duckdb() -> None:
    """Check that the libraries of tables are here, without importing them.

    Raises:
        EnvironmentProblem: One is not.
    """
    require("queries", "SQL over topics and tables")


@dataclasses.dataclass
class _PushCaller:
    """A push query, and who sends it."""

    query: PushQuery
    caller: Caller


class QueryEngine(Service):
    """Runs two engines: one keeps the tables, and the other one runs statements of callers over tables of its own."""

    def __init__(self, config: QuerySections, clock: Clock) -> None:
        """Prepare; the processes are started by `start`.

        Raises:
            EnvironmentProblem: A library is missing.
        """
        require_duckdb()
        super().__init__("tables")
        self._config = config
        self._clock = clock
        make = functools.partial(EngineChild, config, clock)
        self._keeper = make(statements=False, on_message=self._take, on_end=self._end_pushes)
        """Tables, rows by key, push queries and standing queries."""
        self._runner = make(statements=True, on_message=self._take_of_runner, on_end=self._runner_ended)
        """Statements."""
        for child in (self._keeper, self._runner):
            child.on_death = lambda child: self.die(child.death or RuntimeError(child.name))
        self._runner_runs = False
        self._runner_settled = False
        """Whether its tables have been up to date once."""
        # In flight.
        self._statements: dict[int, Caller] = {}
        self._pushes: dict[int, _PushCaller] = {}
        self._slow: list[int] = []
        """Statements that have been at work for a while."""
        self._in_flight: Counter[str] = Counter()
        """Statements by owner."""
        # Since the start.
        self._ends = CallerEnds(clock)
        self._counts: Counter[str] = Counter()
        """Responses to statements by outcome."""

    async def start(self) -> None:
        for name in self._config.tables:
            self.publish("headrace_table_lag", self._reader(name, "lag"), table=name)
            for reason, field in (("corrupt", "corrupt"), ("gap", "gap_offsets")):
                labels = {"kind": "table", "consumer": name, "reason": reason}
                self.publish("headrace_dropped_records_total", self._reader(name, field), **labels)
        for outcome in ("ok", "rejected", "unavailable"):
            count = functools.partial(self._counts.__getitem__, outcome)
            self.publish("headrace_query_requests_total", count, outcome=outcome)
        self.publish("headrace_table_disk_used_ratio", self._disk_used)
        await self._keeper.start()

    def _disk_used(self) -> float:
        folder = self._config.state_dir.absolute()
        present = next(path for path in (folder, *folder.parents) if path.exists())
        usage = shutil.disk_usage(present)
        return 1 - usage.free / usage.total

    def _reader(self, table: str, field: str) -> Callable[[], float]:
        return lambda: float(getattr(self.tables[table], field)) if table in self.tables else 0.0

    def readiness_by_name(self) -> dict[str, Readiness]:
        problem = self._keeper.problem
        found = {self.name: Readiness(not problem, problem)}
        for name in self._config.tables:
            status = self.tables.get(name)
            reason = f"{status.state}: {status.reason}" if status and status.state != "live" else ""
            found[f"table {name}"] = Readiness(status is not None and not reason, reason or problem)
        # Not while it restarts later: a caller could end it, and rows by key are answered meanwhile.
        waits = self._runner.problem or "catching up: statements have tables of their own, which are read once more"
        found["statements"] = Readiness(self._runner_settled, "" if self._runner_settled else waits)
        return found

    @property
    def tables(self) -> Mapping[str, TableStatus]:
        """The states of the tables by name; those of the file without a state are starting."""
        return self._keeper.tables

    def topic_of(self, table: str) -> str:
        """Return the topic of a table.

        Raises:
            NotFound: The file has no such table.
        """
        if table not in self._config.tables:
            known = ", ".join(self._config.tables) or "none"
            raise NotFound(f"table {table[:60]!r} does not exist; this process has {known}")
        return self._config.tables[table].topic

    @property
    def topics(self) -> Mapping[str, str]:
        """The topic of each table."""
        return {name: table.topic for name, table in self._config.tables.items()}

    def ask(
        self,
        sql: str,
        params: Sequence[Any] | Mapping[str, Any],
        readable: Collection[str],
        form: Form,
        max_rows: int,
        timeout_seconds: float,
        caller: Caller,
    ) -> asyncio.Future[Rows]:
        """Begin a statement and return what gets its rows or error; cancelling that interrupts the statement.

        Raises:
            StatementRejected: It is not valid, not run here, or exceeds a limit.
            Forbidden: The caller may not read one of its tables.
            TooManyRequests: Too many statements are in flight, or one of this caller has ended the engine.
            QueriesUnavailable: The engine is restarting, or a table is not available now.
        """
        self._ends.check(caller)
        if self._in_flight.total() >= _MOST_STATEMENTS:
            raise TooManyRequests(f"{_MOST_STATEMENTS} statements are in flight; send this again after a pause")
        if caller.owner and self._in_flight[caller.owner] >= _MOST_OF_CALLER:
            raise TooManyRequests(f"{_MOST_OF_CALLER} statements of this caller are in flight; wait for one to end")
        given = dict(params) if isinstance(params, Mapping) else list(params)
        number = self._runner.next_number()
        request = Ask(number, sql, given, [*readable], form, max_rows, timeout_seconds)
        try:
            # The engine itself says which statements do not end, so the time limit here is only the last resort.
            response = self._runner.begin(request, timeout_seconds + GRACE_SECONDS)
        except OverflowError:
            raise StatementRejected(
                "a number in params has more than 64 bits: send it as text, and write ?::HUGEINT in the statement"
            ) from None
        except HeadraceError as error:
            self._count(error)
            raise
        self._statements[number] = caller
        self._in_flight[caller.owner] += 1
        response.add_done_callback(functools.partial(self._responded, number))
        return response

    def _responded(self, number: int, response: asyncio.Future[Rows]) -> None:
        if not response.cancelled():  # else the caller has left, and the engine still interrupts the statement
            self._release(number)
            self._count(response.exception())

    def _count(self, error: BaseException | None) -> None:
        failed = "unavailable" if isinstance(error, QueriesUnavailable) else "rejected"
        self._counts[failed if error else "ok"] += 1

    def _release(self, number: int) -> None:
        if caller := self._statements.pop(number, None):
            self._in_flight -= Counter({caller.owner: 1})

    def look_up(self, table: str, key: str) -> asyncio.Future[Row]:
        """Return what gets the row of a key, or its error; raises as `ask`."""
        if self._keeper.in_flight >= _MOST_LOOKUPS:
            raise TooManyRequests(f"{_MOST_LOOKUPS} requests are in flight; send this again after a pause")
        status = self.tables.get(table)
        if status is not None and status.kind == "log":
            raise StatementRejected(f"table {table} is a log, which has no row per key: send a SELECT to POST /query")
        return self._keeper.begin(Lookup(self._keeper.next_number(), table, key), _LOOKUP_SECONDS)

    @contextlib.asynccontextmanager
    async def push(
        self, statement: PushStatement, form: Form, after: Positions | None, caller: Caller
    ) -> AsyncIterator[PushQuery]:
        """Run a push query until the end of the context; raises as `ask`.

        Args:
            statement: Its table is one of this process, which the caller may read.
            form: Of a row.
            after: First give the rows of records from these positions on. None: only changes.
            caller: Who sends it.
        """
        self._ends.check(caller)
        if len(self._pushes) >= _MOST_PUSHES:
            raise TooManyRequests(f"{_MOST_PUSHES} push queries run; end some, or send this to another process")
        number = self._keeper.next_number()
        table = next(name for name in self._config.tables if name.lower() == statement.table.lower())
        push = PushQuery(number, table, [], after)
        self._pushes[number] = _PushCaller(push, caller)
        request = Subscribe(number, table, statement._replace(limit=None), form, after)
        try:
            subscribed: PushBegun = await self._keeper.begin(request, _PUSH_SECONDS)
            push.columns = subscribed.columns
            yield push
        finally:
            del self._pushes[number]
            with contextlib.suppress(QueriesUnavailable):
                self._keeper.send(Unsubscribe(number, table))

    async def filter(self, query: StandingQuery, records: RecordBatch) -> Filtered:
        """Evaluate a standing query over records of its table's topic.

        Raises:
            StatementRejected: It cannot be evaluated for these records. Without one of them it may be.
            QueriesUnavailable: The engine is restarting, or the statement does not fit the columns of the table; the
                metadata have `interrupted` if the engine ended meanwhile.
        """
        request = Filter(
            self._keeper.next_number(),
            query.table,
            query.statement,
            query.form,
            records.topic_partition.partition,
            records.offsets,
            records.timestamps_ms,
            records.keys,
            records.values,
            records.headers,
        )
        found: Filtered = await self._keeper.begin(request, _FILTER_SECONDS)
        return found

    async def rebuild(self, table: str) -> None:
        """Build a table again from its topic, in both engines; raises as `ask`."""
        await self._keeper.begin(Rebuild(self._keeper.next_number(), table), _LOOKUP_SECONDS)
        if not self._runner_runs:  # it has not started since the start of this process
            for suffix in (".duckdb", ".duckdb.wal"):
                (self._config.state_dir / "statements" / f"{table}{suffix}").unlink(missing_ok=True)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOKUP_SECONDS):
                while self._runner.problem:
                    await self._clock.sleep(_LOOK_SECONDS)
        await self._runner.begin(Rebuild(self._runner.next_number(), table), _LOOKUP_SECONDS)

    def _take(self, message: ToParent) -> None:
        """Take a message of the engine that keeps the tables."""
        if isinstance(message, Statuses):
            if not self._runner_runs and not any(table.state in _UNSETTLED for table in message.tables):
                # Not at once: both would read the same topics, and rows by key would wait for statements.
                self._runner_runs = True
                self.spawn(self._runner.start(), "engine of statements")
        elif isinstance(message, Changes):
            for number in message.numbers:
                if push := self._pushes.get(number):
                    push.query.offer(message.rows, message.positions)
        elif isinstance(message, Ended) and (push := self._pushes.get(message.number)):
            if message.outlived:
                self._count_end(push.caller, "a push query could not be interrupted")
            push.query.end(StatementRejected(message.reason))

    def _take_of_runner(self, message: ToParent) -> None:
        """Take a message of the engine that runs statements."""
        if isinstance(message, Statuses) and not self._runner_settled:
            self._runner_settled = not any(table.state in _UNSETTLED for table in message.tables)
        elif isinstance(message, Slow) and not self._runner.is_ending:
            self._slow = message.numbers
            if message.outlived:
                self._slow = []  # it is known who ends the engine
                for caller in self._callers(message.outlived):
                    self._count_end(caller, "a statement could not be interrupted")
                self._runner.end("a statement could not be interrupted")
        elif isinstance(message, Rows | RequestFailed):
            self._release(message.number)  # its caller has left

    def _runner_ended(self) -> None:
        """Count the end against the caller of the statements that were at work, if it was the only one."""
        callers = self._callers(self._slow)
        if len(callers) == 1:
            self._count_end(callers[0], "the engine ended while a statement was at work")
        self._slow = []
        for number in list(self._statements):
            self._release(number)

    def _callers(self, numbers: Collection[int]) -> list[Caller]:
        """Return the callers of statements, each once."""
        found = {
            self._statements[number].name: self._statements[number] for number in numbers if number in self._statements
        }
        return [*found.values()]

    def _count_end(self, caller: Caller, what: str) -> None:
        seconds = self._ends.count(caller)
        log.warning("%s: rejecting statements of %s for %g s", what, caller.name or "unknown callers", seconds)

    def _end_pushes(self) -> None:
        for push in self._pushes.values():
            push.query.end(QueriesUnavailable(_ENDED))

    async def stop(self) -> None:
        await self._runner.stop()
        await self._keeper.stop()
        await super().stop()
