"""The services of an engine process, and which of them serves each message of the parent."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from headrace.errors import StatementRejected
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.kafka import Admin
from headrace.runtime import Clock, Service
from headrace.runtime.memory import give_back_memory
from headrace_queries.engine.database import open_database
from headrace_queries.engine.evaluations import Evaluations
from headrace_queries.engine.filter import Filters, report_misfits
from headrace_queries.engine.pull import Pulls
from headrace_queries.engine.push import Pushes
from headrace_queries.engine.statements import Statements
from headrace_queries.engine.table_feed import TableFeed
from headrace_queries.engine.table_file import TableFile
from headrace_queries.engine_protocol import (
    Ask,
    Cancel,
    Changes,
    Ended,
    Filter,
    Filtered,
    Lookup,
    Messages,
    PushBegun,
    Rebuild,
    Rebuilt,
    RequestFailed,
    Row,
    Rows,
    Slow,
    Statuses,
    Subscribe,
    ToEngine,
    ToParent,
    Unsubscribe,
    encode_message,
)
from headrace_queries.query_sections import QuerySections

_STATUS_SECONDS: Final = 0.5
_WATCH_SECONDS: Final = 0.1


class Engine(Service):
    """Serves the messages of the parent."""

    def __init__(self, config: QuerySections, writer: asyncio.StreamWriter, clock: Clock, *, statements: bool) -> None:
        """Open the database; nothing is read yet.

        Args:
            config: Of the process.
            writer: Of the connection to the parent.
            clock: Of the process.
            statements: Whether it runs statements of callers, over tables of its own. Otherwise it serves all else.

        Raises:
            EnvironmentProblem: The files of the tables are in use by another process.
        """
        super().__init__("engine")
        self._writer = writer
        self._clock = clock
        self._registry = SchemaRegistry(config.schema_registry, clock)
        codecs = Codecs(self._registry, plain_unions=config.schema_registry.avro_unions == "plain")
        admin = Admin(config.kafka)
        connection, paths = open_database(config, "statements" if statements else "tables", lossless=not statements)
        self._feeds = {
            name: TableFeed(
                TableFile(connection.cursor(), name, table, paths[name]), name, table, admin, codecs, self._registry
            )
            for name, table in config.tables.items()
        }
        self._keys = _KeyColumns(self._feeds)
        checks = Statements(connection.cursor())
        latest = [name for name, table in config.tables.items() if table.kind == "latest"]
        self._pulls = Pulls(connection, checks, self._keys, self._send, latest)
        memory = config.sql.memory_bytes
        beginnings = Evaluations("push queries that begin", memory)
        evaluations = {name: Evaluations(f"changes of {name}", memory) for name in self._feeds}
        self._pushes = {
            name: Pushes(feed, beginnings, evaluations[name], self._send) for name, feed in self._feeds.items()
        }
        self._filters = Filters(connection, config.tables, self._feeds, codecs, checks, self._send)
        if not statements:
            report_misfits(config)
        watches = [self._registry.tls] if self._registry.tls else []
        answering = [self._pulls, self._filters, beginnings, *evaluations.values()]
        self.services: Sequence[Service] = [admin.reachability, *watches, *answering, *self._feeds.values(), self]
        """Downstream first."""

    async def run(self) -> None:
        """Send the states of the tables, over and over."""
        while True:
            statuses = [feed.status() for feed in self._feeds.values()]
            self._send(Statuses(statuses))
            await self._clock.sleep(_STATUS_SECONDS)

    async def start(self) -> None:
        await super().start()
        self.keep(lambda: give_back_memory(self._clock), "memory")
        self.keep(self._watch, "slow statements")

    async def serve(self, messages: Messages[ToEngine]) -> None:
        """Serve messages until the parent closes the connection."""
        async for message in messages:
            if isinstance(message, Ask):
                self._pulls.ask(message)
            elif isinstance(message, Lookup):
                self._pulls.look_up(message)
            elif isinstance(message, Filter):
                self._filters.filter(message)
            elif isinstance(message, Cancel):
                self._pulls.cancel(message.number)
            elif isinstance(message, Rebuild):
                self.spawn(self._rebuild(message), f"rebuild {message.table}")
            elif isinstance(message, Subscribe):
                pushes = self._pushes[message.table]
                self.spawn(pushes.subscribe(message), f"push query {message.number}")
            elif isinstance(message, Unsubscribe):
                ending = self._pushes[message.table].unsubscribe(message.number)
                self.spawn(ending, f"end of push query {message.number}")

    async def close(self) -> None:
        """Close connections that are left."""
        await self._registry.close()
        self._writer.close()

    async def _rebuild(self, message: Rebuild) -> None:
        try:
            await self._feeds[message.table].rebuild()
        except Exception as cause:  # noqa: BLE001 boundary: the caller gets it
            self._send(
                RequestFailed(message.number, "unavailable", f"table {message.table} is not built again: {cause}")
            )
        else:
            self._send(Rebuilt(message.number))

    async def _watch(self) -> None:
        """Interrupt what takes too long, and tell the parent what takes a while."""
        reported = Slow([], [])
        while True:
            await self._clock.sleep(_WATCH_SECONDS)
            self._filters.interrupt_late()
            slow = Slow(self._pulls.slow(), self._pulls.outlived())
            if slow != reported:
                self._send(slow)
                reported = slow

    def _send(self, message: ToParent) -> None:
        if self._writer.is_closing():
            return
        try:
            self._writer.write(encode_message(message))
        except StatementRejected as cause:
            for number in message.numbers if isinstance(message, Changes) else ():
                self._send(Ended(number, cause.description))
            if isinstance(message, Rows | Row | Filtered | PushBegun):
                self._send(RequestFailed(message.number, "invalid", cause.description))


class _KeyColumns(Mapping[str, str]):
    """The key column of each table; empty while the table is not available."""

    def __init__(self, feeds: Mapping[str, TableFeed]) -> None:
        self._feeds = feeds

    def __getitem__(self, name: str) -> str:
        return self._feeds[name].key_column

    def __iter__(self) -> Iterator[str]:
        return iter(self._feeds)

    def __len__(self) -> int:
        return len(self._feeds)
