"""Keeps one table up to date: where its topic is read from, what becomes of gaps, and when the table stops."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, ParamSpec, TypeVar

import duckdb
import pyarrow as pa

from headrace.config.tables import TableConfig
from headrace.errors import ConfigError, FormatError, HeadraceError, KafkaUnavailable
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.kafka import Admin, ReadPart, read_batches
from headrace.queries.columns import Column, declared, needs_registry
from headrace.queries.engine.decoding import Decoder
from headrace.queries.engine.table_file import Applied, TableFile
from headrace.queries.protocol import Positions, TableStatus
from headrace.queries.registered_columns import registered_columns
from headrace.records import TopicPartition
from headrace.runtime import Service, run_blocking

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_MOST_RECORDS: Final = 10_000
_LEAST_SECONDS: Final = 0.02
"""Between two transactions, so that a trickle of records does not cost one each."""
_REST: Final = 5.0
"""Push queries get a part of the time: after them the table waits for this multiple of what they took."""
_MOST_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0
_PART_OF_LIMIT: Final = 0.98
"""A full table continues when it has shrunk to this part of its limit."""
_PROPERTIES: Final = {"queued.max.messages.kbytes": 8192, "fetch.wait.max.ms": 20}


class TableContext(NamedTuple):
    """What all tables use."""

    admin: Admin
    codecs: Codecs
    registry: SchemaRegistry


@dataclasses.dataclass
class _TableState:
    """The state of a table that people see."""

    state: str = "starting"
    reason: str = "its topic has not been read yet"
    age_seconds: float = 0.0
    rows: int = 0
    progress: _Progress = dataclasses.field(default_factory=lambda: _Progress())


class TableFeed(Service):
    """Reads the topic of a table and applies its records."""

    def __init__(self, file: TableFile, name: str, config: TableConfig, shared: TableContext) -> None:
        super().__init__(f"table {name}")
        self.file = file
        self.on_applied: Callable[[Positions], None] = lambda positions: None
        """Called on a thread after each transaction with its positions, while `file.arrived` has its records."""
        self._lock = threading.Lock()
        """Held while the connection of the file is in use; a call may outlive the task that waits for it."""
        self.key_column = ""
        """Name of the column of the key; empty while the table is not available."""
        self._table = name
        self._config = config
        self._shared = shared
        self._now = _TableState()
        self._pause = _LEAST_SECONDS

    async def run(self) -> None:
        while True:
            try:
                if not self.key_column and await self.exclusive(self.file.open_again):
                    self.key_column = self.file.columns.key  # it is available while Kafka does not respond
                    self._now.rows = await self.exclusive(lambda: self.file.rows)
                await self._keep()
            except ConfigError as refusal:
                self.key_column = ""
                self._show("refused", refusal.description)
                log.error("%s is refused: %s", self.name, refusal.description)
                return
            except (HeadraceError, duckdb.Error, OSError) as cause:
                text = cause.description if isinstance(cause, HeadraceError) else str(cause).splitlines()[0]
                if self._now.reason != text:
                    log.warning("%s: %s; will retry", self.name, text)
                self._show("failing", text)
            await asyncio.sleep(_RETRY_SECONDS)

    async def rebuild(self) -> None:
        """Forget every row, and read the topic again from its start."""
        await self.cancel_tasks()
        self.key_column = ""
        await self.exclusive(self.file.rebuild)
        self._now.progress = _Progress()
        self._show("starting", "it is built again")
        self.keep(self.run, "run")

    def status(self) -> TableStatus:
        """Return the state for people and metrics."""
        return TableStatus(
            self._table,
            self._now.state,  # type: ignore[arg-type]
            self._now.reason,
            self._config.topic,
            self._config.kind,
            self._now.rows,
            self.file.size_bytes,
            self._now.progress.lag,
            self._now.age_seconds,
            self.file.corrupt.count,
            self.file.corrupt.last,
            self.file.gap,
            self.file.described,
        )

    def _show(self, state: str, reason: str = "") -> None:
        self._now.state = state
        self._now.reason = reason

    async def _keep(self) -> None:
        """Open the table and follow its topic, until a partition is added or the topic is created again."""
        values = await self._columns()
        topic = self._config.topic
        ids = await self._shared.admin.topic_ids([topic], "Read")
        if topic not in ids:
            raise KafkaUnavailable(f"topic {topic} does not exist: create it (headrace topics create {topic})")
        await self.exclusive(self.file.open, values)
        if (before := await self.exclusive(lambda: self.file.topic_id)) != ids[topic]:
            if before:
                log.error("%s: topic %s was deleted and created again; the table starts anew", self.name, topic)
                await self.exclusive(self.file.rebuild)
                await self.exclusive(self.file.open, values)
            await self.exclusive(self.file.keep_topic_id, ids[topic])
        starts = await self._starts()
        self.key_column = self.file.columns.key
        self._now.rows = await self.exclusive(lambda: self.file.rows)
        await self._follow(starts, ids[topic])

    async def _columns(self) -> list[Column] | None:
        if self._config.value_schema is not None:
            return declared(self._config.value_schema)
        if not needs_registry(self._config):
            return None
        topic = self._config.topic
        try:
            return await registered_columns(self._shared.registry, topic)
        except FormatError as cause:
            text = f"{cause.description}. Register a schema for {topic}-value, or write schema: name TYPE, name TYPE"
            raise KafkaUnavailable(text) from cause

    async def _starts(self) -> dict[TopicPartition, int]:
        """Return where to continue, and note what Kafka has removed before it was read."""
        positions = await self.exclusive(self.file.positions)
        starts: dict[TopicPartition, int] = {}
        ends: dict[int, int] = {}
        for partition, (first, end) in (await self._shared.admin.topic_offsets(self._config.topic, "Read")).items():
            at = positions.get(partition.partition, first)
            if at < first:
                log.error("%s: offsets %d to %d of %s were removed unread", self.name, at, first - 1, partition)
                await self.exclusive(self.file.skip_gap, partition.partition, at, first)
                at = first
            if at > end:
                raise KafkaUnavailable(
                    f"{partition} ends at offset {end}, and the table has it up to {at}: Kafka has lost records; "
                    f"build the table again (headrace tables rebuild {self._table})"
                )
            starts[partition] = at
            ends[partition.partition] = end
        self._now.progress.begin({each.partition: at for each, at in starts.items()}, ends)
        return starts

    async def _follow(self, starts: dict[TopicPartition, int], topic_id: str) -> None:
        arrived: asyncio.Queue[ReadPart | Exception] = asyncio.Queue(1)
        reader = self.spawn(self._read(starts, arrived), "read")
        decoder = Decoder(self._config, self._shared.codecs)
        looks_at = time.monotonic() + _LOOK_SECONDS
        try:
            while not isinstance(part := await arrived.get(), Exception):
                began = time.monotonic()
                await self._apply(part, decoder)
                if await self._is_full():
                    return
                if time.monotonic() >= looks_at:
                    looks_at = time.monotonic() + _LOOK_SECONDS
                    if await self._has_changed(starts, topic_id):
                        return
                if part.batches:
                    await asyncio.sleep(max(0.0, began + self._pause - time.monotonic()))
            raise part
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _read(self, starts: dict[TopicPartition, int], arrived: asyncio.Queue[ReadPart | Exception]) -> None:
        """Read the next part while the one before is applied."""
        reading = read_batches(self._shared.admin.config, starts, _PROPERTIES, _MOST_RECORDS)
        try:
            async with contextlib.aclosing(reading) as parts:
                async for part in parts:
                    await arrived.put(part)
        except Exception as cause:  # noqa: BLE001 boundary: the task that takes the parts raises it
            await arrived.put(cause)

    async def _apply(self, part: ReadPart, decoder: Decoder) -> None:
        if part.batches:
            await decoder.prepare(part.batches)
            records = await run_blocking(decoder.to_arrow, part.batches)
            positions = {batch.topic_partition.partition: batch.offsets[-1] + 1 for batch in part.batches}
            applied = await self.exclusive(self._apply_records, records, positions)
            if applied.corrupt:
                log.warning("%s: left out %d records: %s", self.name, applied.corrupt, self.file.corrupt.last)
            self._now.progress.read(positions)
            self._now.age_seconds = max(0.0, time.time() - part.batches[-1].timestamps_ms[-1] / 1000)
        self._now.progress.read({partition.partition: at for partition, at in part.reached.items()})
        if self._now.progress.is_complete:
            self._show("live")
        else:
            self._show("catching up", self._now.progress.text)

    def _apply_records(self, records: pa.Table, positions: Positions) -> Applied:
        """Apply records and run the push queries, on a thread."""
        applied = self.file.apply(records, positions)
        began = time.monotonic()
        self.on_applied(positions)
        self._pause = max(_LEAST_SECONDS, min(_MOST_SECONDS, _REST * (time.monotonic() - began)))
        return applied

    async def exclusive(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on a thread, behind the other calls that use the connection of the file."""

        def run() -> T:
            with self._lock:
                return call(*args, **kwargs)

        return await run_blocking(run)

    async def _is_full(self) -> bool:
        """Return whether a limit is reached, after waiting while it is."""
        config = self._config
        part = 1.0
        while True:
            self._now.rows = await self.exclusive(lambda: self.file.rows)
            if self._now.rows < part * config.max_rows and self.file.size_bytes < part * config.max_bytes:
                return part != 1.0
            which = f"max_rows ({config.max_rows})" if self._now.rows >= part * config.max_rows else "max_bytes"
            remedy = "raise it, set retention_seconds, keep fewer columns, or write to a database with a pipeline"
            if self._now.state != "full":
                log.error("%s stops: it has reached %s", self.name, which)
            self._show("full", f"it has reached {which} and stopped: {remedy}")
            part = _PART_OF_LIMIT
            await asyncio.sleep(_LOOK_SECONDS)
            await self.exclusive(self.file.delete_old)

    async def _has_changed(self, starts: dict[TopicPartition, int], topic_id: str) -> bool:
        """Return whether the topic is another one or has more partitions; delete old rows."""
        await self.exclusive(self.file.delete_old)
        topic = self._config.topic
        ids = await self._shared.admin.topic_ids([topic], "Read")
        if ids.get(topic) != topic_id:
            return True
        info = await self._shared.admin.describe_topic(topic, "Read")
        ends = await self._shared.admin.end_offsets(starts)
        self._now.progress.ends_at({partition.partition: end for partition, end in ends.items()})
        return len(info.partitions) != len(starts)


class _Progress:
    """How far a table is, in offsets."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}
        self._targets: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._total = 0

    def begin(self, starts: dict[int, int], ends: dict[int, int]) -> None:
        """Start to read towards these ends."""
        self._at = dict(starts)
        self._targets = {partition: end for partition, end in ends.items() if end > starts[partition]}
        self._ends = dict(ends)
        self._total = self.lag

    def ends_at(self, ends: dict[int, int]) -> None:
        """Take the present ends."""
        self._ends = ends

    def read(self, positions: dict[int, int]) -> None:
        """Count what has been read."""
        self._at.update(positions)
        for partition, at in positions.items():
            if at >= self._targets.get(partition, at + 1):
                del self._targets[partition]

    @property
    def is_complete(self) -> bool:
        """Whether everything that was in the topic at the start has been read."""
        return not self._targets

    @property
    def lag(self) -> int:
        """Records that are not in the table yet."""
        return sum(max(0, end - self._at.get(partition, 0)) for partition, end in self._ends.items())

    @property
    def text(self) -> str:
        """Progress for people."""
        left = sum(max(0, end - self._at[partition]) for partition, end in self._targets.items())
        part = 100 * (self._total - left) // self._total if self._total else 100
        return f"catching up: {part} % read, {left} records left"
