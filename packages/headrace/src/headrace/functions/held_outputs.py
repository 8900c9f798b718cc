"""The outputs and dead letters of an exactly-once trigger, until the offsets of their records are committed."""

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from itertools import compress
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


HeldOutput = tuple[TopicPartition, int, OutgoingRecord]
"""An output or dead letter, behind the partition and offset of its record."""


class HeldRun(NamedTuple):
    """Outputs or dead letters of records of one partition, in the order of these, as columns."""

    partition: TopicPartition
    offsets: Sequence[int]
    """Of the record of each output."""
    records: Sequence[OutgoingRecord]
    size_bytes: int

    @staticmethod
    def of(partition: TopicPartition, offsets: Sequence[int], records: Sequence[OutgoingRecord]) -> "HeldRun":
        sizes = [r.size_bytes if r.headers else len(r.key or b"") + len(r.value or b"") for r in records]
        return HeldRun(partition, offsets, records, sum(sizes) + _RECORD_BYTES * len(sizes))

    def where(self, is_selected: Callable[[int], bool]) -> "HeldRun":
        """Return the outputs of the records with selected offsets."""
        selected = [*map(is_selected, self.offsets)]
        if all(selected):
            return self
        return HeldRun.of(self.partition, [*compress(self.offsets, selected)], [*compress(self.records, selected)])


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
        self._pending: dict[TopicPartition, list[HeldRun]] = {}
        self._completed: dict[TopicPartition, list[HeldRun]] = {}
        self._size_bytes = 0
        self._space = asyncio.Event()
        self._space.set()
        self._refused: dict[tuple[TopicPartition, int, str], tuple[int, HeadraceError]] = {}
        """Outputs that Kafka refused, by the record and their topic: the size, and why."""

    async def begin(self, records: RecordBatch) -> None:
        """Drop the outputs of an earlier attempt of these records; wait while there are too many bytes."""
        await self._space.wait()
        self._take_pending(records.topic_partition, records.offsets)

    def hold(
        self, partition: TopicPartition, offsets: Sequence[int], outputs: Sequence[OutgoingRecord]
    ) -> Sequence[Produced | HeadraceError]:
        """Hold outputs of records with these offsets; an output that Kafka has refused is refused again."""
        self._pending.setdefault(partition, []).append(HeldRun.of(partition, offsets, outputs))
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
        self._take_pending(partition, [offset])
        return self.hold(partition, [offset] * len(records), records)

    def completed(self, records: RecordBatch, how: Outcome) -> None:
        """Take the outputs of completed records, to commit them with the offsets."""
        runs = self._take_pending(records.topic_partition, records.offsets)
        if runs and (how is Outcome.DELIVERED or how is Outcome.DEAD_LETTER):
            self._completed.setdefault(records.topic_partition, []).extend(runs)
            self._count(runs, 1)

    def _take_pending(self, partition: TopicPartition, offsets: Sequence[int]) -> list[HeldRun]:
        """Return and remove the outputs of records that are not completed; each run has some."""
        taken, left = list[HeldRun](), list[HeldRun]()
        for run in self._pending.pop(partition, ()):
            if run.offsets == offsets:  # one output for each record, as in most frames
                taken.append(run)
            else:
                taken.append(run.where({*offsets}.__contains__))
                left.append(run.where({*run.offsets}.difference(offsets).__contains__))
        if left := [run for run in left if run.offsets]:
            self._pending[partition] = left
        return [run for run in taken if run.offsets]

    def take(self, partition: TopicPartition) -> list[HeldRun]:
        """Return and remove the outputs of completed records of a partition; their bytes count until `release`."""
        return self._completed.pop(partition, [])

    def release(self, runs: Iterable[HeldRun]) -> None:
        """Release the bytes of outputs that are committed or dropped."""
        self._count(runs, -1)

    def drop(self, partitions: Collection[TopicPartition]) -> None:
        """Forget the outputs of partitions: their records are delivered again."""
        for partition in partitions:
            self._pending.pop(partition, None)
            self.release(self.take(partition))

    def refuse(
        self, outputs: Sequence[HeldOutput], results: Sequence[Any]
    ) -> dict[tuple[TopicPartition, int], HeadraceError]:
        """Keep which outputs Kafka rejected, so that their records fail instead of the next transaction.

        Kafka names only the first output that is too large. Others of its topic that are as large count as rejected
        too, unless they are compressed. A refusal that may be of another record in the batch counts only if the
        transaction has one record. Return the records of these outputs, and why each was rejected.
        """
        alone, found = len({output[:2] for output in outputs}) == 1, {}
        results = [
            why if type(why) in REFUSALS and (alone or not why.parameters.get(OF_BATCH)) else None for why in results
        ]
        refused = [(record, why) for (*_, record), why in zip(outputs, results, strict=True) if why]
        refused.sort(key=lambda each: -each[0].size_bytes)
        large = [each for each in refused if isinstance(each[1], RecordTooLarge) and not self._compressed]
        least = {record.topic: (record.size_bytes, why) for record, why in large}
        for (partition, offset, record), result in zip(outputs, results, strict=True):
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

    def _count(self, runs: Iterable[HeldRun], sign: int) -> None:
        self._size_bytes += sign * sum([run.size_bytes for run in runs])
        (self.early.set if self._size_bytes > _EARLY_BYTES else self.early.clear)()
        (self._space.set if self._size_bytes < _MOST_BYTES else self._space.clear)()
