"""Begins deliveries in turns, makes their attempts, and writes dead letters.

Partitions take turns, and a busy one leaves slots for idle ones. Workers are tasks: one is created when there is
something to begin and no other is free, and ends when there is nothing to do.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import nullcontext
from typing import Any

from headrace.delivery.breaker import Failure
from headrace.delivery.lane import Lane
from headrace.delivery.limit import AdaptiveLimit
from headrace.delivery.outcomes import (
    ACK,
    AWAITING_ACK,
    NOT_BEGUN,
    DeadLetter,
    DeadLetterWriter,
    Delivery,
    Destination,
    EpochOf,
    Outcome,
    Reply,
)
from headrace.delivery.policy import Judged, judge, last_error
from headrace.delivery.pump_context import Batch, DeadLetterBatch, PumpContext, Work
from headrace.errors import DeadLetterFailed, DeliveryError
from headrace.records import Record, RecordBatch
from headrace.runtime.failpoints import reach
from headrace.runtime.telemetry.log_fields import record_fields

log = logging.getLogger(__name__)

_RESERVED = 4
"""One slot in this many is reserved for idle partitions."""
_SLOW_SECONDS = 5.0
_BROKEN_OFF = 3
"""After this many closed connections a delivery is split."""
_COMPLETED = (Outcome.DELIVERED, Outcome.AWAITING_ACK, Outcome.HANDED_OFF, Outcome.SKIPPED)


class Deliverer:
    """Delivers the records of all lanes of one pump."""

    def __init__(
        self,
        context: PumpContext,
        destination: Destination,
        dead_letters: DeadLetterWriter | None,
        *,
        epoch_of: EpochOf | None,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        on_completed: Callable[[Lane, RecordBatch, Outcome, Sequence[Reply]], None],
        replay: str = "",
        live: bool = True,
    ) -> None:
        """Prepare; without `dead_letters` they are off, and without `epoch_of` deliveries have the epoch of the lane.

        `replay` is the id of the replay job, empty for deliveries of the group. With `live` one slot is reserved for
        this pump.
        """
        # Settings
        self._context = context
        self._destination = destination
        self._dead_letters = dead_letters
        self._epoch_of = epoch_of
        self._spawn = spawn
        self._on_completed = on_completed
        self._replay = replay

        # Whose turn it is
        self._turns: OrderedDict[Lane, None] = OrderedDict()
        """Lanes that may have something to begin."""
        self.last_turn = 0

        # In flight
        self.in_flight = 0
        self._busy = 0
        """Lanes with something in flight."""
        self._workers: dict[asyncio.Task[None], tuple[Lane, int]] = {}
        """Each worker's lane, and the id of its attempt; 0 if it began with dead letters."""
        self._limit.join(self, live=live)

    @property
    def _limit(self) -> AdaptiveLimit:
        return self._context.breaker.limit

    def offer(self, lane: Lane) -> None:
        """Begin deliveries; a lane may have something to begin."""
        self._queue(lane)
        self.begin()

    def begin(self) -> None:
        """Begin what may begin now, in this pump and in others that share the limit."""
        self._limit.begin()

    def close(self) -> None:
        """Begin nothing more."""
        self._limit.leave(self)
        self._limit.begin()

    # Turns -----------------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        return bool(self._turns)

    @property
    def has_records(self) -> bool:
        return any(lane.tracker.has_in_flight for lane in self._context.lanes.values())

    def begin_one(self) -> bool:
        lane = self._next()
        if lane is None:
            return False
        work, attempt_id = self._take(lane)
        self._queue(lane)
        worker = self._spawn(self._work(lane, work, attempt_id), "delivery")
        self._enter(worker, lane, work, attempt_id)
        worker.add_done_callback(self._worker_ended)
        return True

    def _queue(self, lane: Lane) -> None:
        if lane not in self._turns and lane.startable:
            self._turns[lane] = None

    def _next(self) -> Lane | None:
        """Remove and return the next lane of the queue, if a delivery may begin."""
        turns, context = self._turns, self._context
        if not turns:
            return None
        # Is a slot free? A worker that began with dead letters takes no slot of the limit; it is counted here.
        free = self._limit.free_for(self) - (len(self._workers) - self.in_flight)
        if free <= 0 or not context.breaker.admits or not context.rate.admits:
            return None
        # Take the first lane that can begin. The last slots are for idle lanes.
        reserved = min(self._limit.concurrency // _RESERVED, len(context.lanes) - self._busy)
        for _ in range(len(turns)):
            lane = turns.popitem(last=False)[0]
            startable = lane.startable
            if startable and lane.in_flight and free <= reserved:
                turns[lane] = None
            elif startable:
                return lane
        return None

    def _take(self, lane: Lane) -> tuple[Work, int]:
        """Return the next work of a lane, and its attempt id; 0 for dead letters, which the limit does not count."""
        work = lane.take()
        if isinstance(work, DeadLetterBatch):
            return work, 0
        self._context.rate.take(len(work.records))
        self._limit.take(self)
        return work, self._context.breaker.begin()

    def _enter(self, worker: asyncio.Task[None], lane: Lane, work: Work, attempt_id: int) -> None:
        self._workers[worker] = lane, attempt_id
        self._busy += not lane.in_flight
        lane.in_flight.begin(worker, work)

    async def _work(self, lane: Lane, work: Work, attempt_id: int) -> None:
        worker = asyncio.current_task()
        assert worker
        if attempt_id and self._context.breaker.stops(attempt_id):
            lane.requeue(work)
            return  # `_worker_ended` does the rest
        while True:
            dead_letters = work if isinstance(work, DeadLetterBatch) else await self._attempt(lane, work, attempt_id)
            if dead_letters:
                if dead_letters is not work:
                    lane.in_flight.replace(worker, dead_letters)
                with self._limit.writing() if attempt_id else nullcontext():
                    await self._write_dead_letters(lane, dead_letters)
            self._leave(worker)
            self._queue(lane)
            following = None if self._limit.others_wait(self) else self._next()
            if following is None:
                self.begin()
                return
            lane = following
            work, attempt_id = self._take(lane)
            self._enter(worker, lane, work, attempt_id)
            self.offer(lane)

    def _leave(self, worker: asyncio.Task[None]) -> Lane | None:
        lane, attempt_id = self._workers.pop(worker, (None, 0))
        if lane:
            lane.in_flight.leave(worker)
            self._busy -= not lane.in_flight
            if attempt_id:
                self._limit.release(self)
                self._context.breaker.leave(attempt_id)
        return lane

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        # A worker that was cancelled, was stopped before it began, or failed by a defect has not left yet.
        if lane := self._leave(worker):
            self.offer(lane)

    # One attempt -----------------------------------------------------------------------------------------------------

    async def _attempt(self, lane: Lane, batch: Batch, attempt_id: int) -> DeadLetterBatch | None:
        """Deliver a batch; return the dead letters to write.

        A destination that is down uses up no attempt.
        """
        context, records = self._context, batch.records
        if not records:
            return None
        epoch = self._epoch_of(lane.partition) if self._epoch_of else lane.tracker.epoch
        delivery = Delivery(context.group, lane.partition, epoch, records, batch.attempt, self._replay)
        reach("delivery.before")
        try:
            if _is_suspect(batch):
                replies = await self._deliver_alone(lane, attempt_id, delivery)
            else:
                replies = await self._destination.deliver(delivery)
        except DeadLetterFailed as failure:
            # Kafka did not take it, which says nothing about the destination.
            if not lane.is_fenced:
                lane.try_later(batch._replace(refusals=batch.refusals + 1), failure.description)
            return None
        except DeliveryError as error:
            reach("delivery.refused")
            if error.broken_off:
                return self._broken_off(lane, batch, attempt_id, error)
            batch = batch._replace(
                broken_off=0, suspected=0
            )  # or a batch that only hangs now would always be sent alone
            self._refused(lane, batch, attempt_id, error.description, error.wait_seconds)
            return None
        reach("delivery.after")
        if lane.is_fenced:
            context.counts.late_results += len(records)
            return None
        if replies.count(ACK) < len(replies) and NOT_BEGUN in replies:
            batch, replies = self._begun_of(lane, batch, replies)
            records = batch.records
        count = len(records)
        for success, outcome in ((ACK, Outcome.DELIVERED), (AWAITING_ACK, Outcome.AWAITING_ACK)):
            if replies.count(success) == count:
                if count:
                    context.breaker.answered(attempt_id, count)
                    lane.progressed()
                    self._complete(lane, records, outcome)
                return None
        return self._settle(lane, batch, attempt_id, replies)

    async def _deliver_alone(self, lane: Lane, attempt_id: int, delivery: Delivery) -> Sequence[Reply]:
        """Deliver a record while nothing else is in flight: then no other record can have closed the connection."""
        async with self._limit.alone():
            if lane.condition.is_ending or self._context.breaker.stops(attempt_id):
                return [NOT_BEGUN]
            return await self._destination.deliver(delivery)

    def _begun_of(self, lane: Lane, batch: Batch, replies: Sequence[Reply]) -> tuple[Batch, Sequence[Reply]]:
        """Return what was begun of a batch; the rest waits for that, or the partition's next owner fetches it again.

        If nothing was begun although the partition stays, the destination has refused the batch.
        """
        begun = [index for index, reply in enumerate(replies) if reply != NOT_BEGUN]
        if not lane.condition.is_ending:
            if not begun:
                return batch, replies
            rest = batch.records.select(index for index, reply in enumerate(replies) if reply == NOT_BEGUN)
            self._context.rate.take(-len(rest))
            lane.acks.failed({*rest.offsets})
            lane.put_behind(batch._replace(records=rest))
        return batch._replace(records=batch.records.select(begun)), [replies[index] for index in begun]

    def _refused(self, lane: Lane, batch: Batch, attempt_id: int, why: str, wait_seconds: float | None = None) -> bool:
        """Keep a batch that the destination did not take; return whether the destination is to blame."""
        self._context.counts.refusals += 1
        if lane.is_fenced:
            return False
        if self._context.breaker.refused(attempt_id, why, wait_seconds):
            lane.requeue(batch)
            return True
        lane.try_later(batch._replace(refusals=batch.refusals + 1), why)
        return False

    def _broken_off(self, lane: Lane, batch: Batch, attempt_id: int, error: DeliveryError) -> DeadLetterBatch | None:
        """Split a delivery at which the destination repeatedly closes the connection.

        A record alone has failed if others were taken meanwhile, or if the destination has just answered another
        request. Otherwise the destination may be down for all.
        """
        breaker = self._context.breaker
        records = batch.records
        why = error.description
        was_alone = _is_suspect(batch)
        batch = batch._replace(broken_off=batch.broken_off + 1, suspected=batch.suspected or breaker.newest)
        others_are_taken = breaker.has_taken_since(batch.suspected)
        if lane.is_fenced or batch.broken_off < _BROKEN_OFF or (len(records) == 1 and not was_alone):
            self._refused(lane, batch, attempt_id, why)
        elif not was_alone:
            self._context.counts.refusals += 1
            if not others_are_taken:
                breaker.refused(attempt_id, why)
            lane.halve(batch, f"{len(records)} records from offset {records.offsets[0]} on: {why}")
        elif others_are_taken or error.is_alive:
            return self._settle(lane, batch, attempt_id, [Reply("ConnectionClosed", why)])
        else:
            topic, number = lane.partition
            offset = records.offsets[0]
            skip = breaker.name.replace(" ", " skip ", 1)
            how = f'headrace {skip} {offset} --partition {number} --topic {topic} --reason "..."'
            text = f"{why}, always at {lane.partition} offset {offset}; to skip it: {how}"
            self._refused(lane, batch, attempt_id, text)
        return None

    def _settle(self, lane: Lane, batch: Batch, attempt_id: int, replies: Sequence[Reply]) -> DeadLetterBatch | None:
        """Apply the policy to each record; return the dead letters to write."""
        context = self._context
        now = context.clock.time()
        why = last_error(replies)
        first = batch.first_failed_at or now
        judged = judge(batch.records, replies, context.retry, attempt=batch.attempt, age_seconds=now - first)
        # Which fail, which are tried again together, and which in two halves?
        failed = judged.get(Outcome.DEAD_LETTER, ())
        again = _records(judged.get(Outcome.RETRY, ())) or _records(judged.get(Outcome.ROLL_BACK, ()))
        split = _records(judged.get(Outcome.SPLIT, ()))
        lane.acks.failed({record.offset for record in (*again, *split)})
        # If the destination is to blame, keep all but permanent failures as they are: no attempt is used up.
        if self._is_to_blame(lane, batch, attempt_id, judged, replies):
            kept = again + [record for record, reply in failed if not reply.permanent]
            if kept:
                kept.sort(key=lambda record: record.offset)
                lane.requeue(batch._replace(records=RecordBatch.of(kept)))
            failed = [one for one in failed if one[1].permanent]
            again = []
        elif Outcome.UNAVAILABLE not in judged:
            lane.progressed()
        # Complete what succeeded or is skipped.
        for outcome in _COMPLETED:
            if completed := judged.get(outcome):
                replies_of = [reply for _, reply in completed] if outcome is Outcome.SKIPPED else ()
                self._complete(lane, RecordBatch.of(_records(completed)), outcome, replies_of)
        if skipped := judged.get(Outcome.SKIPPED):
            log.info("%s: skipped=%d by policy: %s", lane.label, len(skipped), why, extra=self._fields(skipped[0][0]))
        # Deliver the rest again, after a pause.
        if again:
            reach("retry.before")
            context.counts.redeliveries += len(again)
            text = f"offset {again[0].offset} failed {batch.attempt} of {context.retry.attempts} times"
            following = Batch(RecordBatch.of(again), batch.attempt + 1, first)
            lane.try_later(following._replace(broken_off=batch.broken_off, suspected=batch.suspected), text)
        if split:
            text = f"{len(split)} records from offset {split[0].offset} on failed together: {why}"
            lane.halve(batch._replace(records=RecordBatch.of(split)), text)
        # Return what has failed for good.
        before = batch.attempt - 1
        dead_letters = [
            DeadLetter(one, context.group, before + reply.calls, reply, first, now) for one, reply in failed
        ]
        return DeadLetterBatch(dead_letters) if dead_letters else None

    def _is_to_blame(self, lane: Lane, batch: Batch, attempt_id: int, judged: Judged, replies: Sequence[Reply]) -> bool:
        """Report replies to the breaker; return whether the destination is to blame for the failures."""
        breaker = self._context.breaker
        why = last_error(replies)
        succeeded = sum(len(judged.get(how, ())) for how in (Outcome.DELIVERED, Outcome.AWAITING_ACK, Outcome.SKIPPED))
        if unavailable := judged.get(Outcome.UNAVAILABLE):
            if succeeded:
                breaker.answered(attempt_id, succeeded)
            kept = batch._replace(records=RecordBatch.of(_records(unavailable)))
            return self._refused(lane, kept, attempt_id, why)
        if not any(reply.reached for reply in replies):
            return False  # the destination saw none of them
        # Records of retry topics were counted as failures at their first attempt. Counting them again would keep the
        # breaker open in a process that delivers nothing else.
        is_first = batch.attempt == 1 and not self._context.delayed
        failures = _failures(batch, judged, replies) if is_first else []
        return not breaker.answered(attempt_id, succeeded, failures, why)

    def _complete(self, lane: Lane, records: RecordBatch, how: Outcome, replies: Sequence[Reply] = ()) -> None:
        self._context.counts.completed[Outcome.DELIVERED if how is Outcome.AWAITING_ACK else how] += len(records)
        self._on_completed(lane, records, how, replies)

    # Dead letters ----------------------------------------------------------------------------------------------------

    async def _write_dead_letters(self, lane: Lane, batch: DeadLetterBatch) -> None:
        """Write dead letters; a record is completed by the acknowledgement, and without it the lane backs off."""
        dead_letters = batch.dead_letters
        writer = self._dead_letters
        if self._context.retry.last_retry:
            for record, _, attempts, reply, *_ in dead_letters:  # each is named, because no topic has it
                dropped = f"dropped offset {record.offset} after {attempts} attempts ({reply.error})"
                log.warning("%s: %s; retry.last_retry is on", lane.label, dropped, extra=self._fields(record))
            return self._complete_all(lane, dead_letters, Outcome.GIVEN_UP)
        if writer is None:
            first = dead_letters[0]
            return lane.stop(
                batch,
                f"offset {first.record.offset} failed {first.attempts} times ({first.reply.error}), and dead letters "
                "are off; repair the destination, or set dead_letter.enabled to true, and restart",
            )
        reach("dead_letter.before")
        result = await self._write(lane, writer, dead_letters)
        reach("dead_letter.after")
        if lane.is_fenced:
            self._context.counts.late_results += len(dead_letters)
            return None
        failure = result if isinstance(result, DeadLetterFailed) else None
        delayed: Collection[int] = () if isinstance(result, DeadLetterFailed) else result
        missing: Collection[int] = ()
        if failure:
            missing = failure.parameters.get("missing", range(len(dead_letters)))
            delayed = failure.parameters.get("delayed", ())
        if len(missing) < len(dead_letters):
            lane.progressed()
            dead = [each for at, each in enumerate(dead_letters) if at not in delayed and at not in missing]
            self._log_written(lane, dead, [dead_letters[at] for at in delayed])
            self._complete_all(lane, dead, Outcome.DEAD_LETTER)
            self._complete_all(lane, [dead_letters[at] for at in delayed], Outcome.DELAYED)
        if failure:
            if lane.condition.reason != failure.description:
                text = "%s is waiting, so that no record is lost: %s"
                log.warning(text, lane.label, failure.description, extra=lane.condition.log_fields)
            lane.back_off(DeadLetterBatch([dead_letters[at] for at in missing]), failure.description)
        return None

    async def _write(
        self, lane: Lane, writer: DeadLetterWriter, dead_letters: Sequence[DeadLetter]
    ) -> DeadLetterFailed | Collection[int]:
        """Write dead letters, and log if that takes long: a write may take minutes before it fails.

        Returns the indexes of those in a retry topic, or why the write failed.
        """
        why = f"dead letters={len(dead_letters)} from offset {dead_letters[0].record.offset} on are not acknowledged"
        if not lane.condition.in_trouble:
            lane.delay(why)
        alarm = self._context.later(_SLOW_SECONDS, lambda: log.warning("%s is waiting: %s yet", lane.label, why))
        try:
            return await writer.write(dead_letters) or ()
        except DeadLetterFailed as failure:
            return failure
        finally:
            alarm.cancel()

    def _log_written(self, lane: Lane, dead: Sequence[DeadLetter], delayed: Sequence[DeadLetter]) -> None:
        what = f"dead letters={len(dead)}" + (f", delayed={len(delayed)}" if delayed else "")
        first = min([*dead, *delayed], key=lambda dead_letter: dead_letter.record.offset)
        level = logging.WARNING if dead else logging.INFO
        offset, error = first.record.offset, first.reply.error
        fields = self._fields(first.record)
        log.log(level, "%s: %s, first offset %d: %s", lane.label, what, offset, error, extra=fields)

    def _fields(self, record: Record) -> dict[str, Any]:
        return record_fields(self._context.group, record.topic_partition, record=record)

    def _complete_all(self, lane: Lane, dead_letters: Sequence[DeadLetter], how: Outcome) -> None:
        if dead_letters:
            replies = [dead_letter.reply for dead_letter in dead_letters]
            self._complete(lane, DeadLetterBatch(dead_letters).records, how, replies)


def _is_suspect(batch: Batch) -> bool:
    """Whether it is one record at which the destination has repeatedly closed the connection."""
    return batch.broken_off >= _BROKEN_OFF and len(batch.records) == 1


def _failures(batch: Batch, judged: Judged, replies: Sequence[Reply]) -> list[Failure]:
    """Return first failures that count against the destination; records that it never received do not."""
    partition = batch.records.topic_partition
    if split := judged.get(Outcome.SPLIT):
        return [(partition, split[0][0].offset, len(split))]
    skipped = {record.offset for record, _ in judged.get(Outcome.SKIPPED, ())}
    failed = [r for r, reply in zip(batch.records, replies, strict=True) if reply.error and not reply.permanent]
    return [(partition, record.offset, 1) for record in failed if record.offset not in skipped]


def _records(judged: Sequence[tuple[Record, Reply]]) -> list[Record]:
    return [record for record, _ in judged]
