"""Where `headrace sql` gets rows: slices of topics that it reads itself, or the tables of a running Headrace."""

import asyncio
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, Protocol

import click
import msgspec

from headrace.cli.api import Api
from headrace.cli.cluster_options import ClusterSettings
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.kafka import Admin
from headrace.kafka.timestamps import milliseconds
from headrace.runs.selection import Span, Window
from headrace.runtime import SystemClock
from headrace_queries.engine_process import require_duckdb
from headrace_queries.routes import ARROW, QueryEndpoints


class SqlRows(NamedTuple):
    """The result of a statement."""

    names: list[str]
    rows: Iterator[bytes]
    """JSON objects, their fields in the order of the columns."""


class SqlSource(Protocol):
    """What answers statements."""

    known: dict[str, list[tuple[str, str]]]
    """Tables and columns that responses have named so far."""

    def rows(self, sql: str) -> SqlRows:
        """Run a statement.

        Raises:
            HeadraceError: It is rejected, or a server does not respond.
        """

    def write_parquet(self, sql: str, file: IO[bytes]) -> None:
        """Run a statement and write its rows as a Parquet file; raises as `rows`."""

    def tables(self) -> dict[str, list[tuple[str, str]]]:
        """Return the tables, and of each the known columns with their types; raises as `rows`."""

    def columns(self, table: str) -> list[tuple[str, str]]:
        """Return the columns of a table with their types; raises as `rows`."""


class SliceOptions(NamedTuple):
    """Which records of each topic are read."""

    span: Span
    most: int
    key_format: str | None
    value_format: str | None


class TopicSlices:
    """Reads the topics of each statement again."""

    def __init__(self, cluster: ClusterSettings, options: SliceOptions) -> None:
        """Prepare without connecting.

        Raises:
            EnvironmentProblem: A library is missing.
        """
        require_duckdb()
        self._cluster = cluster
        self._options = options
        self.known: dict[str, list[tuple[str, str]]] = {}

    def rows(self, sql: str) -> SqlRows:
        slices = asyncio.run(self._read(sql))
        return SqlRows(*slices.rows(sql))

    def write_parquet(self, sql: str, file: IO[bytes]) -> None:
        asyncio.run(self._read(sql)).write_parquet(sql, file)

    def tables(self) -> dict[str, list[tuple[str, str]]]:
        topics = asyncio.run(Admin(self._cluster.kafka).list_topics())
        self.known = {topic.name: self.known.get(topic.name, []) for topic in topics}
        return self.known

    def columns(self, table: str) -> list[tuple[str, str]]:
        asyncio.run(self._read('SELECT * FROM "{}"'.format(table.replace('"', '""'))))
        return next(columns for name, columns in self.known.items() if name.lower() == table.lower())

    async def _read(self, sql: str) -> Any:
        """Read a slice of each topic that a statement names."""
        from headrace_queries.slice import SliceReader, SliceSpec, newest

        admin = Admin(self._cluster.kafka)
        settings = self._cluster.registry
        registry = SchemaRegistry(settings, SystemClock())
        slices = SliceReader(Codecs(registry, plain_unions=settings.avro_unions == "plain"), registry)
        span = self._options.span
        try:
            for topic in slices.tables_of(sql, [topic.name for topic in await admin.list_topics()]):
                window = await Window.resolve(admin, topic, span)
                starts = newest(window.starts, window.ends, self._options.most)
                if window.total > self._options.most:
                    text = f"{topic}: reading the newest {self._options.most} of {window.total} offsets"
                    click.echo(f"{text}; --last sets how many", err=True)
                spec = SliceSpec(
                    topic,
                    starts,
                    window.ends,
                    milliseconds(span.since) if span.since else None,
                    milliseconds(span.until) if span.until else None,
                    self._options.key_format,
                    self._options.value_format,
                )
                remarks = await slices.add(self._cluster.kafka, spec)
                for remark in remarks:
                    click.echo(remark, err=True)
        finally:
            await registry.close()
        self.known |= slices.columns
        return slices


class ServerTables:
    """Asks the tables of a running Headrace."""

    def __init__(self, api: Api, timeout_seconds: float) -> None:
        self.known: dict[str, list[tuple[str, str]]] = {}
        self._api = api
        self._timeout_seconds = timeout_seconds
        api.limit_seconds = max(api.limit_seconds, 2 * timeout_seconds)

    def rows(self, sql: str) -> SqlRows:
        body = msgspec.json.decode(self._fetch(sql, "application/json"), type=_Rows)
        if body.more:
            click.echo("the result has more rows: the server returns at most 10,000, or 16 MiB", err=True)
        return SqlRows([column["name"] for column in body.columns], map(bytes, body.rows))

    def write_parquet(self, sql: str, file: IO[bytes]) -> None:
        require_duckdb()
        from headrace_queries.slice import arrow_to_parquet

        arrow_to_parquet(self._fetch(sql, ARROW), file)

    def _fetch(self, sql: str, media_type: str) -> bytes:
        request = {"sql": sql, "timeout_seconds": self._timeout_seconds}
        return self._api.fetch(QueryEndpoints.query, request, media_type)

    def tables(self) -> dict[str, list[tuple[str, str]]]:
        self.known = {table["name"]: table["columns"] for table in self._api.call(QueryEndpoints.tables)["tables"]}
        return self.known

    def columns(self, table: str) -> list[tuple[str, str]]:
        return [(name, kind) for name, kind in self._api.call(QueryEndpoints.table, name=table)["columns"]]


class _Rows(msgspec.Struct):
    """The response of `POST /query`; numbers keep their digits."""

    columns: list[dict[str, str]]
    rows: list[msgspec.Raw]
    more: bool
