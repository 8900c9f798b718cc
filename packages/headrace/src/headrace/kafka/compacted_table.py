"""A compacted topic of one partition as a table: each process reads all of it, follows it, and writes entries.

The order of the log is the order of changes, so every process has the same entries.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from headrace.errors import HeadraceError, KafkaError, KafkaTimeout, KafkaUnauthorized, KafkaUnavailable
from headrace.kafka.admin import Admin
from headrace.kafka.reader import read_records, read_window
from headrace.kafka.topic_directory import InternalTopic
from headrace.records import OutgoingRecord, Produce, Record, TopicPartition
from headrace.runtime import Clock, Readiness, Service

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_SECONDS = 1.0
_MISSING_SECONDS = 5.0
_LIMIT_SECONDS = 10.0


class ValueFormat(NamedTuple, Generic[T]):
    """How the values of a table are encoded."""

    decode: Callable[[bytes], T]
    """Raises ValueError or RecursionError if a value cannot be decoded."""
    encode: Callable[[T], bytes]


JSON_OBJECTS: Final = ValueFormat(msgspec.json.Decoder(dict[str, Any]).decode, msgspec.json.encode)
RAW_BYTES: Final = ValueFormat[bytes](bytes, bytes)


class CompactedTable(Service, Generic[T]):
    """Entries by key, as far as this process has read them; writes entries.

    A record without a value removes the entry of its key. A record that cannot be decoded is logged, counted in a
    gauge and skipped.
    """

    def __init__(
        self,
        admin: Admin,
        topic: InternalTopic,
        values: ValueFormat[T],
        produce: Produce,
        clock: Clock,
        *,
        optional: str = "",
    ) -> None:
        """Prepare; no broker is contacted. `optional` is the name of what is off while the topic cannot be created."""
        super().__init__(optional or f"topic {topic.name}")
        # Settings
        self.topic = topic
        self._optional = bool(optional)
        self._admin = admin
        self._produce = produce
        self._clock = clock
        # This process
        self.known = asyncio.Event()
        """Set when the entries written before the start are known: they are loaded, or there is no topic."""
        self._watches: list[tuple[str, Callable[[str, T | None], None]]] = []
        # This topic
        self.is_loaded = asyncio.Event()
        """Set when the entries written before the start are loaded, and watchers have received them."""
        self._entries = _Entries(topic.name, values)
        self._position = _TablePosition()
        self._attempt = _Attempt(f"{topic.name} has not been read yet")
        """The last one to read it."""

    async def start(self) -> None:
        if self._optional:
            self.publish("headrace_corrupt_control_entries", lambda: len(self._entries.corrupt))
        self.spawn(self._follow(), "follow")

    def readiness(self) -> Readiness:
        attempt = self._attempt
        if attempt.missing and self._optional:
            return Readiness(True, f"{self.name} is off: {attempt.missing}")
        return Readiness(not attempt.problem, attempt.problem)

    def turn_off(self, why: str) -> None:
        """Have errors say why this process does not read the topic."""
        self._attempt = self._attempt._replace(missing=why)

    def watch(self, prefix: str, on_change: Callable[[str, T | None], None]) -> None:
        """Call a function with every entry whose key starts with a prefix: the current ones, then every change.

        It is called on the loop, in the order of the log, with None for an entry that was removed. The first call
        comes after all entries are loaded, so entries that were removed before are never passed. It must not raise.
        """
        self._watches.append((prefix, on_change))
        if self.is_loaded.is_set():
            self._pass_all(prefix, on_change)

    def items(self, prefix: str) -> dict[str, T]:
        """Return the entries whose keys start with a prefix, in the order of their last changes."""
        return {key: entry for key, (_, entry) in self._entries.by_key.items() if key.startswith(prefix)}

    def get(self, key: str) -> T | None:
        """Return an entry; None if there is none."""
        found = self._entries.by_key.get(key)
        return found[1] if found else None

    def offset_of(self, key: str) -> int:
        """Return the offset of the record that wrote an entry last; -1 if there is no entry."""
        found = self._entries.by_key.get(key)
        return found[0] if found else -1

    @property
    def topic_id(self) -> str:
        """Kafka's id of the topic whose entries these are (KIP-516); empty if it is not known."""
        return self._position.topic_id

    async def put(self, key: str, entry: T | None) -> int:
        """Write an entry, or remove it with None, as `put_all` does. Returns the offset."""
        return (await self.put_all({key: entry}))[0]

    async def put_all(self, entries: Mapping[str, T | None], limit_seconds: float = _LIMIT_SECONDS) -> list[int]:
        """Write entries concurrently, wait until this process has read them back, and return their offsets in order.

        Raises:
            KafkaUnavailable: The table is not loaded, or another topic of its name was found.
            KafkaTimeout: The entries may or may not be written.
            KafkaError: Kafka refused one of them; others may be written.
        """
        self.require()
        encode = self._entries.values.encode
        topic = self.topic.name
        end = self._position.next or 0
        records = [
            OutgoingRecord(topic, key.encode(), None if entry is None else encode(entry), None, 0)
            for key, entry in entries.items()
        ]
        try:
            async with asyncio.timeout(limit_seconds):
                results = await self._produce(records)
                if failed := next((result for result in results if isinstance(result, HeadraceError)), None):
                    raise failed
                offsets = [result.offset for result in results]
                if min(offsets, default=end) < end:  # waiting could not show that this process has read them back
                    problem = f"{topic} was recreated or truncated; reading it from the start"
                    self._attempt = self._attempt._replace(problem=problem)
                    self._position.next = None
                    self.is_loaded.clear()
                    raise KafkaUnavailable(f"{problem}: send the request again")
                await self._position.reach(max(offsets, default=-1) + 1)
        except TimeoutError as cause:
            raise self._late(
                f"{', '.join(entries)}: not read back from {topic} within {limit_seconds:g} s, so it may or may not be "
                "written: look at the status, and repeat the request when Kafka answers"
            ) from cause
        return offsets

    async def catch_up(self) -> None:
        """Wait until everything is read that has been written by now.

        Raises:
            KafkaUnavailable, KafkaTimeout: It is not read.
        """
        self.require()
        await self.read_to_end()

    async def read_to_end(self, limit_seconds: float = _LIMIT_SECONDS) -> None:
        """Wait until everything is read that has been written by now, even while the table is loading.

        Raises:
            KafkaError, KafkaTimeout: It is not read.
        """
        await self.reach(await self._end(), limit_seconds)

    async def reach(self, position: int, limit_seconds: float = _LIMIT_SECONDS) -> None:
        """Wait until everything before an offset is read.

        Raises:
            KafkaTimeout: It is not read within the limit.
        """
        try:
            async with asyncio.timeout(limit_seconds):
                await self._position.reach(position)
        except TimeoutError as cause:
            raise self._late(
                f"{self.topic.name} was not read up to offset {position} within {limit_seconds:g} s: "
                "check whether Kafka answers"
            ) from cause

    def require(self) -> None:
        """Return if the table is loaded.

        Raises:
            KafkaUnavailable: It is not, or there is no topic.
            KafkaUnauthorized: A right to it is missing.
        """
        attempt = self._attempt
        if not self.is_loaded.is_set() or (attempt.refusal and attempt.problem):
            kind = KafkaUnauthorized if attempt.refusal else KafkaUnavailable
            raise kind(f"{self.name} is not available now: {attempt.missing or attempt.problem}")

    def _late(self, text: str) -> KafkaError:
        """Return the error for what was not read in time: the missing right, if the last error was one."""
        refusal = self._attempt.refusal
        return KafkaUnauthorized(refusal.description) if refusal else KafkaTimeout(text)

    def read(self, records: Sequence[Record], position: int) -> None:
        """Apply records of the topic, in their order, up to a position."""
        for record in records:
            change = self._entries.apply(record)
            if change and self.is_loaded.is_set():
                self._pass(*change)
        if self.is_loaded.is_set():  # before, no watcher has received an entry
            self._position.passed(position)

    def loaded(self, position: int) -> None:
        """Pass all entries to the watchers the first time the topic is read to its end, which is a position."""
        if not self.is_loaded.is_set():
            self.is_loaded.set()
            gone = self._position.outdated - self._entries.by_key.keys()
            self._position.outdated = set()
            for prefix, on_change in self._watches:
                for key in gone:
                    if key.startswith(prefix):
                        on_change(key, None)
                self._pass_all(prefix, on_change)
        self._position.passed(position)
        self.known.set()

    async def _follow(self) -> None:
        while True:
            try:
                if self._attempt.problem:
                    await self._load()
                    self._attempt = self._attempt._replace(problem="")
                await self._read_to(None)
            except HeadraceError as error:
                self._attempt = self._attempt._replace(
                    problem=f"reading {self.topic.name} failed, will retry: {error.description}",
                    refusal=error if isinstance(error, KafkaUnauthorized) else None,
                )
            await self._clock.sleep(_MISSING_SECONDS if self._attempt.missing else _RETRY_SECONDS)

    async def _load(self) -> None:
        """Read to the current end: from where reading was interrupted, or from the start.

        A topic that was recreated or truncated is read from the start.
        """
        position = self._position
        name = self.topic.name
        if position.next is None:
            await self._ensure()
        topic_id = (await self._admin.topic_ids([name])).get(name, position.topic_id)
        end = await self._end()
        if position.next is None or end < position.next or topic_id != position.topic_id:
            start = (await self._admin.start_offsets([self._partition]))[self._partition]
            self.is_loaded.clear()
            position.restart(topic_id, start, self._entries.by_key)
            self._entries.by_key.clear()
        await self._read_to(end)
        position.next = max(position.next or 0, end)  # compaction may have removed the last records before the end
        self.loaded(position.next)

    async def _read_to(self, end: int | None) -> None:
        """Read to an offset, or without an end."""
        position = self._position
        ends = None if end is None else {self._partition: end}
        async for records in read_records(self._admin.config, {self._partition: position.next or 0}, ends):
            if end is None and position.next is None:
                return
            if records:
                position.next = records[-1].offset + 1
                self.read(records, position.next)

    async def _ensure(self) -> None:
        self._attempt = self._attempt._replace(missing="")
        if await self._admin.has_topic(self.topic.name):  # raises if a right is missing: then no entry is known
            return
        try:
            await self.topic.ensure(self._admin)
        except KafkaUnavailable:
            raise
        except HeadraceError as error:
            self._attempt = self._attempt._replace(missing=error.description)
            self.known.set()
            raise

    @property
    def _partition(self) -> TopicPartition:
        return TopicPartition(self.topic.name, 0)

    async def _end(self) -> int:
        return (await self._admin.written_offsets([self._partition]))[self._partition]

    def _pass_all(self, prefix: str, on_change: Callable[[str, T | None], None]) -> None:
        for key, entry in self.items(prefix).items():
            on_change(key, entry)

    def _pass(self, key: str, entry: T | None) -> None:
        for prefix, on_change in list(self._watches):
            if key.startswith(prefix):
                on_change(key, entry)


