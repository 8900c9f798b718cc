"""SQL over bounded slices of topics, in memory: which records are read, what their columns are, and who runs it."""

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeVar

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from headrace.config.kafka import KafkaConfig
from headrace.errors import ConfigError, FormatError, StatementRejected
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.kafka import read_window
from headrace.records import Offsets, Record, RecordBatch, TopicPartition
from headrace.runtime import LoopThread, run_blocking
from headrace_queries.columns import Column, needs_registry, quoted
from headrace_queries.engine.database import IN_MEMORY, empty_database
from headrace_queries.engine.decoding import Decoder
from headrace_queries.engine.pull import RowWriter
from headrace_queries.engine.statements import Statements, refused
from headrace_queries.engine.table_file import TableFile
from headrace_queries.inference import format_of, inferred
from headrace_queries.registered_columns import registered_columns
from headrace_queries.table_config import TableConfig

T = TypeVar("T")

MOST_BYTES: Final = 128 << 20
"""Of the keys and values of a topic."""
_CHUNK: Final = 1_000
_APPLIED: Final = 50_000
_INFERRED: Final = 10_000
_VALUES: Final = "FROM (SELECT TRY_CAST(value AS JSON) AS v FROM slice)"
_IS_OBJECT: Final = "json_type(v) = 'OBJECT'"
_INTERRUPTS: Final = 100
_INTERRUPT_SECONDS: Final = 0.05
_TOO_LARGE: Final = (
    f"the statement needs more than {IN_MEMORY} of memory: select fewer rows or columns, or read fewer records (--last)"
)


