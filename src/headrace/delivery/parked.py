"""Parked keys: the order of a key is kept while a record of it waits in a retry tier.

A compacted topic says which records wait: an entry per record, and its tombstone once the record has ended. While a
key has entries, its later records go behind them into the tier. Everything rests on the order of the writes:

1. the entry is acknowledged before the record lies in the tier, and that before the record has ended where it came
   from; so a key is never free while a record of it waits;
2. the tombstone is acknowledged after the record was delivered from the tier, and before it has ended there; so a copy
   that a crash leaves in the tier is known as one, and not delivered behind later records of its key;
3. who takes over a partition reads the topic up to the end it has then, before anything else.

A record that comes again, after a crash, below one of its key that waits, and does not wait itself, has ended: the
later one would not wait otherwise. Source: delivery.md 4.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.delivery.protocols import ELSEWHERE, DeadLetter, Delivery, Destination, Outcome, Verdict, not_taken
from headrace.errors import DeadLetterFailed, DeliveryError, DestinationUnavailable, HeadraceError
from headrace.records import Record, TopicPartition

_ENTRY = b"waits"
_READ_SECONDS = 30.0
_WRITE_SECONDS = 150.0
"""Longer than the producer tries to deliver a record, so its own error comes first."""
_MOST_RECORDS = 250_000
_PARKED = Outcome(Verdict.RETRY, "Parked", "an earlier record of its key waits in a retry tier")
_Place = tuple[str, int, int, bytes]
_NONE: Mapping[int, int] = {}


class ParkedEntry(NamedTuple):
    """Says that a record blocks its key."""

    partition: TopicPartition
    key: bytes | None
    offset: int
    """Of the record."""
    position: int
    """Offset of the entry itself."""

    @property
    def record(self) -> Record:
        """The record, without its value."""
        return Record(*self.partition, self.offset, 0, self.key, None)


class EntryTable(Protocol):
    """The compacted topic of blocked keys as a table: the key of an entry names a record that waits."""

    def watch(self, prefix: str, on_change: Callable[[str, bytes | None], None]) -> None:
        """Call a function with every entry, and with every change."""

    def offset_of(self, key: str) -> int:
        """Return the offset of an entry; -1 if there is none."""

    async def put_all(self, entries: Mapping[str, bytes | None], limit_seconds: float) -> list[int]:
        """Write entries, wait until they are read back, and return their offsets."""

    async def read_to_end(self, limit_seconds: float) -> None:
        """Wait until everything is read that is written now."""

    async def reach(self, position: int, limit_seconds: float) -> None:
        """Wait until everything before an offset is read."""


class ParkedKeys:
    """Which records wait in a retry topic, and writing that they wait."""

    def __init__(self, table: EntryTable, most_records: int = _MOST_RECORDS) -> None:
        """Prepare.

        Args:
            table: Holds an entry for each record that waits.
            most_records: So many records wait at most, because each process keeps all of them in memory.
        """
        self._table = table
        self._keys: dict[tuple[TopicPartition, bytes | None], dict[int, int]] = {}
        self._most_records, self._records = most_records, 0
        self._caught_up: dict[TopicPartition, int] = {}
        self._ending: dict[tuple[TopicPartition, int], asyncio.Event] = {}
        """Records whose tombstones are being written; the event is set where a write has failed, so it is in doubt."""
        table.watch("", self._take)

    def _take(self, entry: str, value: bytes | None) -> None:
        topic, partition, offset, key = msgspec.json.decode(entry, type=_Place)
        place = TopicPartition(topic, partition), key
        if value is not None:
            waiting = self._keys.setdefault(place, {})
            self._records += offset not in waiting
            waiting[offset] = self._table.offset_of(entry)
        elif place in self._keys:
            self._records -= self._keys[place].pop(offset, None) is not None
            if not self._keys[place]:
                del self._keys[place]

    def of(self, record: Record) -> Mapping[int, int]:
        """Return the records of a record's key that wait: own offset to the offset of the entry."""
        return self._keys.get((record.topic_partition, record.key), _NONE)

    def entries(self) -> Iterator[ParkedEntry]:
        """Yield what waits: keys that are blocked for longest first, the last record of a key first."""
        for (partition, key), waiting in self._keys.items():
            for offset, position in sorted(waiting.items(), reverse=True):
                yield ParkedEntry(partition, key, offset, position)

    async def read_to_end(self) -> None:
        """Wait until all is read that is written by now.

        Raises:
            HeadraceError: It takes too long.
        """
        await self._table.read_to_end(_READ_SECONDS)

    async def catch_up(self, delivery: Delivery, entry: int = -1) -> None:
        """Wait until an entry is read, and once per assignment until all is that was written before it.

        Raises:
            DestinationUnavailable: It takes too long; the delivery is to be repeated.
        """
        try:
            if self._caught_up.get(delivery.partition) != delivery.epoch:
                await self.read_to_end()
                self._caught_up[delivery.partition] = delivery.epoch
            await self._table.reach(entry + 1, _READ_SECONDS)
        except HeadraceError as cause:
            raise DestinationUnavailable(f"the table of blocked keys is not read: {cause}") from cause

    async def park(self, records: Sequence[Record]) -> list[int]:
        """Write that records wait, and return the offsets of their entries.

        An entry whose tombstone is under way, or in doubt, counts no more: a new one is written behind the tombstone.

        Raises:
            DeadLetterFailed: It is not written.
        """
        ending = [self._ending.get(_place(record)) for record in records] if self._ending else ()
        for event in filter(None, ending):
            await event.wait()
        known = [None if _place(record) in self._ending else self.of(record).get(record.offset) for record in records]
        fresh = [record for record, entry in zip(records, known, strict=True) if entry is None]
        if fresh and self._records + len(fresh) > self._most_records:
            raise DeadLetterFailed(
                f"{self._records} records wait in the retry topic with blocked keys, and that is the most: "
                "repair what makes them fail, or skip records (headrace reactive skip)"
            )
        written = iter(await self._write(fresh, _ENTRY) if fresh else ())
        for record in fresh:
            self._ending.pop(_place(record), None)
        return [next(written) if entry is None else entry for entry in known]

    async def end(self, record: Record) -> None:
        """Write that a record waits no longer.

        Raises:
            DeadLetterFailed: It is not written.
        """
        ending = self._ending[_place(record)] = asyncio.Event()
        try:
            await self._write([record], None)
            self._ending.pop(_place(record), None)
        finally:
            ending.set()

    async def _write(self, records: Sequence[Record], value: bytes | None) -> list[int]:
        """Write, and read back: the topic alone says what waits. Returns the offsets."""
        keys = [
            msgspec.json.encode((*record.topic_partition, record.offset, record.key)).decode() for record in records
        ]
        try:
            return await self._table.put_all(dict.fromkeys(keys, value), _WRITE_SECONDS)
        except HeadraceError as cause:
            raise DeadLetterFailed(f"blocked keys are not written: {cause}") from cause


