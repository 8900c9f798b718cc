"""The outputs and dead letters of an exactly-once trigger, until the offsets of their records are committed."""

import asyncio
import math
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from headrace.delivery.dead_letter import REFUSALS, DeadLetterTopic
from headrace.delivery.outcomes import DeadLetter, Outcome
from headrace.errors import HeadraceError, RecordTooLarge
from headrace.kafka.transactions.transaction_job import OF_BATCH
from headrace.records import NO_OFFSET, OutgoingRecord, Produced, Record, RecordBatch, TopicPartition

_EARLY_BYTES: Final = 4_194_304
"""Bytes of completed outputs above which the transaction is committed early."""
_MOST_BYTES: Final = 33_554_432
"""Bytes of completed outputs above which frames wait for the end of a transaction."""
_RECORD_BYTES: Final = 100
"""Overhead per output."""
_MAX_REFUSED: Final = 100_000
"""More than can be in flight."""
_HELD: Final = Produced(-1, NO_OFFSET)
_OF: ContextVar[Record] = ContextVar("the record whose dead letter is written")


class HeldOutput(NamedTuple):
    """An output or dead letter, and the offset of its record."""

    offset: int
    record: OutgoingRecord


class HeldOutputs:
    """The outputs and dead letters of one trigger by their record; also writes its dead letters, for the pump.

    An output is pending until its record is completed. A record that is delivered again makes its outputs again.
    """

    def __init__(self, *, compressed: bool = False) -> None:
        self._compressed = compressed
        self.dead_letters: DeadLetterTopic | None = None
        """Makes the dead letters; its `produce` is that of this object."""
        self.early = asyncio.Event()
        """Set while the completed outputs should be committed now."""
        self._pending: dict[TopicPartition, dict[int, list[OutgoingRecord]]] = {}
        self._completed: dict[TopicPartition, list[HeldOutput]] = {}
        self._size_bytes = 0
        self._space = asyncio.Event()
        self._space.set()
        self._refused: dict[tuple[TopicPartition, int, str], tuple[int, HeadraceError]] = {}
        """Outputs that Kafka refused, by the record and their topic: the size, and why."""

    async def begin(self, records: RecordBatch) -> None:
        """Drop the outputs of an earlier attempt of these records; wait while there are too many bytes."""
        await self._space.wait()
        if pending := self._pending.get(records.topic_partition):
            for offset in records.offsets:
                pending.pop(offset, None)

    def hold(
        self, partition: TopicPartition, offsets: Sequence[int], outputs: Sequence[OutgoingRecord]
    ) -> Sequence[Produced | HeadraceError]:
        """Hold outputs of records with these offsets; an output that Kafka has refused is refused again."""
        pending = self._pending.setdefault(partition, {})
        for offset, output in zip(offsets, outputs, strict=True):
            pending.setdefault(offset, []).append(output)
        if not self._refused:
            return [_HELD] * len(outputs)
        return [self._refusal(partition, *each) or _HELD for each in zip(offsets, outputs, strict=True)]

    async def write(self, dead_letters: Sequence[DeadLetter]) -> None:
        """Hold dead letters; see `DeadLetterWriter`."""
        assert self.dead_letters
        for dead_letter in dead_letters:
            _OF.set(dead_letter.record)
            await self.dead_letters.write([dead_letter])

    async def produce(self, records: Sequence[OutgoingRecord]) -> Sequence[Produced | HeadraceError]:
        """Hold the dead letter of the record that `write` has begun; it replaces the outputs of the record."""
        partition, offset = _OF.get().topic_partition, _OF.get().offset
        self._pending.get(partition, {}).pop(offset, None)
        return self.hold(partition, [offset] * len(records), records)

    def completed(self, records: RecordBatch, how: Outcome) -> None:
        """Take the outputs of completed records, to commit them with the offsets."""
        partition = records.topic_partition
        pending = self._pending.get(partition)
        if not pending:
            return
        completed = self._completed.setdefault(partition, [])
        for offset in records.offsets:
            outputs = pending.pop(offset, ())
            if how is Outcome.DELIVERED or how is Outcome.DEAD_LETTER:
                completed += [HeldOutput(offset, output) for output in outputs]
                self._count(outputs, 1)

    def take(self, partition: TopicPartition) -> list[HeldOutput]:
        """Return and remove the outputs of completed records of a partition; their bytes count until `release`."""
        return self._completed.pop(partition, [])

    def release(self, outputs: Iterable[HeldOutput]) -> None:
        """Release the bytes of outputs that are committed or dropped."""
        self._count([output.record for output in outputs], -1)

    def drop(self, partitions: Collection[TopicPartition]) -> None:
        """Forget the outputs of partitions: their records are delivered again."""
        for partition in partitions:
            self._pending.pop(partition, None)
            self.release(self.take(partition))

    def refuse(
        self, outputs: Sequence[tuple[TopicPartition, HeldOutput]], results: Sequence[Any]
    ) -> dict[tuple[TopicPartition, int], HeadraceError]:
        """Keep which outputs Kafka rejected, so that their records fail instead of the next transaction.

        Kafka names only the first output that is too large. Others of its topic that are as large count as rejected
        too, unless they are compressed. A refusal that may be of another record in the batch counts only if the
        transaction has one record. Return the records of these outputs, and why each was rejected.
        """
        alone, found = len({(partition, output.offset) for partition, output in outputs}) == 1, {}
        results = [
            why if type(why) in REFUSALS and (alone or not why.parameters.get(OF_BATCH)) else None for why in results
        ]
        refused = [(one.record, why) for (_, one), why in zip(outputs, results, strict=True) if why]
        refused.sort(key=lambda each: -each[0].size_bytes)
        large = [each for each in refused if isinstance(each[1], RecordTooLarge) and not self._compressed]
        least = {record.topic: (record.size_bytes, why) for record, why in large}
        for (partition, (offset, record)), result in zip(outputs, results, strict=True):
            size_bytes, why = (0, result) if result else least.get(record.topic, (math.inf, result))
            if record.size_bytes >= size_bytes:
                self._refused[partition, offset, record.topic] = record.size_bytes, why
                found[partition, offset] = why
        while len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        return found

    def _refusal(self, partition: TopicPartition, offset: int, output: OutgoingRecord) -> HeadraceError | None:
        size_bytes, error = self._refused.get((partition, offset, output.topic), (0, None))
        return error if error and output.size_bytes >= size_bytes else None

    def _count(self, outputs: Iterable[OutgoingRecord], sign: int) -> None:
        self._size_bytes += sign * sum([_RECORD_BYTES + output.size_bytes for output in outputs])
        (self.early.set if self._size_bytes > _EARLY_BYTES else self.early.clear)()
        (self._space.set if self._size_bytes < _MOST_BYTES else self._space.clear)()
