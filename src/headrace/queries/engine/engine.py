"""The services of the engine process, and which of them serves each message of the parent."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from headrace.config.model import HeadraceConfig
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.kafka import Admin
from headrace.queries.engine.database import open_database
from headrace.queries.engine.filter import Filters, report_misfits
from headrace.queries.engine.pull import Pulls
from headrace.queries.engine.push import Pushes
from headrace.queries.engine.statements import Statements
from headrace.queries.engine.table_feed import TableFeed
from headrace.queries.engine.table_file import TableFile
from headrace.queries.protocol import (
    Ask,
    Cancel,
    Filter,
    Lookup,
    Rebuild,
    Rebuilt,
    RequestFailed,
    Slow,
    Statuses,
    Subscribe,
    ToParent,
    Unsubscribe,
    decode_to_engine,
    frame_of,
    read_frame,
)
from headrace.runtime import Clock, Service
from headrace.runtime.memory import give_back_memory

_STATUS_SECONDS: Final = 0.5
_WATCH_SECONDS: Final = 0.1


class Engine(Service):
    """Serves the messages of the parent."""

    def __init__(self, config: HeadraceConfig, writer: asyncio.StreamWriter, clock: Clock) -> None:
        """Open the database; nothing is read yet.

        Raises:
            EnvironmentProblem: The files of the tables are in use by another process.
        """
        super().__init__("engine")
        self._writer = writer
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._registry = SchemaRegistry(config.schema_registry, clock)
        codecs = Codecs(self._registry, plain_unions=config.schema_registry.avro_unions == "plain")
        admin = Admin(config.kafka)
        connection, paths = open_database(config)
        self._feeds = {
            name: TableFeed(
                TableFile(connection.cursor(), name, table, paths[name]), name, table, admin, codecs, self._registry
            )
            for name, table in config.tables.items()
        }
        self._keys = _KeyColumns(self._feeds)
        statements = Statements(connection.cursor())
        self._pulls = Pulls(connection, statements, self._keys, self._send)
        self._pushes = {name: Pushes(feed, statements, self._post) for name, feed in self._feeds.items()}
        self._filters = Filters(connection, config.tables, self._feeds, codecs, statements, self._send)
        report_misfits(config)
        watches = [self._registry.tls] if self._registry.tls else []
        answering = [self._pulls, self._filters]
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

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve messages until the parent closes the connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                message = decode_to_engine(await read_frame(reader))
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
                    self.spawn(pushes.subscribe(message, self._keys), f"push query {message.number}")
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
        reported: list[int] = []
        while True:
            await self._clock.sleep(_WATCH_SECONDS)
            self._filters.interrupt_late()
            slow = [number for pushes in self._pushes.values() for number in pushes.watch()] + self._pulls.slow()
            if slow != reported:
                self._send(Slow(slow))
                reported = slow

    def _post(self, message: ToParent) -> None:
        """Send a message from any thread."""
        self._loop.call_soon_threadsafe(self._send, message)

    def _send(self, message: ToParent) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame_of(message))


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