def newest(starts: Offsets, ends: Offsets, most: int) -> dict[TopicPartition, int]:
    """Return later starts that leave at most this many offsets: an equal share of each partition, its newest."""
    left = most
    found: dict[TopicPartition, int] = {}
    by_size = sorted(starts, key=lambda partition: ends[partition] - starts[partition])
    for at, partition in enumerate(by_size):
        share = min(ends[partition] - starts[partition], left // (len(by_size) - at))
        found[partition] = ends[partition] - share
        left -= share
    return found


class SliceSpec(NamedTuple):
    """Which records of a topic are read, and how."""

    topic: str
    starts: Offsets
    ends: Offsets
    since_ms: int | None = None
    until_ms: int | None = None
    """Records outside of these times are left out."""
    key_format: str | None = None
    value_format: str | None = None
    """None: what the first records look like."""


class SliceReader:
    """Tables in memory, each with a slice of a topic."""

    def __init__(self, codecs: Codecs, registry: SchemaRegistry) -> None:
        self._codecs = codecs
        self._registry = registry
        self._connection = empty_database()
        self.columns: dict[str, list[tuple[str, str]]] = {}
        """Names and types of the columns of each table."""

    def tables_of(self, sql: str, topics: Sequence[str]) -> list[str]:
        """Return the topics whose names are tables of a statement.

        Raises:
            StatementRejected: It is not one SELECT over topics.
        """
        tables = self._check(sql, topics)
        found = [topic for topic in topics if topic.lower() in tables]
        if len(found) > len(tables):
            raise StatementRejected(f"topics {found[0]} and {found[1]} differ in case only, and SQL ignores case")
        return found

    def _check(self, sql: str, topics: Sequence[str]) -> frozenset[str]:
        return Statements(self._connection).check(sql, dict.fromkeys(topics, "key"), topics).tables

    async def add(self, kafka: KafkaConfig, spec: SliceSpec) -> list[str]:
        """Read a slice into a table with the name of its topic; return what people should know of it.

        Raises:
            HeadraceError: Kafka or the schema registry does not respond, or refuses.
        """
        batches, remarks = await _read(kafka, spec)
        config = TableConfig(
            topic=spec.topic,
            kind="log",
            key_format=spec.key_format or format_of(chain.from_iterable(b.keys for b in batches), of_keys=True),
            value_format=spec.value_format or format_of(chain.from_iterable(b.values for b in batches), of_keys=False),
        )
        decoder = Decoder(config.key_format, config.value_format, self._codecs)
        await decoder.prepare(batches)
        records = _between(decoder.to_arrow(batches), spec)
        values = await self._registered(config)
        with _in_words():
            self._connection.execute(f"ATTACH ':memory:' AS {quoted(f'{spec.topic}_file')}")
            file = TableFile(self._connection, spec.topic, config, Path())
            values, more = (values, 0) if values is not None else self._inferred(config, records)
            file.open(values)
            for start in range(0, len(records), _APPLIED):
                file.apply(records.slice(start, _APPLIED), {})
        self.columns[spec.topic] = file.described
        if file.corrupt.count:
            text = f"{spec.topic}: records left out: {file.corrupt.count}; the last is {file.corrupt.last}"
            remarks.append(f"{text}. Values were read as {config.value_format}, keys as {config.key_format}")
        if more:
            text = f"{spec.topic}: records with fields that few others have: {more}. Those fields are not columns"
            remarks.append(f"{text}; `headrace consume` shows them")
        if not len(records):
            remarks.append(f"{spec.topic}: no records in this slice")
        return remarks

    async def _registered(self, config: TableConfig) -> list[Column] | None:
        if not needs_registry(config):
            return None
        try:
            return await registered_columns(self._registry, config.topic)
        except (FormatError, ConfigError):  # it is of another subject; the records have columns, too
            return None

    def _inferred(self, config: TableConfig, records: pa.Table) -> tuple[list[Column] | None, int]:
        if config.value_format != "json" and not needs_registry(config):
            return None, 0
        run = self._connection.execute
        self._connection.register("slice", records)
        try:
            objects, valid = run(f"SELECT count(*) FILTER ({_IS_OBJECT}), count(v) {_VALUES}").fetchall()[0]
            if 2 * objects <= valid:
                return None, 0
            counts: Counter[str] = Counter()
            for start in range(0, len(records), _INFERRED):  # DuckDB keeps what it has parsed until the end
                self._connection.register("part", records.slice(start, _INFERRED))
                part = f"json_structure(v), count(*) {_VALUES.replace('slice', 'part')} WHERE {_IS_OBJECT} GROUP BY 1"
                counts.update(dict(run(f"SELECT {part}").fetchall()))
                self._connection.unregister("part")
            return inferred(counts)
        finally:
            self._connection.unregister("slice")

    def rows(self, sql: str) -> tuple[list[str], Iterator[bytes]]:
        """Run a statement; return the names of its columns, and its rows as JSON objects.

        Raises:
            StatementRejected: It is not one SELECT over the tables, fails, or needs too much memory.
            KeyboardInterrupt: The user has interrupted it.
        """
        _run(self._connection, lambda: self._check(sql, [*self.columns]))
        cursor = self._connection.cursor()
        results = _run(cursor, lambda: RowWriter(cursor.execute(sql), "objects"))
        return [column.name for column in results.columns], _texts(cursor, results)

    def write_parquet(self, sql: str, file: IO[bytes]) -> None:
        """Run a statement, and write its rows as a Parquet file; raises as `rows`."""
        _run(self._connection, lambda: self._check(sql, [*self.columns]))
        cursor = self._connection.cursor()
        _run(cursor, lambda: _write_parquet(cursor.sql(sql).to_arrow_reader(), file))


def arrow_to_parquet(stream: bytes, file: IO[bytes]) -> None:
    """Write the rows of an Arrow stream as a Parquet file."""
    with pa.ipc.open_stream(stream) as reader:
        _write_parquet(reader, file)


def _texts(cursor: duckdb.DuckDBPyConnection, results: RowWriter) -> Iterator[bytes]:
    while rows := _run(cursor, lambda: cursor.fetchmany(_CHUNK)):
        yield from results.texts(rows)


def _write_parquet(reader: Any, file: IO[bytes]) -> None:
    with pyarrow.parquet.ParquetWriter(file, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)


async def _read(kafka: KafkaConfig, spec: SliceSpec) -> tuple[list[RecordBatch], list[str]]:
    """Return the records of a slice, and a remark if it is cut."""
    batches: list[RecordBatch] = []
    size = 0
    async with contextlib.aclosing(read_window(kafka, spec.starts, spec.ends)) as reading:
        async for records in reading:
            batches += batches_of(records)
            size += sum(record.size_bytes for record in records)
            if size > MOST_BYTES:
                count = sum(map(len, batches))
                text = f"{spec.topic}: stopped after {count} records, at {MOST_BYTES >> 20} MiB of keys and values"
                return batches, [f"{text}: pass a smaller --last, or a shorter time (--since, --until)"]
    return batches, []


def batches_of(records: Sequence[Record]) -> list[RecordBatch]:
    """Return records as batches of columns, each of one partition."""
    runs = groupby(records, lambda record: record.topic_partition)
    return [RecordBatch.of([*run]) for _, run in runs]


def _between(records: pa.Table, spec: SliceSpec) -> pa.Table:
    """Return the records whose timestamps are in the slice: they need not be in the order of offsets."""
    times = pc.field("timestamp")
    if spec.since_ms is not None:
        records = records.filter(times >= spec.since_ms)
    return records if spec.until_ms is None else records.filter(times < spec.until_ms)


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Turn the errors of DuckDB into those of people."""
    try:
        yield
    except duckdb.OutOfMemoryException:
        raise StatementRejected(_TOO_LARGE) from None
    except duckdb.Error as cause:
        raise refused(cause) from None


@functools.cache
def _loop() -> LoopThread:
    return LoopThread("headrace-sql")


def _run(connection: duckdb.DuckDBPyConnection, call: Callable[[], T]) -> T:
    """Run a call of DuckDB away from this thread, which an interrupt then ends at once.

    DuckDB's own handling of Ctrl-C waits for its threads, which do not know of it.
    """
    with _in_words():
        return _loop().call(_until_interrupted(connection, call))


async def _until_interrupted(connection: duckdb.DuckDBPyConnection, call: Callable[[], T]) -> T:
    ended: list[bool] = []

    def run() -> T:
        try:
            return call()
        finally:
            ended.append(True)

    try:
        return await run_blocking(run)
    except asyncio.CancelledError:
        for _ in range(_INTERRUPTS):  # the statement may begin only now
            if not ended:
                connection.interrupt()
                await asyncio.sleep(_INTERRUPT_SECONDS)
        raise
