"""Begins deliveries in turns, makes their attempts, and applies the results.

Partitions take turns, and a busy one leaves slots for idle ones. A task makes the attempt, and writes dead letters;
then it continues with what may begin next. Where a delivery is one record, the next one of the lane keeps the slot.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from operator import attrgetter
from typing import Any

from headrace.delivery.breaker import failures_of
from headrace.delivery.dead_letter_writes import DeadLetterWrites
from headrace.delivery.lane import Lane
from headrace.delivery.lane_work import WorkInFlight
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
from headrace.delivery.policy import Judged, judge, last_error, records_of
from headrace.delivery.pump_context import BROKEN_OFF, Batch, DeadLetterBatch, PumpContext, Work
from headrace.errors import DeadLetterFailed, DeliveryError
from headrace.records import RecordBatch
from headrace.runtime.failpoints import reach
from headrace.runtime.telemetry.log_fields import record_fields
from headrace.runtime.telemetry.tracing import current_span

log = logging.getLogger(__name__)

_RESERVED = 4
"""One slot in this many is reserved for idle partitions."""
_SLOT_SECONDS = 0.02
"""A lane that needs a slot gets it after this time, sooner if many wait. Delivered records are completed as soon."""
_TAKEN = [ACK]
_NOTHING = Batch(RecordBatch.of(()))
Result = Sequence[Reply] | DeliveryError
"""What `Destination.deliver` returns or raises."""
_COMPLETED = (Outcome.DELIVERED, Outcome.AWAITING_ACK, Outcome.HANDED_OFF, Outcome.FILTERED, Outcome.SKIPPED)


class _LaneWork(WorkInFlight):
    """Work in flight, and its lane."""

    __slots__ = ("attempt_id", "is_answered", "lane", "slot_since")

    def __init__(self, lane: Lane, work: Work, attempt_id: int, since: float) -> None:
        super().__init__(work, since)
        self.lane = lane
        self.attempt_id = attempt_id
        """The limit's id of the attempt; 0 if it began with dead letters."""
        self.is_answered = False
        """Whether the breaker knows that the destination has answered."""
        self.slot_since = since
        """When its slot was taken, by the monotonic clock; later work of the lane may follow in it."""


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
        self._limit = context.breaker.limit
        self._destination = destination
        self._dead_letters = DeadLetterWrites(context, dead_letters, self._complete)
        self._epoch_of = epoch_of
        self._spawn = spawn
        self._on_completed = on_completed
        self._replay = replay
        self._made_in = copy_context()
        """Has the caller of a job. What begins a delivery may be a request, whose ids would stay with the lane."""
        self._made_in.run(current_span.set, None)  # a delivery is below no request

        # Whose turn it is
        self._turns: OrderedDict[Lane, None] = OrderedDict()
        """Lanes that may have something to begin."""
        self.last_turn = 0

        # In flight
        self.in_flight = 0
        self._delivered: list[Lane] = []
        """Lanes with delivered records that are about to be completed."""
        self._busy = 0
        """Lanes with something in flight."""
        self._writing = 0
        """Work in flight that began with dead letters, for which the limit has no slot."""
        self._limit.join(self, live=live)

    def offer(self, lane: Lane) -> None:
        """Begin deliveries; a lane may have something to begin."""
        self._queue(lane)
        self.begin()

    def begin(self) -> None:
        """Begin what may begin now, in this pump and in others that share the limit."""
        if self._limit.is_shared:
            self._limit.begin()
        else:
            while self.begin_one():
                pass

    def close(self) -> None:
        """Begin nothing more."""
        self._limit.leave(self)
        self._limit.begin()

    # Turns -----------------------------------------------------------------------------------------------------------

    @property
    def has_records(self) -> bool:
        return any(lane.tracker.has_in_flight for lane in self._context.lanes.values())

    def begin_one(self) -> bool:
        running = self._next()
        if running:
            running.task = self._made_in.run(self._spawn, self._work(running), "delivery")
            running.task.add_done_callback(lambda _: self._over(running))  # it may be cancelled before it begins
        return running is not None

    def _queue(self, lane: Lane) -> None:
        if lane not in self._turns and lane.startable:
            self._turns[lane] = None

    def _next(self) -> _LaneWork | None:
        """Begin the work of the next lane of the queue, if a delivery may begin."""
        turns, context = self._turns, self._context
        if not turns:
            return None
        # Is a slot free? Work that began with dead letters takes no slot of the limit; it is counted here.
        free = self._limit.free_for(self) - self._writing
        if free <= 0 or not context.breaker.admits or not context.rate.admits:
            return None
        # Take the first lane that can begin. The last slots are for idle lanes.
        reserved = min(self._limit.concurrency // _RESERVED, len(context.lanes) - self._busy)
        for _ in range(len(turns)):
            lane = turns.popitem(last=False)[0]
            if not lane.startable:
                continue
            if free > reserved or not lane.in_flight.each:
                return self._take(lane)
            turns[lane] = None
        return None

    def _take(self, lane: Lane) -> _LaneWork:
        """Take the next work of a lane. The limit does not count dead letters."""
        context, work, attempt_id = self._context, lane.take(), 0
        if isinstance(work, DeadLetterBatch):
            self._writing += 1
        else:
            context.rate.take(len(work.records.offsets))
            attempt_id = self._limit.take(self)
        running = _LaneWork(lane, work, attempt_id, context.clock.monotonic())
        self._busy += not lane.in_flight.each
        lane.in_flight.begin(running)
        self._queue(lane)
        return running

    def _leave(self, running: _LaneWork) -> None:
        lane, attempt_id = running.lane, running.attempt_id
        lane.in_flight.leave(running)
        running.work = _NOTHING  # its task may continue with other work, and refers to it
        self._busy -= not lane.in_flight.each
        if attempt_id:
            self._limit.release(self, answered=running.is_answered)
            if not running.is_answered:
                self._context.breaker.leave(attempt_id)
        else:
            self._writing -= 1
        self._queue(lane)

    # Work ------------------------------------------------------------------------------------------------------------

    async def _work(self, first: _LaneWork) -> None:
        """Do work, then what may begin after it; a task that never waits ends after the time of a slot."""
        until = first.slot_since + _SLOT_SECONDS
        running: _LaneWork | None = first
        try:
            while running:
                await self._deliver(running)
                running = self._following(running, until)
                self.begin()  # what else may begin gets tasks
        except BaseException:
            if running:
                self._over(running)
            raise

    async def _deliver(self, running: _LaneWork) -> None:
        """Deliver records, and write those that failed for good as dead letters.

        Where a delivery is one record, the next record of the lane follows in the same slot.
        """
        lane, context, deliver = running.lane, self._context, self._destination.deliver
        if not running.work.records:  # abandoned before it began
            return None
        while isinstance(batch := running.work, Batch):
            if context.breaker.stops(running.attempt_id):
                return lane.requeue(batch)
            reach("delivery.before")
            epoch = self._epoch_of(lane.partition) if self._epoch_of else lane.tracker.epoch
            delivery = Delivery(context.group, lane.partition, epoch, batch.records, batch.attempt, self._replay)
            try:
                alone = batch.is_suspect
                result: Result = await (self._deliver_alone(running, delivery) if alone else deliver(delivery))
            except DeliveryError as error:
                result = error
            if self._goes_on(running, result):
                continue
            self.complete_delivered(lane)
            dead_letters = self._result(running, batch, result)
            if not dead_letters:
                return None
            lane.in_flight.replace(running, dead_letters)
        with self._limit.writing() if running.attempt_id else nullcontext():
            await self._dead_letters.write(lane, batch)
        return None

    def _following(self, running: _LaneWork, until: float) -> _LaneWork | None:
        """Leave work that is over; return what its task continues with.

        Users of a shared limit take turns, so there each begins in a task; also after `until` of the monotonic clock.
        """
        self._leave(running)
        task, following = running.task, None
        is_own = not self._limit.is_shared and self._context.clock.monotonic() < until
        if task and is_own and not task.cancelling() and (following := self._next()):
            following.task = task
        return following

    def _over(self, running: _LaneWork) -> None:
        if running in running.lane.in_flight.each:
            self._leave(running)
            self.begin()

    def _goes_on(self, running: _LaneWork, result: Result) -> bool:
        """Deliver the next record of a lane in the same slot, if there is one and nothing speaks against it.

        Records that were delivered are completed together, a little later, which costs much less for each.
        """
        lane, context, now = running.lane, self._context, self._context.clock.monotonic()
        if (
            result != _TAKEN
            or self._limit.free_for(self) < 0
            or context.rate.records_per_second
            or not context.breaker.is_calm
            or not self._keeps_slot(running, now)
            or not (following := lane.following(running.work.records))
        ):
            return False
        if len(lane.in_flight.delivered) == 1:
            if not self._delivered:
                context.later(_SLOT_SECONDS, self._complete_in_time)
            self._delivered.append(lane)
        running.work = following
        running.attempt_id = context.breaker.goes_on()
        running.since = lane.in_flight.begun_at = now
        return True

    def _keeps_slot(self, running: _LaneWork, now: float) -> bool:
        """Return whether a lane may keep its slot; if its time is over, only if no other lane or pump needs it more."""
        turns, limit = self._turns, self._limit
        if now - running.slot_since <= _SLOT_SECONDS * min(1.0, limit.concurrency / (len(turns) or 1)):
            return True
        if limit.is_shared or limit.concurrency < limit.most:
            return False
        if turns:
            first = next(iter(turns))
            in_flight = first.in_flight
            if not in_flight.each or len(in_flight.each) < len(running.lane.in_flight.each) - 1:
                return False
            if now - in_flight.begun_at > _SLOT_SECONDS:  # all that it has hangs
                return False
            turns.move_to_end(first)
        running.slot_since = now
        return True

    def _complete_in_time(self) -> None:
        lanes, self._delivered = self._delivered, []
        for lane in lanes:
            self.complete_delivered(lane)
        self.begin()

    def complete_delivered(self, lane: Lane) -> None:
        """Complete what was delivered of a lane and waits for that."""
        if delivered := lane.in_flight.delivered:
            records = RecordBatch.join(sorted(delivered, key=attrgetter("row")))
            delivered.clear()
            if lane.is_fenced:
                self._context.counts.late_results += len(records)
            else:
                self._context.counts.completed[Outcome.DELIVERED] += len(records)
                self._on_completed(lane, records, Outcome.DELIVERED, ())
                self._queue(lane)

    # One attempt -----------------------------------------------------------------------------------------------------

    def _result(self, running: _LaneWork, batch: Batch, result: Result) -> DeadLetterBatch | None:
        """Apply the result of a delivery; return the dead letters to write.

        A destination that is down uses up no attempt.
        """
        lane = running.lane
        if isinstance(result, DeliveryError):
            return self._not_taken(running, batch, result)
        reach("delivery.after")
        context, records = self._context, batch.records
        count = len(records.offsets)
        if lane.is_fenced:
            context.counts.late_results += count
            return None
        outcome = Outcome.DELIVERED
        if result.count(ACK) < len(result):
            if NOT_BEGUN in result:
                batch, result = self._begun_of(lane, batch, result)
                records = batch.records
                count = len(records)
            if result.count(AWAITING_ACK) == count:
                outcome = Outcome.AWAITING_ACK
            elif result.count(ACK) < count:
                return self._settle(running, batch, result)
        if count:
            running.is_answered = True
            context.breaker.answered(running.attempt_id, count)
            self._complete(lane, records, outcome)
        return None

    def _not_taken(self, running: _LaneWork, batch: Batch, error: DeliveryError) -> DeadLetterBatch | None:
        lane = running.lane
        if isinstance(error, DeadLetterFailed):
            # Kafka did not take it, which says nothing about the destination.
            if not lane.is_fenced:
                lane.try_later(batch._replace(refusals=batch.refusals + 1), error.description)
            return None
        reach("delivery.refused")
        if error.broken_off:
            return self._broken_off(running, batch, error)
        # Or a batch that only hangs now would always be sent alone.
        batch = batch._replace(broken_off=0, suspected=0)
        self._refused(running, batch, error.description, error.wait_seconds)
        return None

    async def _deliver_alone(self, running: _LaneWork, delivery: Delivery) -> Sequence[Reply]:
        """Deliver a record while nothing else is in flight: then no other record can have closed the connection."""
        async with self._limit.alone():
            if running.lane.condition.is_ending or self._context.breaker.stops(running.attempt_id):
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

    def _refused(self, running: _LaneWork, batch: Batch, why: str, wait_seconds: float | None = None) -> bool:
        """Keep a batch that the destination did not take; return whether the destination is to blame."""
        lane = running.lane
        self._context.counts.refusals += 1
        if lane.is_fenced:
            return False
        if self._context.breaker.refused(running.attempt_id, why, wait_seconds):
            lane.requeue(batch)
            return True
        lane.try_later(batch._replace(refusals=batch.refusals + 1), why)
        return False

    def _broken_off(self, running: _LaneWork, batch: Batch, error: DeliveryError) -> DeadLetterBatch | None:
        """Split a delivery at which the destination repeatedly closes the connection.

        A record alone has failed if others were taken meanwhile, or if the destination has just answered another
        request. Otherwise the destination may be down for all.
        """
        lane = running.lane
        breaker = self._context.breaker
        records = batch.records
        why = error.description
        was_alone = batch.is_suspect
        batch = batch._replace(broken_off=batch.broken_off + 1, suspected=batch.suspected or self._limit.newest)
        others_are_taken = breaker.has_taken_since(batch.suspected)
        if lane.is_fenced or batch.broken_off < BROKEN_OFF or (len(records) == 1 and not was_alone):
            self._refused(running, batch, why)
        elif not was_alone:
            self._context.counts.refusals += 1
            if not others_are_taken:
                breaker.refused(running.attempt_id, why)
            lane.halve(batch, f"{len(records)} records from offset {records.offsets[0]} on: {why}")
        elif others_are_taken or error.is_alive:
            return self._settle(running, batch, [Reply("ConnectionClosed", why)])
        else:
            where = f"always at {lane.partition} offset {records.offsets[0]}"
            text = f"{why}, {where}; {error.advice}" if error.advice else f"{why}, {where}"
            self._refused(running, batch, text)
        return None

    def _settle(self, running: _LaneWork, batch: Batch, replies: Sequence[Reply]) -> DeadLetterBatch | None:
        """Apply the policy to each record; return the dead letters to write."""
        lane, context = running.lane, self._context
        now = context.clock.time()
        why = last_error(replies)
        first = batch.first_failed_at or now
        judged = judge(batch.records, replies, context.retry, attempt=batch.attempt)
        # Which fail, which are tried again together, and which in two halves?
        failed = judged.get(Outcome.DEAD_LETTER, ())
        again = records_of(judged.get(Outcome.RETRY, ())) or records_of(judged.get(Outcome.ROLL_BACK, ()))
        split = records_of(judged.get(Outcome.SPLIT, ()))
        lane.acks.failed({record.offset for record in (*again, *split)})
        # Complete what succeeded or is skipped.
        for outcome in _COMPLETED:
            if completed := judged.get(outcome):
                replies_of = [reply for _, reply in completed] if outcome is Outcome.SKIPPED else ()
                self._complete(lane, RecordBatch.of(records_of(completed)), outcome, replies_of)
        if skipped := judged.get(Outcome.SKIPPED):
            fields = record_fields(context.group, lane.partition, record=skipped[0][0])
            log.info("%s: skipped=%d by policy: %s", lane.label, len(skipped), why, extra=fields)
        # If the destination is to blame, keep all but permanent failures as they are: no attempt is used up.
        if self._is_to_blame(running, batch, judged, replies):
            kept = again + [record for record, reply in failed if not reply.permanent]
            if kept:
                kept.sort(key=lambda record: record.offset)
                lane.requeue(batch._replace(records=RecordBatch.of(kept)))
            failed = [one for one in failed if one[1].permanent]
            again = []
        elif Outcome.UNAVAILABLE not in judged:
            lane.progressed()
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
        dead_letters = [
            DeadLetter(one, context.group, batch.attempt - 1 + reply.calls, reply, first, now) for one, reply in failed
        ]
        return DeadLetterBatch(dead_letters) if dead_letters else None

    def _is_to_blame(self, running: _LaneWork, batch: Batch, judged: Judged, replies: Sequence[Reply]) -> bool:
        """Report replies to the breaker; return whether the destination is to blame for the failures."""
        breaker, attempt_id = self._context.breaker, running.attempt_id
        why = last_error(replies)
        succeeded = sum(len(judged.get(how, ())) for how in (Outcome.DELIVERED, Outcome.AWAITING_ACK, Outcome.SKIPPED))
        if unavailable := judged.get(Outcome.UNAVAILABLE):
            if succeeded:
                breaker.answered(attempt_id, succeeded)
            kept = batch._replace(records=RecordBatch.of(records_of(unavailable)))
            return self._refused(running, kept, why)
        if not any(reply.reached for reply in replies):
            return False  # the destination saw none of them
        # Records of retry topics were counted as failures at their first attempt. Counting them again would keep the
        # breaker open in a process that delivers nothing else.
        is_first = batch.attempt == 1 and not self._context.delayed
        failures = failures_of(batch.records, judged, replies) if is_first else []
        running.is_answered = True
        return not breaker.answered(attempt_id, succeeded, failures, why)

    def _complete(self, lane: Lane, records: RecordBatch, how: Outcome, replies: Sequence[Reply] = ()) -> None:
        lane.release(records.keys)
        how_counted = Outcome.DELIVERED if how is Outcome.AWAITING_ACK else how
        self._context.counts.completed[how_counted] += len(records.offsets)
        self._on_completed(lane, records, how, replies)