class _Attempt(NamedTuple):
    """How an attempt to read the topic ended."""

    problem: str = ""
    """Why it is not read; empty if it is."""
    missing: str = ""
    """Why the topic does not exist and cannot be created; empty otherwise."""
    refusal: KafkaUnauthorized | None = None
    """The last error if a right was missing. An empty topic is loaded without the right to read it."""


class _Entries(Generic[T]):
    """The entries of the records that were read."""

    def __init__(self, topic: str, values: ValueFormat[T]) -> None:
        self._topic = topic
        self.values = values
        self.by_key: dict[str, tuple[int, T]] = {}
        """Each with the offset of its record."""
        self.corrupt: set[bytes | None] = set()
        """Keys of records that are not entries."""

    def apply(self, record: Record) -> tuple[str, T | None] | None:
        """Apply a record. Returns its key and entry; None if it changes nothing."""
        self.corrupt.discard(record.key)
        try:
            key = (record.key or b"").decode(errors="strict" if record.value else "replace")
            entry = None if record.value is None else self.values.decode(record.value)
            if entry is not None and not key:
                raise ValueError("it has no key")
        except (ValueError, RecursionError) as cause:
            self.corrupt.add(record.key)
            log.error("offset %d of %s is not an entry and is skipped: %s", record.offset, self._topic, cause)
            return None
        before = self.by_key.pop(key, None)
        if entry is not None:
            self.by_key[key] = record.offset, entry
        return (key, entry) if entry is not None or before is not None else None


