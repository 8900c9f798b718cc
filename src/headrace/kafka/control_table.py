"""The control table: what all processes of one deployment know of how what runs is steered.

A compacted topic of entries: a key of words with slashes between them, and a JSON object; a tombstone takes one away.
Every process reads all of it and goes on reading, so the order of the log is the order for everybody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.config.kafka import KafkaConfig
from headrace.errors import HeadraceError, KafkaTimeout, KafkaUnavailable
from headrace.kafka.admin import Admin
from headrace.kafka.followed_topic import FollowedTopic
from headrace.kafka.producer import Producer
from headrace.lifecycle import Clock, Readiness
from headrace.lifecycle.gauge_registry import register_gauge, unregister_gauge
from headrace.records import OutgoingRecord, Record

log = logging.getLogger(__name__)

_PUT_SECONDS = 10.0
_GAUGE = "headrace_corrupt_control_entries"

Entry = Mapping[str, Any]
OnChange = Callable[[str, Entry | None], None]


class ControlTable(FollowedTopic):
    """This process's view of the table, and writing to it.

    Where the topic neither exists nor can be made, nothing can have been steered: `known` is set then too, and
    `missing` says why.
    """

    def __init__(
        self, kafka: KafkaConfig, admin: Admin, topic: str, source: str, producer: Producer, clock: Clock
    ) -> None:
        """Prepare; `producer` writes entries, and the others are those of any topic that is followed."""
        super().__init__(kafka, admin, topic, source, clock)
        self.name = "control"
        self.known = asyncio.Event()
        """Set once what was steered before this process is known: it is read, or there can be none."""
        self.is_loaded = asyncio.Event()
        """Set once all is read that was there; watchers know it then."""
        self.on_records = self._read
        self._topic = topic
        self._producer = producer
        self._entries: dict[str, Entry] = {}
        self._offsets: dict[str, int] = {}
        self._corrupt: set[bytes | None] = set()
        self._watches: list[tuple[str, OnChange]] = []
        self._reached = 0
        self._moved = asyncio.Event()

    async def start(self) -> None:
        register_gauge(_GAUGE, lambda: len(self._corrupt))
        await super().start()

    async def stop(self) -> None:
        unregister_gauge(_GAUGE)
        await super().stop()

    def readiness(self) -> Readiness:
        """Say whether what was steered is known; without its topic control is off, and the rest goes on."""
        if self.missing:
            return Readiness(True, f"control is off: {self.missing}")
        return super().readiness()

    def absent(self) -> None:
        self.known.set()

    def loaded(self) -> None:
        self.known.set()
        if not self.is_loaded.is_set():
            self.is_loaded.set()
            for prefix, on_change in self._watches:
                self._tell(prefix, on_change)

    def watch(self, prefix: str, on_change: OnChange) -> None:
        """Have a function called with every entry whose key begins so: those that are there, and what comes.

        It is called on the loop, in the order of the log, with None in place of an entry that was taken away; first
        once all is read, so never with what was taken away before. It must not raise.
        """
        self._watches.append((prefix, on_change))
        if self.is_loaded.is_set():
            self._tell(prefix, on_change)

    def items(self, prefix: str) -> dict[str, Entry]:
        """Return the entries whose keys begin so, the one written last at the end."""
        return {key: entry for key, entry in self._entries.items() if key.startswith(prefix)}

    def get(self, key: str) -> Entry | None:
        """Return an entry; None if there is none."""
        return self._entries.get(key)

    def offset_of(self, key: str) -> int:
        """Return where in the log the entry of a key was written last; -1 if there is none."""
        return self._offsets.get(key, -1)

    async def put(self, key: str, value: Entry | None) -> int:
        """Write an entry, or take one away with None; as `put_all`, and returns its offset."""
        return await self.put_all({key: value})

    async def put_all(self, entries: Mapping[str, Entry | None]) -> int:
        """Write entries side by side and wait until this process has read them.

        Returns:
            Offset of the last of them.

        Raises:
            KafkaUnavailable: The table is not read, so nothing was written.
            KafkaTimeout: Whether they are written is not known.
            KafkaError: Kafka does not take one of them; others may be written.
        """
        self.require()
        records = [
            OutgoingRecord(self._topic, key.encode(), None if value is None else msgspec.json.encode(value))
            for key, value in entries.items()
        ]
        try:
            async with asyncio.timeout(_PUT_SECONDS):
                results = await self._producer.produce(records)
                if failed := next((result for result in results if isinstance(result, HeadraceError)), None):
                    raise failed
                offset = max(result.offset for result in results if not isinstance(result, HeadraceError))
                await self._reach(offset + 1)
        except TimeoutError as cause:
            raise KafkaTimeout(
                f"{', '.join(entries)}: not read back from {self._topic} within {_PUT_SECONDS:g} s, so it may hold or "
                "not: look at the status, and ask again once Kafka answers"
            ) from cause
        return offset

    async def catch_up(self) -> None:
        """Wait until all is read that is written now.

        Raises:
            KafkaUnavailable, KafkaTimeout: It is not read.
        """
        self.require()
        try:
            async with asyncio.timeout(_PUT_SECONDS):
                await self._reach(await self.end())
        except TimeoutError as cause:
            raise KafkaTimeout(f"{self._topic} was not read up to its end within {_PUT_SECONDS:g} s") from cause

    def require(self) -> None:
        """Return if the table is read.

        Raises:
            KafkaUnavailable: It is not, or there is none.
        """
        if not self.is_loaded.is_set():
            raise KafkaUnavailable(f"control is not possible now: {self.missing or super().readiness().reason}")

    async def _reach(self, position: int) -> None:
        while self._reached < position:
            self._moved.clear()
            await self._moved.wait()

    def _tell(self, prefix: str, on_change: OnChange) -> None:
        for key, entry in self.items(prefix).items():
            on_change(key, entry)

    def _read(self, records: Sequence[Record], position: int) -> None:
        for record in records:
            self._take_entry(record)
        self._reached = max(self._reached, position)
        self._moved.set()

    def _take_entry(self, record: Record) -> None:
        self._corrupt.discard(record.key)
        try:
            key = (record.key or b"").decode(errors="strict" if record.value else "replace")
            entry = None if record.value is None else msgspec.json.decode(record.value, type=dict[str, Any])
            if entry is not None and not key:
                raise ValueError("it has no key")
        except (ValueError, RecursionError) as cause:
            self._corrupt.add(record.key)
            log.error("offset %d of %s is no entry and is passed over: %s", record.offset, self._topic, cause)
            return
        known = self._entries.pop(key, None)
        self._offsets.pop(key, None)
        if entry is not None:
            self._entries[key] = entry
            self._offsets[key] = record.offset
        if self.is_loaded.is_set() and (entry is not None or known is not None):
            for prefix, on_change in list(self._watches):
                if key.startswith(prefix):
                    on_change(key, entry)
