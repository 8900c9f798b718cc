"""The engine of tables as this process sees it: its start, its requests, its end, and what ends it."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import pickle
import shutil
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Final

from headrace.config.model import HeadraceConfig
from headrace.errors import Forbidden, HeadraceError, NotFound, QueriesUnavailable, StatementRejected, TooManyRequests
from headrace.extras import require
from headrace.queries.pipeline_example import SourceTopic
from headrace.queries.protocol import (
    Ask,
    Cancel,
    Changes,
    Ended,
    EngineSetup,
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
    ToEngine,
    ToParent,
    Unsubscribe,
    decode_to_parent,
    frame_of,
    read_frame,
)
from headrace.queries.push_query import PushQuery
from headrace.queries.push_statement import PushStatement
from headrace.queries.standing import StandingQuery, sources_of
from headrace.records import RecordBatch
from headrace.runtime import ChildProcess, Clock, Deadline, Readiness, RestartPauses, Service
from headrace.runtime.memory import memory_bytes

log = logging.getLogger(__name__)

_MOST_STATEMENTS: Final = 32
_MOST_OF_CALLER: Final = 3
"""Of the four that run at a time, so that one caller cannot stop the others."""
_MOST_LOOKUPS: Final = 1_000
_LOOKUP_SECONDS: Final = 10.0
_MOST_PUSHES: Final = 1_000
_PUSH_SECONDS: Final = 30.0
_FILTER_SECONDS: Final = 30.0
_GRACE_SECONDS: Final = 5.0
"""An engine that has not responded this long after a request's time limit is ended."""
_WATCH_SECONDS: Final = 0.25
_EXTRA_BYTES: Final = 256 << 20
_STEADY_SECONDS: Final = 10.0
_LONGEST_PAUSE_SECONDS: Final = 2.0
"""Short, because statements end the engine more often than its files do."""
_ENDINGS: Final = 2
"""After this number of ends of the engine at which a statement was at work, the statement is rejected."""
_ENDED: Final = "the process that runs statements has ended meanwhile, and is restarted: send the request again"
_RESTARTING: Final = "the process that runs statements is starting: send the request again"
_TABLE_METRICS: Final = {
    "headrace_table_rows": "rows",
    "headrace_table_bytes": "bytes",
    "headrace_table_lag": "lag",
    "headrace_table_age_seconds": "age_seconds",
    "headrace_table_corrupt_total": "corrupt",
}
"""Metrics of a table, and the field of its state."""
_numbers = itertools.count(1)
_ERRORS: Final[Mapping[str, type[HeadraceError]]] = {
    "invalid": StatementRejected,
    "timeout": StatementRejected,
    "memory": StatementRejected,
    "forbidden": Forbidden,
    "unavailable": QueriesUnavailable,
}


def require_duckdb() -> None:
    """Check that the libraries of tables are here, without importing them.

    Raises:
        EnvironmentProblem: One is not.
    """
    require("queries", "SQL over topics and tables")


@dataclasses.dataclass
class _EngineProcess:
    """One process of the engine."""

    child: ChildProcess
    writer: asyncio.StreamWriter
    end_reason: str = ""
    """Why it was ended by this process; empty if it ended by itself."""