class _TablePosition:
    """How far the topic is read and passed to the watchers; waits for that."""

    def __init__(self) -> None:
        self.topic_id = ""
        self.next: int | None = None
        """The next offset to read; None before the first load."""
        self.outdated: set[str] = set()
        """Keys of entries that watchers know from before a restart."""
        self._passed = 0
        self._moved = asyncio.Event()

    def restart(self, topic_id: str, start: int, known: Iterable[str]) -> None:
        """Continue at the start of a topic; the watchers know these keys."""
        self.topic_id = topic_id
        self.next = start
        self._passed = 0
        self.outdated.update(known)

    def passed(self, position: int) -> None:
        """Set the offset before which the watchers have received every record."""
        self._passed = max(self._passed, position)
        self._moved.set()

    async def reach(self, position: int) -> None:
        """Wait until the watchers have received every record before an offset."""
        while self._passed < position:
            self._moved.clear()
            await self._moved.wait()


async def read_back(
    admin: Admin, topic: InternalTopic, since_ms: int = 0, *, settled: bool = True
) -> AsyncGenerator[list[Record], None]:
    """Read the committed records of a compacted topic once, from `since_ms` on, in the order of the log.

    If `settled`, wait for the end of open transactions, such as those of a lost process.

    Raises:
        KafkaUnavailable: No records were received for 30 s although the end is not reached.
    """
    partition = TopicPartition(topic.name, 0)
    ends = await (admin.written_offsets([partition]) if settled else admin.end_offsets([partition]))
    starts = await (admin.offsets_since([partition], since_ms) if since_ms else admin.start_offsets([partition]))
    async with contextlib.aclosing(read_window(admin.config, starts, ends)) as batches:
        async for records in batches:
            yield records