def _place(record: Record) -> tuple[TopicPartition, int]:
    return record.topic_partition, record.offset


class KeyOrder:
    """Keeps records from a destination that have to wait behind parked ones of their key."""

    def __init__(
        self, inner: Destination, parked: ParkedKeys, park: Callable[[Sequence[DeadLetter]], Awaitable[Any]]
    ) -> None:
        """Prepare.

        Args:
            inner: Who takes the other records.
            parked: The keys with records in the tier.
            park: Puts records into the tier, as one that failed.
        """
        self._inner = inner
        self._parked = parked
        self._park = park

    async def deliver(self, delivery: Delivery) -> Sequence[Outcome]:
        """Deliver the records whose keys are free, and have the others wait; those have ended here.

        Raises:
            DeliveryError: No record has ended. If one has, the outcomes say which have not.
        """
        await self._parked.catch_up(delivery)
        free, behind = [], []
        for record in delivery.records:
            waiting = self._parked.of(record) if record.key is not None else _NONE
            if not waiting:
                free.append(record)
            elif record.offset in waiting or record.offset > max(waiting):
                behind.append(record)
        outcomes = await self._wait(delivery, behind) if behind else {}
        if free:
            try:
                answered = await self._inner.deliver(delivery._replace(records=free))
            except DeliveryError as cause:
                if len(free) + len(outcomes) == len(delivery.records):
                    raise
                answered = [not_taken(cause)] * len(free)
            outcomes |= zip([record.offset for record in free], answered, strict=True)
        return [outcomes.get(record.offset, ELSEWHERE) for record in delivery.records]

    async def _wait(self, delivery: Delivery, records: Sequence[Record]) -> dict[int, Outcome]:
        """Put records into the retry topic; return the outcomes of those that are not in it, by their offsets."""
        try:
            await self._park([DeadLetter(record, delivery.group, 0, _PARKED, 0.0, 0.0) for record in records])
        except DeadLetterFailed as failure:
            missing = failure.parameters.get("missing", range(len(records)))
            if len(missing) == len(delivery.records):
                raise
            return {records[place].offset: not_taken(failure) for place in missing}
        return {}
