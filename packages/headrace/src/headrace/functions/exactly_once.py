"""Exactly once: the outputs of records and the offsets of these records are committed in one transaction, or neither.

Each trigger has one transactional producer, and one transaction at a time. So the offsets of a partition are never in
two open transactions. Source: KIP-98, KIP-447.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from headrace import errors
from headrace.delivery.lane import Lane
from headrace.delivery.outcomes import DeadLetterWriter, Destination, Outcome, Reply
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import Batch, DeadLetterBatch, Work
from headrace.functions.held_outputs import HeldOutputs
from headrace.functions.portions import Event, Portion, firsts_of
from headrace.kafka import Consumer, GroupTransactions
from headrace.kafka.write_request import failures_of
from headrace.records import CommitOffsets, Committed, Epochs, OutgoingRecord, Record, RecordBatch, TopicPartition
from headrace.runtime import Deadline, Readiness

log = logging.getLogger(__name__)

_COMMIT_SECONDS: Final = 0.1
_HANDLERS_PART: Final = 0.6
"""The part of a drain's time that handlers have; the rest is for the transaction."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_CULPRITS: Final = (
    ((errors.TopicNotFound, errors.PartitionNotFound), True),
    ((errors.RecordRefused,), False),
    ((errors.KafkaUnauthorized,), False),
    ((errors.KafkaTimeout,), True),
)
"""Errors of outputs, and whether Kafka names the right records. The first kind may cause the others."""


_Blame = tuple[Mapping[Event, errors.HeadraceError], Mapping[Event, errors.HeadraceError]]
"""Events that are to blame; if none is known, events of which one is to blame."""


class _Apart(NamedTuple):
    """A partition whose outputs have failed: its transactions have no other partition until one is committed."""

    error: errors.HeadraceError
    failures: int
    """In a row."""


@dataclasses.dataclass
class _Round:
    """The transactions that commit one portion in parts."""

    lanes: Mapping[TopicPartition, Lane | None]
    """Of the assignment of the portion."""
    left: int
    """Failures without a culprit before the halving stops."""


_Tried = dict[int, tuple[Batch, float]]
"""By offset: the history of a record that failed, without the record, and when it is due."""


class ResumingLane(Lane):
    """A lane that begins again after a failed transaction: records that failed keep their attempts and pauses."""

    def __init__(self, *of_lane: Any, tried: _Tried) -> None:
        """Begin; the arguments of `Lane`, and what failed before and is not committed."""
        super().__init__(*of_lane)
        self.tried = tried
        if tried:
            self.retries.earlier.clear()  # this process knows more

    def take(self) -> Work:
        work = super().take()
        if isinstance(work, DeadLetterBatch) or self.retries.was_last:
            return work
        # They have not begun in this assignment, so their history is from the previous one.
        return work._replace(records=self._resume(work.records))

    def try_later(self, batch: Batch, why: str, seconds: float | None = None) -> None:
        seconds = self.pause_of(batch) if seconds is None else seconds
        history = batch._replace(records=RecordBatch.of(())), self._context.clock.monotonic() + seconds
        self.tried |= dict.fromkeys(batch.records.offsets, history)
        super().try_later(batch, why, seconds)

    def forget(self, end: int) -> None:
        """Forget what is known of records before this offset, which are committed."""
        self.tried = {offset: each for offset, each in self.tried.items() if offset >= end}

    def _resume(self, records: RecordBatch) -> RecordBatch:
        """Delay records that failed before; return those that may begin now."""
        if self.tried.keys().isdisjoint(records.offsets):
            return records
        fresh, in_turn = (Batch(RecordBatch.of(())), 0.0), self._context.ordering == "partition"
        history = [self.tried.get(offset, fresh) for offset in records.offsets]
        indexes = sorted(range(len(history)), key=lambda index: 0.0 if in_turn else history[index][1])
        runs = itertools.groupby(indexes, history.__getitem__)
        parts = [(batch._replace(records=records.select(run)), due) for (batch, due), run in runs]
        if in_turn:
            self.retries.behind += [batch for batch, _ in parts[:0:-1]]
        for batch, due in parts[:1] if in_turn else parts:
            if due:
                text = f"offset {batch.records.offsets[0]} failed before"
                self.try_later(batch, text, due - self._context.clock.monotonic())
        return RecordBatch.of(()) if parts[0][1] else parts[0][0].records


