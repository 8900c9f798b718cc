"""Exactly once: the outputs of records and the offsets of these records are committed in one transaction, or neither.

Each trigger has one transactional producer, and one transaction at a time. So the offsets of a partition are never in
two open transactions, whichever worker has the partition. Source: KIP-98, KIP-447.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from headrace.delivery.context import Batch
from headrace.delivery.lane import Lane
from headrace.delivery.protocols import DeadLetterWriter, Destination, Outcome, Reply
from headrace.delivery.pump import Pump
from headrace.errors import HeadraceError, KafkaUnavailable, ProducerQueueFull
from headrace.functions.held_outputs import HeldOutput, HeldOutputs
from headrace.kafka import Consumer, GroupTransactions
from headrace.lifecycle import Deadline, Readiness
from headrace.records import CommitOffsets, Committed, Epochs, OutgoingRecord, Record, RecordBatch, TopicPartition

log = logging.getLogger(__name__)

_COMMIT_SECONDS: Final = 0.1
_HANDLERS_PART: Final = 0.6
"""The part of a drain's time that handlers have; the rest is for the transaction."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0


class TransactionalPump(Pump):
    """Commits what has ended in transactions, with its outputs; after one that failed its records are delivered again.

    An offset is taken together with the outputs of what ended below it, in one turn of the loop.
    """

    def __init__(
        self,
        name: str,
        group: str,
        destination: Destination,
        dead_letters: DeadLetterWriter | None,
        *,
        held: HeldOutputs,
        transactions: GroupTransactions,
        on_written: Callable[[Sequence[OutgoingRecord], Sequence[Any]], None] | None = None,
        **others: Any,
    ) -> None:
        """Prepare; the arguments of `Pump`, and what holds the outputs and writes the transactions."""
        super().__init__(name, group, destination, held if dead_letters else None, **others)
        self._held, self._transactions, self._on_written = held, transactions, on_written
        self._next: dict[TopicPartition, Committed] = {}
        """Offsets for the next transaction."""
        self._tried: dict[TopicPartition, dict[int, tuple[Batch, float]] | None] = {}
        """What failed in lanes that begin again."""
        self._one_at_a_time = asyncio.Lock()
        self._failures = 0
        """Transactions that failed in a row."""
        self._problem = ""

    @property
    def _consumer(self) -> Consumer:
        assert isinstance(self.source, Consumer)
        return self.source

    def readiness(self) -> Readiness:
        return Readiness(False, f"transactions fail: {self._problem}") if self._problem else super().readiness()

    def on_assigned(self, partitions: Epochs, committed: CommitOffsets) -> None:
        super().on_assigned(partitions, committed)
        for partition in partitions:
            self._lanes[partition].tried = self._tried.get(partition, {})
        self._drop(partitions)  # of an assignment before

    async def on_revoked(
        self, partitions: Sequence[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, Committed]:
        """End the transaction of these partitions; the consumer itself has nothing to commit."""
        await super().on_revoked(partitions, deadline)
        self._drop([each for each in partitions if each not in self._lanes])  # a late revoke: it may be assigned anew
        self._problem = self._problem if self._lanes else ""
        return {}

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        super().on_lost(partitions)
        self._drop(partitions)
        self._problem = self._problem if self._lanes else ""

    async def drain_lanes(self, lanes: Sequence[Lane], deadline: Deadline, why: str = "", fenced: str = "") -> None:
        """Drain, then end the transaction; a seek waits for its end without limit, or it could undo the seek."""
        handlers = Deadline(self._context.clock, deadline.remaining_seconds * _HANDLERS_PART)
        await super().drain_lanes(lanes, handlers, why, fenced)
        while fenced and any(self._consumer.is_committing(lane.partition) for lane in lanes):
            await self._context.clock.sleep(_COMMIT_SECONDS)  # or what has ended would be left out
        committing = self.spawn(self._commit_ended(), "commit")
        await asyncio.wait([committing], timeout=None if fenced else deadline.remaining_seconds)

    def report(self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply]) -> None:
        self._held.ended(RecordBatch.of(records), how)
        super().report(records, size_bytes, how, replies)

    def _commit(self, offsets: CommitOffsets) -> None:
        self._next.update(offsets)

    async def _commit_often(self) -> None:
        self._transactions.open()  # which ends what a process before has left open
        while True:
            await self._changed.wait()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_COMMIT_SECONDS):
                    await self._held.early.wait()
            await self._commit_ended()

    async def _commit_ended(self) -> None:
        """Commit what has ended by now in one transaction, and wait for its outcome."""
        async with self._one_at_a_time:
            self.commit_now()
            # A commit of the position at the start must not follow the transaction.
            ready = [partition for partition in self._next if not self._consumer.is_committing(partition)]
            offsets = {partition: self._next.pop(partition) for partition in ready}
            if self._next:
                self._later(_COMMIT_SECONDS, self._changed.set)
            if offsets:
                outputs = [(partition, output) for partition in offsets for output in self._held.take(partition)]
                failure = await self._write(offsets, outputs)
                self._held.release(output for _, output in outputs)
                self._ended_with(failure, offsets, len(outputs))

    async def _write(
        self, offsets: CommitOffsets, outputs: Sequence[tuple[TopicPartition, HeldOutput]]
    ) -> HeadraceError | None:
        """Write a transaction, again while Kafka cannot be reached; return why it is not known to be committed."""
        records = [output.record for _, output in outputs]
        group, epochs = self._consumer.group_offsets(offsets), {p: self.epoch_of(p) for p in offsets}
        while True:
            try:
                results = await self._transactions.submit(records, group=group)
                failure = next((result for result in results if isinstance(result, HeadraceError)), None)
                if failure is None and self._on_written:
                    self._on_written(records, results)
                if self._held.refuse(outputs, results):
                    self._failures = 0  # the next transaction is without them
            except HeadraceError as cause:
                failure = cause
            if not isinstance(failure, KafkaUnavailable | ProducerQueueFull):
                return failure
            self._failed(failure)  # nothing was written, so handlers need not run again
            await self._context.clock.sleep(min(_LONGEST_PAUSE_SECONDS, self._failures * _PAUSE_SECONDS))
            if any(self.epoch_of(partition) not in (0, epoch) for partition, epoch in epochs.items()):
                return failure

    def _ended_with(self, failure: HeadraceError | None, offsets: dict[TopicPartition, Committed], count: int) -> None:
        lanes = [lane for partition in offsets if (lane := self._lanes.get(partition))]
        if failure is None:
            self._failures, self._problem = 0, ""
            for lane in lanes:
                end = offsets[lane.partition].offset
                lane.tried = lane.tried and {offset: each for offset, each in lane.tried.items() if offset >= end}
            return
        self._failed(failure)
        epochs = {lane.partition: lane.tracker.epoch for lane in lanes}
        why = f"the transaction of {count} outputs failed, and its records are delivered again"
        log.warning("%s: %s: %s", self.name, why, failure.description)
        self._fence(lanes, why)
        self._forget(lanes)
        self._drop(epochs)
        self._tried |= {lane.partition: lane.tried for lane in lanes}
        self.spawn(self._rewind(epochs), "rewind")

    def _failed(self, failure: HeadraceError) -> None:
        self._failures += 1
        self._problem = failure.description if self._failures > 1 else ""

    async def _rewind(self, epochs: Epochs) -> None:
        """Begin these assignments again after a pause, at what the group has committed."""
        if self._failures > 1:
            await self._context.clock.sleep(min(_LONGEST_PAUSE_SECONDS, self._failures * _PAUSE_SECONDS))
        self._consumer.rewind(epochs)

    def _drop(self, partitions: Collection[TopicPartition]) -> None:
        """Forget what is not committed of partitions, which comes again here or elsewhere."""
        self._held.drop(partitions)
        for partition in partitions:
            self._next.pop(partition, None)
            self._tried.pop(partition, None)
