"""Blocked keys: the order of a key is kept while a record of it waits in a retry topic.

A compacted topic lists the records that wait: an entry per record, and its tombstone once the record is completed.
While a key has entries, its later records follow them into the retry topic. The order of the writes keeps this correct:

1. The entry is acknowledged before the record is written to the retry topic. That write is acknowledged before the
   record is completed in its own topic. So a key is never free while a record of it waits.
2. The tombstone is acknowledged after the record was delivered from the retry topic, and before it is completed there.
   So a copy that a crash leaves in the retry topic is recognised, and not delivered after later records of its key.
3. A process that takes over a partition first reads the topic up to its current end.

After a crash a record is received again. It was already completed if it has no entry and a later record of its key has
one: otherwise the later record would not wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.delivery.lane import Lane
from headrace.delivery.outcomes import HANDED_OFF, DeadLetter, DelayedRecord, Delivery, Destination, Reply, not_taken
from headrace.errors import DeadLetterFailed, DeliveryError, DestinationUnavailable, HeadraceError
from headrace.records import Offsets, Record, TopicPartition
from headrace.runtime import Clock, Service

log = logging.getLogger(__name__)

_ENTRY = b"waits"
_READ_SECONDS = 30.0
_WRITE_SECONDS = 150.0
"""Longer than the delivery timeout of the producer, so the error of the producer comes first."""
_MOST_RECORDS = 250_000
_ROUND_SECONDS = 60.0
_MOST_ENTRIES = 1000
_BLOCKED = Reply("Blocked", "an earlier record of its key waits in a retry topic")
_Key = tuple[str, int, int, bytes]
_NONE: Mapping[int, int] = {}


class BlockedEntry(NamedTuple):
    """A record that blocks its key."""

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

    @property
    def topic_id(self) -> str:
        """Kafka's id of the topic; it changes when the topic is created again."""

    async def put_all(self, entries: Mapping[str, bytes | None], limit_seconds: float) -> list[int]:
        """Write entries, wait until they are read back, and return their offsets."""

    async def read_to_end(self, limit_seconds: float) -> None:
        """Read everything that is written up to now."""

    async def reach(self, position: int, limit_seconds: float) -> None:
        """Wait until everything before an offset is read."""