class TransactionalPump(Pump):
    """Commits completed records with their outputs in transactions; records of a failed one are delivered again.

    An offset is taken together with the outputs of the completed records below it, in one turn of the loop.
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
        self._held = held
        self._transactions = transactions
        self._on_written = on_written
        self._next: dict[TopicPartition, Committed] = {}
        """Offsets for the next transaction."""
        self._tried: dict[TopicPartition, _Tried] = {}
        """What failed in lanes that begin again."""
        self._committed: dict[TopicPartition, Committed] = {}
        self._apart: dict[TopicPartition, _Apart] = {}
        self._resting: dict[TopicPartition, str] = {}
        """Partitions that pause after a failed transaction, and why."""
        self._one_at_a_time = asyncio.Lock()
        self._failures = 0
        """Transactions that failed in a row."""
        self._problem = ""

    @property
    def _consumer(self) -> Consumer:
        assert isinstance(self.source, Consumer)
        return self.source

    def readiness(self) -> Readiness:
        if self._problem:
            return Readiness(False, f"transactions fail: {self._problem}")
        for partition, (error, failures) in self._apart.items():
            if failures > 1 and isinstance(error, errors.DestinationUnavailable):
                return Readiness(False, f"{partition} is stalled: {error.description}")
        return super().readiness()

    def on_assigned(self, partitions: Epochs, committed: CommitOffsets) -> None:
        super().on_assigned(partitions, committed)
        for partition in partitions:
            self._committed.pop(partition, None)
        self._committed |= committed
        self._drop(partitions)  # of an assignment before

    def _make_lane(self, partition: TopicPartition, epoch: int, at: Committed | None) -> Lane:
        tried = self._tried.get(partition, {})
        return ResumingLane(partition, epoch, at, self._context, self._deliverer.offer, tried=tried)

    async def on_revoked(
        self, partitions: Sequence[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, Committed]:
        """End the transaction of these partitions; the consumer itself has nothing to commit."""
        await super().on_revoked(partitions, deadline)
        self._leave([each for each in partitions if each not in self._lanes])  # a late revoke: it may be assigned again
        return {}

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        super().on_lost(partitions)
        self._leave(partitions)

    async def drain_lanes(self, lanes: Sequence[Lane], deadline: Deadline, why: str = "", fenced: str = "") -> None:
        """Drain, then end the transaction. A seek waits for its end without limit, or the commit could undo the seek.

        A seek fails if the position at the start is not committed in time: then the lanes begin again.
        """
        handlers = Deadline(self._context.clock, deadline.remaining_seconds * _HANDLERS_PART)
        await super().drain_lanes(lanes, handlers, why, fenced)
        while fenced and any(self._consumer.is_committing(lane.partition) for lane in lanes):
            if not deadline.remaining_seconds:
                present = [lane for lane in lanes if self._lanes.get(lane.partition) is lane]
                self._begin_again(present, errors.KafkaTimeout("the position at the start is not committed"), 0)
                return
            await self._context.clock.sleep(_COMMIT_SECONDS)  # or the transaction would omit completed records
        committing = self.spawn(self._commit_completed(), "commit")
        await asyncio.wait([committing], timeout=None if fenced else deadline.remaining_seconds)

    def report(self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply]) -> None:
        self._held.completed(RecordBatch.of(records), how)
        super().report(records, size_bytes, how, replies)

    def _commit(self, offsets: CommitOffsets) -> None:
        self._next.update(offsets)

    async def _commit_often(self) -> None:
        self._transactions.open()  # this aborts the open transaction of a former process
        while True:
            await self._changed.wait()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_COMMIT_SECONDS):
                    await self._held.early.wait()
            await self._commit_completed()

    async def _commit_completed(self) -> None:
        """Commit what is completed now in one transaction, and wait for its outcome."""
        async with self._one_at_a_time:
            self.commit_now()
            # A commit of the position at the start must not follow the transaction.
            ready = [partition for partition in self._next if not self._consumer.is_committing(partition)]
            offsets = {partition: self._next.pop(partition) for partition in ready}
            if self._next:
                self._later(_COMMIT_SECONDS, self._changed.set)
            if offsets:
                portion = Portion(offsets, [run for partition in offsets for run in self._held.take(partition)])
                await self._write_all(portion)
                self._held.release(portion.runs)

    async def _write_all(self, portion: Portion) -> None:
        """Commit a portion in one transaction; partitions whose outputs have failed before get one each.

        If it fails by its outputs, smaller transactions commit what they can, without further calls of the handler.
        """
        lanes = {partition: self._lanes.get(partition) for partition in portion.offsets}
        apart = [[partition] for partition in lanes if partition in self._apart]
        round_ = _Round(lanes, portion.halvings)
        try:
            for partitions in ([each for each in lanes if each not in self._apart], *apart):
                await self._write(portion.of(partitions), round_)
        except errors.HeadraceError as failure:
            self._failed(failure)
            pause = min(_LONGEST_PAUSE_SECONDS, self._failures * _PAUSE_SECONDS) if self._failures > 1 else 0
            left = [lanes[each] for each, at in portion.offsets.items() if self._committed.get(each) != at]
            self._begin_again(
                [lane for lane in left if lane and lane is self._lanes.get(lane.partition)], failure, pause
            )

    async def _write(
        self, portion: Portion, round_: _Round, suspects: Mapping[Event, errors.HeadraceError] = MappingProxyType({})
    ) -> bool:
        """Commit a portion, or parts of it; return whether an event of it is to blame for a failure.

        With `suspects`, one of which is to blame, only parts of it can be committed.

        Raises:
            errors.HeadraceError: A transaction failed, and not by its outputs, or its outcome is unknown.
        """
        portion = portion.of([each for each in portion.offsets if self._lanes.get(each) is round_.lanes[each]])
        if not portion.offsets:
            return False
        if not suspects or len(portion.events) == 1:
            blamed, suspects = await self._write_once(portion)
            if blamed:
                ends = firsts_of(blamed)
                await self._write(portion.before(ends, self._committed), round_)
                for partition, offset in ends.items():
                    self._set_apart(partition, blamed[partition, offset], round_)
                return True
            round_.left = round_.left - 1 if suspects else portion.halvings
            if not suspects:
                return False
            if not round_.left:
                raise next(iter(suspects.values()))
        first, second = portion.split(suspects, self._committed)
        found = await self._write(first, round_)
        return await self._write(second, round_, {} if found else suspects) or found

    async def _write_once(self, portion: Portion) -> _Blame:
        """Write a transaction, again while Kafka cannot be reached; return the events that are to blame or suspected.

        There are none if it is committed.
        """
        records = [*itertools.chain.from_iterable([run.records for run in portion.runs])]
        group, epochs = self._consumer.group_offsets(portion.offsets), {p: self.epoch_of(p) for p in portion.offsets}
        while True:
            try:
                results = await self._missing(portion) or await self._transactions.submit(records, group=group)
                if not (failures := failures_of(results)):
                    self._written(portion, records, results)
                    return {}, {}
                failure = min(failures, key=lambda each: type(each) is errors.TransactionAborted)
                if self._held.dead_letters:
                    self._held.dead_letters.forget()  # its topic may be gone
                blamed, suspects = self._blame(portion, results)
                if blamed or suspects:
                    return blamed, suspects
            except errors.HeadraceError as cause:
                failure = cause
            if not isinstance(failure, errors.KafkaUnavailable | errors.ProducerQueueFull):
                raise failure
            self._failed(failure)  # nothing was written, so handlers need not run again
            await self._context.clock.sleep(min(_LONGEST_PAUSE_SECONDS, self._failures * _PAUSE_SECONDS))
            if any(self.epoch_of(partition) not in (0, epoch) for partition, epoch in epochs.items()):
                raise failure

    async def _missing(self, portion: Portion) -> Sequence[errors.HeadraceError]:
        """Return the results of a failed transaction if a topic is still missing; to wait would delay the others."""
        failed = {str(self._apart[p].error.parameters.get("topic")) for p in portion.offsets if p in self._apart}
        outputs = portion.outputs if failed else []
        for topic in failed & {record.topic for *_, record in outputs}:
            try:
                await self._transactions.require_topic(topic)
            except (errors.TopicNotFound, errors.KafkaUnauthorized) as cause:
                aborted = errors.TransactionAborted()
                return [cause if record.topic == topic else aborted for *_, record in outputs]
        return []

    def _blame(self, portion: Portion, results: Sequence[Any]) -> _Blame:
        """Return the events that are to blame for a failed transaction, or else events of which one is to blame."""
        outputs = portion.outputs
        if refused := self._held.refuse(outputs, results):
            return refused, {}
        alone = len(portion.events) == 1
        for kinds, certain in _CULPRITS:
            named: dict[Event, errors.HeadraceError] = {}
            for (partition, offset, record), result in zip(outputs, results, strict=True):
                if type(result) in kinds:
                    topic = record.topic
                    text = f"outputs to {topic} are not acknowledged: {result.description}"
                    named.setdefault((partition, offset), errors.DestinationUnavailable(text, topic=topic))
            if named:
                return (named, {}) if certain or alone else ({}, named)
        return {}, {}

    def _written(self, portion: Portion, records: Sequence[OutgoingRecord], results: Sequence[Any]) -> None:
        if self._on_written:
            self._on_written(records, results)
        self._failures = 0
        self._problem = ""
        self._committed |= portion.offsets
        for partition, (end, _) in portion.offsets.items():
            self._apart.pop(partition, None)
            if isinstance(lane := self._lanes.get(partition), ResumingLane):
                lane.forget(end)

    def _set_apart(self, partition: TopicPartition, error: errors.HeadraceError, round_: _Round) -> None:
        """Deliver again what is not committed of a partition: at once if the event fails now, else after a pause."""
        lane = self._lanes.get(partition)
        if lane is None or lane is not round_.lanes[partition]:
            return
        failures = self._apart[partition].failures + 1 if partition in self._apart else 1
        self._apart[partition] = _Apart(error, failures)
        waits = isinstance(error, errors.DestinationUnavailable)
        self._begin_again([lane], error, min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2**failures) if waits else 0)

    def _begin_again(self, lanes: Sequence[Lane], error: errors.HeadraceError, pause_seconds: float) -> None:
        """Begin the assignments of lanes again at the committed offsets."""
        if not lanes:
            return
        epochs = {lane.partition: lane.tracker.epoch for lane in lanes}
        why = "a transaction failed, and its records are delivered again"
        where = lanes[0].partition if len(lanes) == 1 else f"{len(lanes)} partitions"
        log.warning("%s: %s: %s: %s", self.name, where, why, _reason(error))
        self._fence(lanes, why)
        self._forget(lanes)
        self._drop(epochs)
        self._tried |= {lane.partition: lane.tried for lane in lanes if isinstance(lane, ResumingLane)}
        if pause_seconds:
            self._resting |= dict.fromkeys(epochs, f"{why}: {_reason(error)}")
            self._later(pause_seconds, functools.partial(self._end_rest, epochs))
        self._consumer.rewind(epochs)

    def _pause_of(self, partition: TopicPartition) -> str:
        return super()._pause_of(partition) or self._resting.get(partition, "")

    def _end_rest(self, partitions: Collection[TopicPartition]) -> None:
        for partition in partitions:
            self._resting.pop(partition, None)
        self.apply_pauses()

    def _failed(self, failure: errors.HeadraceError) -> None:
        self._failures += 1
        self._problem = _reason(failure) if self._failures > 1 else ""

    def _leave(self, partitions: Collection[TopicPartition]) -> None:
        """Forget partitions that are not assigned here any more."""
        self._drop(partitions)
        for partition in partitions:
            self._apart.pop(partition, None)
            self._resting.pop(partition, None)
        self._problem = self._problem if self._lanes else ""

    def _drop(self, partitions: Collection[TopicPartition]) -> None:
        """Forget what is not committed of partitions; it is delivered again, here or elsewhere."""
        self._held.drop(partitions)
        for partition in partitions:
            self._next.pop(partition, None)
            self._tried.pop(partition, None)


def _reason(failure: errors.HeadraceError) -> str:
    """Return why a transaction failed, without the advice for a request."""
    return failure.cause or "Kafka aborted it"