class QueryEngine(Service):
    """Runs the engine process, and restarts it from its files when it ends."""

    def __init__(self, config: HeadraceConfig, clock: Clock) -> None:
        """Prepare; the process is started by `start`.

        Raises:
            EnvironmentProblem: A library is missing.
        """
        require_duckdb()
        super().__init__("tables")
        # Settings.
        self._config = config
        self._clock = clock
        # The present process of the engine.
        self._process: _EngineProcess | None = None
        self._tables: dict[str, TableStatus] = {}
        self._problem = "the engine has not started yet"
        # In flight.
        self._responses: dict[int, asyncio.Future[ToParent]] = {}
        self._statements: dict[int, str] = {}
        self._pushes: dict[int, PushQuery] = {}
        self._slow: list[int] = []
        self._in_flight: Counter[str] = Counter()
        """Statements by caller, without push queries."""
        # Since the start.
        self._ended_with: Counter[str] = Counter()
        """Statements that were at work for a while when the engine ended."""
        self._counts: Counter[str] = Counter()
        """Responses to statements by outcome."""

    async def start(self) -> None:
        for metric, field in _TABLE_METRICS.items():
            for name in self._config.tables:
                self.publish(metric, self._reader(name, field), table=name)
        for name in self._config.tables:
            self.publish("headrace_gap_offsets_total", self._reader(name, "gap_offsets"), kind="table", consumer=name)
        for outcome in ("ok", "rejected", "unavailable"):
            count = functools.partial(self._counts.__getitem__, outcome)
            self.publish("headrace_query_requests_total", count, outcome=outcome)
        self.publish("headrace_push_queries", lambda: len(self._pushes))
        self.publish("headrace_table_disk_used_ratio", self._disk_used)
        await super().start()

    def _disk_used(self) -> float:
        folder = self._config.state_dir.absolute()
        present = next(path for path in (folder, *folder.parents) if path.exists())
        usage = shutil.disk_usage(present)
        return 1 - usage.free / usage.total

    def _reader(self, table: str, field: str) -> Callable[[], float]:
        return lambda: float(getattr(self._tables[table], field)) if table in self._tables else 0.0

    def readiness_by_name(self) -> dict[str, Readiness]:
        found = {self.name: Readiness(not self._problem, self._problem)}
        for name in self._config.tables:
            status = self._tables.get(name)
            reason = f"{status.state}: {status.reason}" if status and status.state != "live" else ""
            found[f"table {name}"] = Readiness(status is not None and not reason, reason or self._problem)
        return found

    @property
    def tables(self) -> Mapping[str, TableStatus]:
        """The states of the tables by name; those of the file without a state are starting."""
        return self._tables

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

    @property
    def sources(self) -> Mapping[str, SourceTopic]:
        """What each table is kept from, by its name in lower case."""
        return sources_of(self._config)

    async def ask(
        self,
        sql: str,
        params: Sequence[Any] | Mapping[str, Any],
        readable: Collection[str],
        form: Form,
        max_rows: int,
        timeout_seconds: float,
        owner: str = "",
    ) -> Rows:
        """Run a statement and return its rows; `owner` is the caller's name if authentication is on.

        Raises:
            StatementRejected: It is not valid, not run here, or exceeds a limit.
            Forbidden: The caller may not read one of its tables.
            TooManyRequests: Too many statements are in flight.
            QueriesUnavailable: The engine is restarting, or a table is not available now.
        """
        if self._in_flight.total() >= _MOST_STATEMENTS:
            raise TooManyRequests(f"{_MOST_STATEMENTS} statements are in flight; send this again after a pause")
        if owner and self._in_flight[owner] >= _MOST_OF_CALLER:
            raise TooManyRequests(f"{_MOST_OF_CALLER} statements of this caller are in flight; wait for one to end")
        self._check_endings(sql)
        given = dict(params) if isinstance(params, Mapping) else list(params)
        number = self._next()
        self._statements[number] = sql
        self._in_flight[owner] += 1
        try:
            request = Ask(number, sql, given, [*readable], form, max_rows, timeout_seconds)
            rows: Rows = await self._request(request, timeout_seconds)
        except OverflowError:
            raise StatementRejected(
                "a number in params has more than 64 bits: send it as text, and write ?::HUGEINT in the statement"
            ) from None
        except HeadraceError as error:
            self._counts["unavailable" if isinstance(error, QueriesUnavailable) else "rejected"] += 1
            raise
        finally:
            del self._statements[number]
            self._in_flight -= Counter({owner: 1})
        self._counts["ok"] += 1
        return rows

    async def look_up(self, table: str, key: str) -> bytes | None:
        """Return the row of a key as a JSON object, or None; raises as `ask`."""
        if len(self._responses) >= _MOST_LOOKUPS:
            raise TooManyRequests(f"{_MOST_LOOKUPS} requests are in flight; send this again after a pause")
        status = self._tables.get(table)
        if status is not None and status.kind == "log":
            raise StatementRejected(f"table {table} is a log, which has no row per key: send a SELECT to POST /query")
        found: Row = await self._request(Lookup(self._next(), table, key), _LOOKUP_SECONDS)
        return found.row

    @contextlib.asynccontextmanager
    async def push(self, statement: PushStatement, form: Form, after: Positions | None) -> AsyncIterator[PushQuery]:
        """Run a push query until the end of the context; raises as `ask`.

        Args:
            statement: Its table is one of this process, which the caller may read.
            after: First give the rows of records from these positions on. None: only changes.
        """
        if len(self._pushes) >= _MOST_PUSHES:
            raise TooManyRequests(f"{_MOST_PUSHES} push queries run; end some, or send this to another process")
        text = statement.over(statement.table)
        self._check_endings(text)
        number = self._next()
        table = next(name for name in self._config.tables if name.lower() == statement.table.lower())
        push = self._pushes[number] = PushQuery(number, table, [], after)
        self._statements[number] = text
        request = Subscribe(number, table, statement._replace(limit=None), form, after)
        try:
            subscribed: PushBegun = await self._request(request, _PUSH_SECONDS)
            push.columns = subscribed.columns
            yield push
        finally:
            del self._pushes[number], self._statements[number]
            with contextlib.suppress(QueriesUnavailable):
                self._send(Unsubscribe(number, table))

    async def filter(self, query: StandingQuery, records: RecordBatch) -> Filtered:
        """Evaluate a standing query over records of its table's topic.

        Raises:
            StatementRejected: It cannot be evaluated for these records. Without one of them it may be.
            QueriesUnavailable: The engine is restarting, or the statement does not fit the columns of the table; the
                metadata have `interrupted` if the engine ended meanwhile.
        """
        request = Filter(
            self._next(),
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
        found: Filtered = await self._request(request, _FILTER_SECONDS)
        return found

    async def rebuild(self, table: str) -> None:
        """Build a table again from its topic; raises as `ask`."""
        await self._request(Rebuild(self._next(), table), _LOOKUP_SECONDS)

    def _check_endings(self, text: str) -> None:
        if self._ended_with[text] >= _ENDINGS:
            raise StatementRejected("this statement has ended the engine before: it needs too much memory; change it")

    def _next(self) -> int:
        return next(_numbers)

    async def _request(self, message: Ask | Lookup | Rebuild | Subscribe | Filter, limit_seconds: float) -> Any:
        if self._process is None:
            raise QueriesUnavailable(_RESTARTING)
        response: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._responses[message.number] = response
        try:
            self._send(message)
            async with asyncio.timeout(limit_seconds + _GRACE_SECONDS):
                result = await response
        except TimeoutError:
            log.error("the engine of tables did not respond within %g s; restarting it", limit_seconds + _GRACE_SECONDS)
            self._end("it did not respond")
            text = "the engine did not respond, and is restarted: send the request again"
            raise QueriesUnavailable(text, interrupted=True) from None
        except asyncio.CancelledError:
            if isinstance(message, Ask):
                with contextlib.suppress(QueriesUnavailable):
                    self._send(Cancel(message.number))
            raise
        finally:
            self._responses.pop(message.number, None)
        if isinstance(result, RequestFailed):
            raise _ERRORS[result.kind](result.reason)
        return result

    def _send(self, message: ToEngine) -> None:
        if self._process is None or self._process.writer.is_closing():
            raise QueriesUnavailable(_RESTARTING)
        self._process.writer.write(frame_of(message))

    async def run(self) -> None:
        pauses = RestartPauses(self._clock, 0.1, _LONGEST_PAUSE_SECONDS, _STEADY_SECONDS)
        while True:
            pauses.started()
            reason = await self._live()
            if pauses.steady:
                pauses.failures = 0
            pause = pauses.failed()
            self._problem = f"the engine ended ({reason}); will restart in {pause:.1f} s"
            log.error("tables: %s", self._problem)
            await self._clock.sleep(pause)

    async def _live(self) -> str:
        """Run one engine process until it ends, and return why."""
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        own_end, engine_end = socket.socketpair()
        try:
            child = await ChildProcess.start(
                self,
                "engine of tables",
                [sys.executable, "-P", "-m", "headrace.queries.engine", str(engine_end.fileno())],
                ended.set_result,
                pass_fds=(engine_end.fileno(),),
            )
        finally:
            engine_end.close()
        reader, writer = await asyncio.open_unix_connection(sock=own_end)
        process = self._process = _EngineProcess(child, writer)
        watch = self.spawn(self._watch_memory(process), "memory of the engine")
        try:
            self._send(EngineSetup(pickle.dumps(self._config)))
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    self._take(decode_to_parent(await read_frame(reader)))
            self._process = None
            self._fail_all()
            await child.stop(Deadline(self._clock, _GRACE_SECONDS))  # it may still write why it ends
            code = await ended
            return process.end_reason or (f"signal {-code}" if code < 0 else f"exit code {code}; see the log above")
        finally:
            watch.cancel()
            writer.close()
            self._process = None
            self._tables = {}
            self._fail_all()

    def _take(self, message: ToParent) -> None:
        if isinstance(message, Statuses):
            self._tables = {table.name: table for table in message.tables}
            self._problem = ""
        elif isinstance(message, Slow):
            self._slow = message.numbers
        elif isinstance(message, Changes):
            for number in message.numbers:
                if push := self._pushes.get(number):
                    push.offer(message.rows, message.positions)
        elif isinstance(message, Ended):
            if push := self._pushes.get(message.number):
                push.end(StatementRejected(message.reason))
        elif (response := self._responses.get(message.number)) and not response.done():
            response.set_result(message)

    async def _watch_memory(self, process: _EngineProcess) -> None:
        most_bytes = 2 * self._config.sql.memory_bytes + _EXTRA_BYTES
        while True:
            await self._clock.sleep(_WATCH_SECONDS)
            if (size := memory_bytes(process.child.pid)) > most_bytes:
                self._end(f"it used {size >> 20} MiB, and {most_bytes >> 20} are allowed (sql.memory_bytes)")

    def _end(self, reason: str) -> None:
        if self._process:
            self._process.end_reason = reason
            self._process.child.kill()

    def _fail_all(self) -> None:
        self._ended_with.update({self._statements[number] for number in self._slow if number in self._statements})
        self._slow = []
        if len(self._ended_with) > _MOST_LOOKUPS:
            self._ended_with.clear()
        for push in self._pushes.values():
            push.end(QueriesUnavailable(_ENDED))
        for response in self._responses.values():
            if not response.done():
                response.set_exception(QueriesUnavailable(_ENDED, interrupted=True))

    async def stop(self) -> None:
        process = self._process
        if process:
            process.writer.close()  # the engine ends with its connection
        await super().stop()
        if process and process.child.running:
            process.child.kill()