class BlockedKeys:
    """Which records wait in a retry topic, and writing that they wait."""

    def __init__(self, table: EntryTable, most_records: int = _MOST_RECORDS) -> None:
        """Prepare; each process keeps `most_records` in memory."""
        self._table = table
        self._keys: dict[tuple[TopicPartition, bytes | None], dict[int, int]] = {}
        self._most_records, self._records = most_records, 0
        self._caught_up: dict[TopicPartition, int] = {}
        self._ending: dict[tuple[TopicPartition, int], asyncio.Event] = {}
        """Records whose tombstones are being written. The event is set if a write failed, and may have happened."""
        table.watch("", self._take)

    def _take(self, entry: str, value: bytes | None) -> None:
        try:
            topic, partition, offset, key = msgspec.json.decode(entry, type=_Key)
        except ValueError as cause:
            log.error(
                "ignored the entry %.200r in a table of blocked keys, which has an unknown form: %s", entry, cause
            )
            return
        blocked = TopicPartition(topic, partition), key
        if value is not None:
            waiting = self._keys.setdefault(blocked, {})
            self._records += offset not in waiting
            waiting[offset] = self._table.offset_of(entry)
        elif blocked in self._keys:
            self._records -= self._keys[blocked].pop(offset, None) is not None
            if not self._keys[blocked]:
                del self._keys[blocked]

    def of(self, record: Record) -> Mapping[int, int]:
        """Return the records that wait with the same key: their offsets, each with the offset of its entry."""
        return self._keys.get((record.topic_partition, record.key), _NONE)

    def entries(self) -> Iterator[BlockedEntry]:
        """Yield what waits: keys blocked for longest first, the last record of a key first."""
        for (partition, key), waiting in self._keys.items():
            for offset, position in sorted(waiting.items(), reverse=True):
                yield BlockedEntry(partition, key, offset, position)

    async def read_to_end(self) -> None:
        """Read everything that is written up to now.

        Raises:
            HeadraceError: It timed out.
        """
        await self._table.read_to_end(_READ_SECONDS)

    async def catch_up(self, delivery: Delivery, entry: int = -1) -> None:
        """Wait until an entry is read, and once per assignment until everything written before is read.

        Raises:
            DestinationUnavailable: It timed out; repeat the delivery.
        """
        try:
            if self._caught_up.get(delivery.partition) != delivery.epoch:
                await self.read_to_end()
                self._caught_up[delivery.partition] = delivery.epoch
            await self._table.reach(entry + 1, _READ_SECONDS)
        except HeadraceError as cause:
            raise DestinationUnavailable(f"failed to read the table of blocked keys: {cause}") from cause

    async def is_waiting(self, delivery: Delivery, delayed: DelayedRecord) -> bool:
        """Return whether a record of a retry topic still waits, and is not already completed.

        It also counts as waiting if the topic of blocked keys was created again since: then it may be delivered twice.

        Raises:
            DestinationUnavailable: The topic cannot be read; repeat the delivery.
        """
        await self.catch_up(delivery, self._entry_of(delayed))
        return self._entry_of(delayed) < 0 or delayed.origin.offset in self.of(delayed.origin)

    def _entry_of(self, delayed: DelayedRecord) -> int:
        """Return the offset of an entry; -1 if it was in an earlier topic of the same name."""
        is_present = delayed.table_id in ("", self._table.topic_id)
        return delayed.entry if is_present and delayed.entry is not None else -1

    async def block(self, records: Sequence[Record]) -> list[int]:
        """Write entries of records, and return their offsets.

        An entry whose tombstone is in flight, or may have been written, no longer counts: a new entry follows it.

        Raises:
            DeadLetterFailed: The write failed, or the limit is reached.
        """
        ending = [self._ending.get(_identity(record)) for record in records] if self._ending else ()
        for event in filter(None, ending):
            await event.wait()
        known = [None if _identity(each) in self._ending else self.of(each).get(each.offset) for each in records]
        fresh = [record for record, entry in zip(records, known, strict=True) if entry is None]
        if fresh and self._records + len(fresh) > self._most_records:
            raise DeadLetterFailed(
                f"limit reached: {self._records} records with blocked keys wait in the retry topic; "
                "repair what makes them fail, or skip records"
            )
        written = iter(await self._write(fresh, _ENTRY) if fresh else ())
        for record in fresh:
            self._ending.pop(_identity(record), None)
        return [next(written) if entry is None else entry for entry in known]

    async def unblock(self, *records: Record) -> None:
        """Write the tombstones of records, or raise DeadLetterFailed."""
        ending, identities = asyncio.Event(), [_identity(record) for record in records]
        self._ending |= dict.fromkeys(identities, ending)
        try:
            await self._write(records, None)
            for identity in identities:
                self._ending.pop(identity, None)
        finally:
            ending.set()

    async def complete(self, delayed: DelayedRecord) -> None:
        """Unblock the key of a record that is completed in the retry topic, unless it waits there again.

        Raises:
            DeadLetterFailed: The write failed.
        """
        record = delayed.origin
        try:
            await self._table.reach(self._entry_of(delayed) + 1, _READ_SECONDS)
        except HeadraceError as cause:
            raise DeadLetterFailed(f"failed to read the table of blocked keys: {cause}") from cause
        if self.of(record).get(record.offset) == self._entry_of(delayed):
            await self.unblock(record)

    @property
    def table_id(self) -> str:
        """Kafka's id of the topic of blocked keys."""
        return self._table.topic_id

    async def rewind(self, partition: TopicPartition, offset: int) -> None:
        """Unblock the keys of all records of a partition from an offset on, or raise DeadLetterFailed."""
        records = [Record(*partition, offset, 0, None, None)]  # once this is read back, so is every earlier entry
        while records:
            await self.unblock(*records)
            entries = islice(
                (e for e in self.entries() if e.partition == partition and e.offset >= offset), _MOST_ENTRIES
            )
            records = [entry.record for entry in entries]

    async def _write(self, records: Sequence[Record], value: bytes | None) -> list[int]:
        """Write entries or tombstones, read them back, and return their offsets."""
        keys = [msgspec.json.encode((*each.topic_partition, each.offset, each.key)).decode() for each in records]
        try:
            return await self._table.put_all(dict.fromkeys(keys, value), _WRITE_SECONDS)
        except HeadraceError as cause:
            raise DeadLetterFailed(f"failed to write blocked keys: {cause}") from cause


def _identity(record: Record) -> tuple[TopicPartition, int]:
    return record.topic_partition, record.offset


