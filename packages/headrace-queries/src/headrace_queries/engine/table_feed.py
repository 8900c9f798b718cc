"""Keeps one table up to date: where its topic is read from, what happens at gaps, and when the table stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Final, Protocol

import duckdb
import pyarrow as pa

from headrace.errors import ConfigError, FormatError, HeadraceError, KafkaUnavailable
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.kafka import Admin, ReadPart, read_batches
from headrace.records import TopicPartition
from headrace.runtime import Service, run_blocking
from headrace_queries.columns import Column, declared, needs_registry
from headrace_queries.engine.database import end_if_broken
from headrace_queries.engine.decoding import Decoder
from headrace_queries.engine.table_file import TableFile
from headrace_queries.engine_protocol import Positions, TableStatus
from headrace_queries.registered_columns import registered_columns
from headrace_queries.table_config import TableConfig

log = logging.getLogger(__name__)

_MOST_RECORDS: Final = 30_000
"""Of a transaction; it looks for their keys in the whole table."""
_FEW_RECORDS: Final = 2_000
_LEAST_SECONDS: Final = 0.02
"""Between two transactions, so that a trickle of records does not cost one each."""
_REST: Final = 6.0
"""Push queries get a part of the time: after them the table waits for this multiple of what they took."""
_SPREAD: Final = 4.0
"""A transaction of a few records begins this multiple of its duration before the next one."""
_MOST_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0
_PART_OF_LIMIT: Final = 0.98
"""A full table continues when it has shrunk to this part of its limit."""
_PROPERTIES: Final = {"queued.max.messages.kbytes": 8192, "fetch.wait.max.ms": 20}


class RecordTaker(Protocol):
    """Takes the records of each transaction of a table."""

    def take_arrived(self) -> Any:
        """Return them, on a thread while the file has them at hand; None if they are not needed."""

    async def applied(self, arrived: Any, positions: Positions) -> None:
        """Take on the loop what was returned, with the positions of the transaction."""


class TableFeed(Service):
    """Reads the topic of a table and applies its records."""

    def __init__(
        self, file: TableFile, name: str, config: TableConfig, admin: Admin, codecs: Codecs, registry: SchemaRegistry
    ) -> None:
        super().__init__(f"table {name}")
        # What it works with.
        self.file = file
        self.pushes: RecordTaker | None = None
        """Takes the records of each transaction."""
        self.key_column = ""
        """Name of the column of the key; empty while the table is not available."""
        self._table = name
        self._config = config
        self._admin = admin
        self._codecs = codecs
        self._registry = registry
        self._rebuilding = asyncio.Lock()
        # Its state, as people see it.
        self._state = "starting"
        self._reason = "its topic has not been read yet"
        self._progress = _Progress()

    async def run(self) -> None:
        while True:
            try:
                if not self.key_column and await self.file.run(self.file.open_again):
                    self.key_column = self.file.columns.key  # it is available while Kafka does not respond
                await self._keep()
            except ConfigError as refusal:
                self.key_column = ""
                self._show("refused", refusal.description)
                log.error("%s is refused: %s", self.name, refusal.description)
                return
            except (HeadraceError, duckdb.Error, OSError) as cause:
                end_if_broken(cause)
                text = cause.description if isinstance(cause, HeadraceError) else str(cause).splitlines()[0]
                if self._reason != text:
                    log.warning("%s: %s; will retry", self.name, text)
                self._show("failing", text)
            await asyncio.sleep(_RETRY_SECONDS)

    async def rebuild(self) -> None:
        """Forget every row, and read the topic again from its start."""
        async with self._rebuilding:
            await self.cancel_tasks()
            self.key_column = ""
            try:
                await self.file.run(self.file.rebuild)
                self._progress = _Progress()
                self._show("starting", "it is built again")
            finally:
                self.keep(self.run, "run")

    def status(self) -> TableStatus:
        """Return the state for people and metrics."""
        return TableStatus(
            self._table,
            self._state,  # type: ignore[arg-type]
            self._reason,
            self._config.topic,
            self._config.kind,
            self.file.rows,
            self.file.size_bytes,
            self._progress.lag,
            self._progress.age_seconds,
            self.file.corrupt.count,
            self.file.corrupt.last,
            self.file.gap,
            self.file.gap_offsets,
            self.file.described,
        )

    def _show(self, state: str, reason: str = "") -> None:
        self._state = state
        self._reason = reason

    async def _keep(self) -> None:
        """Open the table and follow its topic, until a partition is added or the topic is created again."""
        values = await self._columns()
        topic = self._config.topic
        ids = await self._admin.topic_ids([topic], "Read")
        if topic not in ids:
            raise KafkaUnavailable(f"topic {topic} does not exist: create it (headrace topics create {topic})")
        await self.file.run(self.file.open, values)
        if (before := await self.file.run(lambda: self.file.topic_id)) != ids[topic]:
            if before:
                log.error("%s: topic %s was deleted and created again; the table starts anew", self.name, topic)
                self.key_column = ""
                await self.file.run(self.file.rebuild)
                await self.file.run(self.file.open, values)
            await self.file.run(self.file.keep_topic_id, ids[topic])
        starts = await self._starts()
        self.key_column = self.file.columns.key
        if not await self._is_full():
            await self._follow(starts, ids[topic])

    async def _columns(self) -> list[Column] | None:
        if self._config.value_schema is not None:
            return declared(self._config.value_schema)
        if not needs_registry(self._config):
            return None
        topic = self._config.topic
        try:
            return await registered_columns(self._registry, topic)
        except FormatError as cause:
            text = f"{cause.description}. Register a schema for {topic}-value, or write schema: name TYPE, name TYPE"
            raise KafkaUnavailable(text) from cause

    async def _starts(self) -> dict[TopicPartition, int]:
        """Return where to continue, and note what Kafka has removed before it was read."""
        positions = await self.file.run(self.file.positions)
        starts: dict[TopicPartition, int] = {}
        ends: dict[int, int] = {}
        for partition, (first, end) in (await self._admin.topic_offsets(self._config.topic, "Read")).items():
            at = positions.get(partition.partition, first)
            if at < first:
                log.error("%s: offsets %d to %d of %s were removed unread", self.name, at, first - 1, partition)
                await self.file.run(self.file.skip_gap, partition.partition, at, first)
                at = first
            if at > end:
                raise KafkaUnavailable(
                    f"{partition} ends at offset {end}, and the table has it up to {at}: Kafka has lost records; "
                    f"build the table again (headrace tables rebuild {self._table})"
                )
            starts[partition] = at
            ends[partition.partition] = end
        self._progress.begin({each.partition: at for each, at in starts.items()}, ends)
        return starts

    async def _follow(self, starts: dict[TopicPartition, int], topic_id: str) -> None:
        arrived: asyncio.Queue[ReadPart | Exception] = asyncio.Queue(1)
        reader = self.spawn(self._read(starts, arrived), "read")
        decoder = Decoder(self._config.key_format, self._config.value_format, self._codecs)
        looks_at = time.monotonic() + _LOOK_SECONDS
        try:
            while not isinstance(part := await arrived.get(), Exception):
                pause = await self._apply(part, decoder)
                if await self._is_full():
                    return
                if time.monotonic() >= looks_at:
                    looks_at = time.monotonic() + _LOOK_SECONDS
                    if await self._has_changed(starts, topic_id):
                        return
                await asyncio.sleep(pause)
                arrived.task_done()
            raise part
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _read(self, starts: dict[TopicPartition, int], arrived: asyncio.Queue[ReadPart | Exception]) -> None:
        """Read the next part while a large one is applied; after a small one, what has arrived until it is needed."""
        reading = read_batches(self._admin.config, starts, _PROPERTIES, _MOST_RECORDS)
        try:
            async with contextlib.aclosing(reading) as parts:
                async for part in parts:
                    await arrived.put(part)
                    if sum(map(len, part.batches)) < _FEW_RECORDS:
                        await arrived.join()
        except Exception as cause:  # noqa: BLE001 boundary: the task that takes the parts raises it
            await arrived.put(cause)

    async def _apply(self, part: ReadPart, decoder: Decoder) -> float:
        """Apply what was read, and return the seconds to wait before the next transaction."""
        began = time.monotonic()
        pause = 0.0
        if part.batches:
            if await decoder.prepare(part.batches) and needs_registry(self._config):
                await self._take_up()
            records = await run_blocking(decoder.to_arrow, part.batches)
            positions = {batch.topic_partition.partition: batch.offsets[-1] + 1 for batch in part.batches}
            least_pause = await self.apply_records(records, positions)
            self._progress.age_seconds = max(0.0, time.time() - part.batches[-1].timestamps_ms[-1] / 1000)
            pause = least_pause - (time.monotonic() - began)
        self._progress.read({partition.partition: at for partition, at in part.reached.items()})
        if self._progress.is_complete:
            self._show("live")
        else:
            self._show("catching up", self._progress.text)
        return max(0.0, pause)

    async def apply_records(self, records: pa.Table, positions: Positions) -> float:
        """Apply decoded records in one transaction, or in one for each half if that needs too much memory.

        Returns:
            The seconds until the next transaction should begin.
        """
        try:
            corrupt, arrived, seconds = await self.file.run(self._apply_at_once, records, positions)
        except duckdb.OutOfMemoryException:
            if len(records) == 1:
                raise
            first, second = records.slice(0, len(records) // 2), records.slice(len(records) // 2)
            offsets = zip(first["partition"].to_pylist(), first["offset"].to_pylist(), strict=True)
            reached = {partition: offset + 1 for partition, offset in offsets}  # the last of each partition counts
            return max(await self.apply_records(first, reached), await self.apply_records(second, positions))
        done = time.monotonic()
        if self.pushes and arrived is not None:
            await self.pushes.applied(arrived, positions)
        if corrupt:
            log.warning("%s: left out %d records: %s", self.name, corrupt, self.file.corrupt.last)
        self._progress.read(positions)
        spread = _SPREAD * seconds if len(records) < _FEW_RECORDS else 0.0
        rest = _REST * (time.monotonic() - done)
        return max(_LEAST_SECONDS, min(_MOST_SECONDS, max(spread, rest)))

    async def _take_up(self) -> None:
        """Take up columns of a schema that was registered since the start, before its records are applied."""
        try:
            values = await registered_columns(self._registry, self._config.topic)
            if values != self.file.columns.values:
                await self.file.run(self.file.take_up, values)
                self.key_column = self.file.columns.key
                log.info("%s has the columns of the newest schema now", self.name)
        except (FormatError, ConfigError) as cause:
            log.warning("%s keeps its columns until the next start: %s", self.name, cause.description)

    def _apply_at_once(self, records: pa.Table, positions: Positions) -> tuple[int, Any, float]:
        """Apply records on the thread of the file; return also those for push queries, and the seconds of the first."""
        began = time.monotonic()
        corrupt = self.file.apply(records, positions)
        seconds = time.monotonic() - began
        return corrupt, self.pushes.take_arrived() if self.pushes else None, seconds

    async def _is_full(self) -> bool:
        """Return whether a limit is reached, after waiting while it is."""
        config = self._config
        part = 1.0
        while not await self._fits(part * config.max_bytes):
            remedy = "raise it, set retention_seconds, keep fewer columns, or write to a database with a pipeline"
            if self._state != "full":
                log.error("%s stops: it has reached max_bytes", self.name)
            self._show("full", f"it has reached max_bytes and stopped: {remedy}")
            part = _PART_OF_LIMIT
            await asyncio.sleep(_LOOK_SECONDS)
            await self.file.run(self.file.delete_old)
            await self.file.run(self.file.shrink)
        return part != 1.0

    async def _fits(self, most_bytes: float) -> bool:
        return self.file.size_bytes < most_bytes or await self.file.run(lambda: self.file.used_bytes) < most_bytes

    async def _has_changed(self, starts: dict[TopicPartition, int], topic_id: str) -> bool:
        """Return whether the topic is another one or has more partitions; delete old rows."""
        await self.file.run(self.file.delete_old)
        topic = self._config.topic
        ids = await self._admin.topic_ids([topic], "Read")
        if ids.get(topic) != topic_id:
            return True
        info = await self._admin.describe_topic(topic, "Read")
        ends = await self._admin.end_offsets(starts)
        self._progress.ends_at({partition.partition: end for partition, end in ends.items()})
        return len(info.partitions) != len(starts)


class _Progress:
    """How far a table is, in offsets."""

    def __init__(self) -> None:
        self.age_seconds = 0.0
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