class KeyOrder:
    """A destination that sends records of blocked keys to the retry topic, and delivers the others."""

    def __init__(
        self, inner: Destination, blocked: BlockedKeys, delay: Callable[[Sequence[DeadLetter]], Awaitable[Any]]
    ) -> None:
        """Prepare; `delay` writes records to the retry topic, as if they had failed."""
        self._inner = inner
        self._blocked = blocked
        self._delay = delay

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        """Deliver the records whose keys are free, and delay the others, which are completed here.

        Raises:
            DeliveryError: No record is completed. If one is, the replies show which are not.
        """
        await self._blocked.catch_up(delivery)
        free, blocked = [], []
        for record in delivery.records:
            waiting = self._blocked.of(record) if record.key is not None else _NONE
            if not waiting:
                free.append(record)
            elif record.offset in waiting or record.offset > max(waiting):
                blocked.append(record)
        replies = await self._delay_all(delivery, blocked) if blocked else {}
        if free:
            try:
                answered = await self._inner.deliver(delivery._replace(records=free))
            except DeliveryError as cause:
                if len(free) + len(replies) == len(delivery.records):
                    raise
                answered = [not_taken(cause)] * len(free)
            replies |= zip([record.offset for record in free], answered, strict=True)
        return [replies.get(record.offset, HANDED_OFF) for record in delivery.records]

    async def _delay_all(self, delivery: Delivery, records: Sequence[Record]) -> dict[int, Reply]:
        """Write records to the retry topic; return by offset the replies for those that were not written."""
        try:
            await self._delay([DeadLetter(record, delivery.group, 0, _BLOCKED, 0.0, 0.0) for record in records])
        except DeadLetterFailed as failure:
            missing = failure.parameters.get("missing", range(len(records)))
            if len(missing) == len(delivery.records):
                raise
            return {records[index].offset: not_taken(failure) for index in missing}
        return {}


class StaleEntries(Service):
    """Unblocks keys whose record is not in the retry topic and will never be.

    An entry is written before its record. A seek past the record, a crash between the two writes, or the retention
    of the retry topic leaves an entry without a record. It is stale when two things have happened. The source partition
    is committed past the record. Then the retry topic is committed past everything that was written by that time.
    """

    def __init__(
        self,
        name: str,
        blocked: BlockedKeys,
        lanes: Mapping[TopicPartition, Lane],
        ends: Callable[[], Awaitable[Offsets]],
        committed: Callable[[], Awaitable[Offsets]],
        clock: Clock,
        late_seconds: float,
    ) -> None:
        """Prepare; `ends` and `committed` are of the retry topic. A dead process may write for `late_seconds`."""
        super().__init__(name)
        self._blocked, self._lanes, self._clock = blocked, lanes, clock
        self._ends, self._committed, self._late_seconds = ends, committed, late_seconds

    async def run(self) -> None:
        while True:
            await self._clock.sleep(_ROUND_SECONDS)
            try:
                await self._unblock_stale()
            except HeadraceError as error:
                log.info("%s: will retry in a minute: %s", self.name, error.description)

    async def _unblock_stale(self) -> None:
        passed = {
            entry: self._lanes[entry.partition].tracker.epoch
            for entry in islice(filter(self._is_passed, self._blocked.entries()), _MOST_ENTRIES)
        }
        if not passed:
            return
        await self._clock.sleep(self._late_seconds)
        ends = await self._ends()
        while passed:
            committed = await self._committed()
            await self._blocked.read_to_end()
            left = {*self._blocked.entries()}
            passed = {each: epoch for each, epoch in passed.items() if each in left and self._is_assigned(each, epoch)}
            if all(committed.get(partition, 0) >= end for partition, end in ends.items()):
                break
            await self._clock.sleep(_ROUND_SECONDS)
        for entry, epoch in passed.items():
            # Each write takes time. The last record of a key is first: a record that is received again below one that
            # waits counts as completed.
            if not self._is_assigned(entry, epoch):
                continue
            await self._blocked.unblock(entry.record)
            log.warning(
                "%s: unblocked the key of offset %d of %s: no record with this key is in the retry topic",
                self.name,
                entry.offset,
                entry.partition,
            )

    def _is_passed(self, entry: BlockedEntry) -> bool:
        lane = self._lanes.get(entry.partition)
        return lane is not None and lane.tracker.frontier > entry.offset

    def _is_assigned(self, entry: BlockedEntry, epoch: int) -> bool:
        """Whether the partition is in the same assignment; a seek back may bring the record again."""
        lane = self._lanes.get(entry.partition)
        return lane is not None and lane.tracker.epoch == epoch and not lane.condition.is_ending
