"""One lane: the records of a partition that are not completed, and which of them may be delivered now.

The three orders share one mechanism. A record is ready, is being delivered, or waits: in order `key` for an earlier
record of its key, in order `partition` for the batch before, in order `none` for nothing. The cost of a step does not
depend on the number of records in flight.
"""

import itertools
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from headrace.delivery.backlog import Backlog, KeyBacklog
from headrace.delivery.explicit_acks import ExplicitAcks
from headrace.delivery.lane_state import LaneCondition, LaneState
from headrace.delivery.lane_work import Begun, InFlight, LaneTimers, RetryQueue
from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.delivery.policy import pause_seconds
from headrace.delivery.pump_context import Batch, DeadLetterBatch, PumpContext, Work
from headrace.delivery.tracker import AckTracker
from headrace.records import Committed, Record, RecordBatch, TopicPartition

log = logging.getLogger(__name__)
_RUNNING: Final = LaneState.RUNNING


class Lane:
    """The records of one partition for one assignment epoch."""

    def __init__(
        self,
        partition: TopicPartition,
        epoch: int,
        committed: Committed | None,
        context: PumpContext,
        offer: Callable[["Lane"], None],
    ) -> None:
        """Begin at what the group has committed; `offer` is called when the lane may have something to begin."""
        # Settings
        self._context = context

        # This assignment
        self.partition = partition
        self.tracker = AckTracker(epoch, committed, context.ack_window)
        self.acks = ExplicitAcks(self.tracker, context.ack_window)
        self.condition = LaneCondition(context.group, partition, context.clock)
        self.head_since = context.clock.time()
        """When the first record that is not completed became the first; seconds since the epoch."""

        # Records that have not begun
        self._beyond: deque[tuple[RecordBatch, float]] = deque()
        """Records that are not due, or beyond the span of the offset map, and when each batch was received."""
        self.backlog = KeyBacklog(context, partition) if context.ordering == "key" else Backlog(context)
        self._lingered = False

        # Records that have begun and are not completed
        self.in_flight = InFlight(context.clock)
        self.retries = RetryQueue()
        if committed and self.tracker.tries:
            self.retries.earlier[committed.offset] = self.tracker.tries
        self._timers = LaneTimers(context.later, lambda: offer(self))

    @property
    def label(self) -> str:
        """The lane's name in the log."""
        return self.condition.label

    @property
    def is_fenced(self) -> bool:
        """True if the results of deliveries in flight must be ignored: the partition was revoked or lost."""
        return self.condition.state is LaneState.FENCED

    @property
    def stalled(self) -> str:
        """Why the lane has not moved for a while; empty while it moves or has only just stopped."""
        waits_for_destination = not self.condition.is_blocked and self.tracker.in_flight_records
        return (self._context.breaker.stalled if waits_for_destination else "") or self.condition.trouble

    @property
    def to_commit(self) -> Committed | None:
        """What to commit for the partition; None until an offset is known."""
        if self._context.ack_window:
            return self.acks.to_commit
        of_record = self._context.delayed  # a record of a retry topic has its attempts in itself
        return self.tracker.commit_with(
            None if of_record else self.retries.tries_at(self.tracker.frontier, self.in_flight)
        )

    @property
    def startable(self) -> bool:
        """Whether `take` has something to deliver."""
        if not self.condition.may_begin or (self.in_flight.each and self._context.ordering == "partition"):
            return False
        return bool(self.retries.due) or self._has_fresh

    def following(self, delivered: RecordBatch) -> Batch | None:
        """Take what follows records that were delivered, and are completed later; None if nothing may."""
        retries, context = self.retries, self._context
        if (
            self.condition.state is not _RUNNING
            or retries.due
            or retries.behind
            or retries.backing_off
            or retries.earlier
            or context.delayed
            or context.batch.linger_seconds
            or (records := self.backlog.following(delivered)) is None
        ):
            return None
        self.in_flight.delivered.append(delivered)
        return Batch(records)

    @property
    def _has_fresh(self) -> bool:
        """Whether records may begin for the first time."""
        backlog, context = self.backlog, self._context
        if not backlog.ready_records or (backlog.begun_records and context.ordering == "partition"):
            return False
        batch = context.batch
        return not batch.linger_seconds or self._lingered or backlog.ready_records >= batch.max_records

    def add(self, records: RecordBatch) -> RecordBatch | None:
        """Add records from the source, in offset order; return those that were already completed, if any."""
        context = self._context
        before = None
        # Track every offset, and leave out what was already completed.
        if not self.tracker.has_in_flight:
            self.head_since = context.clock.time()
        if completed := self.tracker.delivered(records.offsets):
            indexes = range(len(records))
            before = records.select(index for index in indexes if records.offsets[index] in completed)
            records = records.select(index for index in indexes if records.offsets[index] not in completed)
        # Keep what may not begin yet behind what is already kept; the rest may begin.
        if self._beyond or context.delayed or (records and records.offsets[-1] >= self.tracker.frontier + SPAN_OFFSETS):
            self._beyond.append((records, context.clock.monotonic()))
            self._admit()
        else:
            self.backlog.add(records)
            self.linger()
        return before

    def take(self) -> Work:
        """Return what to deliver next; only when `startable`."""
        retries, context = self.retries, self._context
        # Take a retry or fresh records, in turns: otherwise retries of a bad record would hide that the destination
        # takes others.
        retries.was_last = bool(retries.due) and not (retries.was_last and self._has_fresh)
        if retries.was_last:
            return retries.due.popleft()
        records = self.backlog.take()
        # The timer belongs to the records that begin now; the remaining ones start a new wait.
        if context.batch.linger_seconds or self._lingered:
            self._lingered = False
            self._timers.cancel("linger")
            self.linger()
        # A record of a retry topic continues with its attempts.
        if context.delayed:
            delayed = context.delayed(records[0])
            return Batch(records, delayed.attempts + 1, delayed.first_failed_at)
        if retries.earlier and (tries := retries.earlier.pop(records.offsets[0], None)):
            if rest := records[1:]:  # they have not failed before
                (self.put_behind if context.ordering == "partition" else self.requeue)(Batch(rest))
            return Batch(records[:1], tries.attempts + 1, tries.first_failed_at)
        return Batch(records)

    def release(self, keys: Sequence[bytes | None]) -> None:
        """Unblock what waited for records of these keys; it has waited, so it waits for no others."""
        self._lingered |= self.backlog.release(keys) and self._context.batch.linger_seconds > 0

    def complete(self, records: RecordBatch, *, awaiting_ack: bool = False) -> None:
        """Complete records, or wait for their acknowledgement."""
        self.progressed()
        if self.acks.await_ack(records.offsets) if awaiting_ack else self.acks.done(records.offsets):
            self.head_since = self._context.clock.time()
        behind = self.retries.behind
        if behind and self.backlog.begun_records == sum(len(batch.records) for batch in behind):
            self.retries.due.append(behind.pop())
        if self._beyond:
            self._admit()

    def acknowledge(self, offset: int, *, up_to: bool) -> bool:
        """Take an explicit acknowledgement; return whether the commit offset moved."""
        columns = (begun.work.records.offsets for begun in self.in_flight)
        own = next((column for column in columns if offset in column), [])  # the handler may not have the others yet
        moved = self.acks.acknowledge(offset, up_to=up_to, in_flight=own[: bisect_left(own, offset)])
        if moved:
            self.head_since = self._context.clock.time()
            self._admit()
        return moved

    def progressed(self) -> None:
        """Record that the destination or a dead letter topic did its work."""
        self.retries.failures = 0
        if self.condition.state is LaneState.DELAYED:
            self.condition.change(LaneState.RUNNING)

    def delay(self, why: str) -> None:
        """Record why records are not completed; others may begin."""
        if self.condition.may_begin:
            self.condition.change(LaneState.DELAYED, why)

    def pause_of(self, batch: Batch) -> float:
        """Return how many seconds a failed batch waits for its next attempt."""
        attempts = max(1, batch.attempt - 1 + batch.refusals)
        return pause_seconds(attempts, self._context.retry, self._context.chance)

    def try_later(self, batch: Batch, why: str, seconds: float | None = None) -> None:
        """Deliver records again after a pause; records that do not wait for them may begin."""
        context, timer = self._context, object()
        seconds = self.pause_of(batch) if seconds is None else seconds
        due = datetime.fromtimestamp(context.clock.time() + seconds, UTC)
        why = f"{why}; will retry at {due:%H:%M:%S} UTC"
        self.retries.backing_off[timer] = batch, why
        self.delay(why)
        self._timers.start(seconds, lambda: self.requeue(self.retries.backing_off.pop(timer)[0]), timer)

    def put_behind(self, batch: Batch) -> None:
        """Deliver records once the records that began before them are completed."""
        self.retries.behind.append(batch)

    def halve(self, batch: Batch, why: str) -> None:
        """Deliver a batch that failed as a whole in two halves; in order `partition` one after the other."""
        middle = len(batch.records) // 2
        second = batch._replace(records=batch.records[middle:])
        if self._context.ordering == "partition":
            self.put_behind(second)
        else:
            self.try_later(second, why)
        self.try_later(batch._replace(records=batch.records[:middle]), why)

    def requeue(self, work: Work) -> None:
        """Put work back into the queue, to be repeated now; other work may be tried first."""
        self.retries.due.append(work)

    def back_off(self, unwritten: DeadLetterBatch, why: str) -> None:
        """Requeue dead letters that are not written; nothing of the lane begins for a while."""
        self.requeue(unwritten)
        if self.condition.state is LaneState.BACKING_OFF:
            return
        if self.condition.change(LaneState.BACKING_OFF, why):
            self.retries.failures += 1
            seconds = pause_seconds(self.retries.failures, self._context.retry, self._context.chance)
            self._timers.start(seconds, self._back_off_over, object())

    def stop(self, unwritten: DeadLetterBatch, why: str) -> None:
        """Requeue dead letters that cannot be written; nothing of the lane begins until a user acts."""
        self.requeue(unwritten)
        if self.condition.change(LaneState.STOPPED, why):
            log.error("%s is stalled: %s", self.label, why, extra=self.condition.log_fields)

    def pause(self, why: str) -> None:
        """Begin nothing while `why` is not empty."""
        if why:
            self.condition.change(LaneState.PAUSED, why)
        elif self.condition.state is LaneState.PAUSED:
            self.condition.change(LaneState.RUNNING)
            self._admit()

    def drain(self, why: str = "") -> None:
        """Begin nothing more and drop what has not begun: it is not committed, so it is fetched again."""
        self.condition.change(LaneState.DRAINING, why)
        self._timers.close()
        self.backlog.clear()
        self.retries.clear()
        self._beyond.clear()

    def fence(self, why: str = "") -> int:
        """Cancel what is in flight and ignore its results; return how many records that is."""
        self.drain()
        self.condition.change(LaneState.FENCED, why)
        self.in_flight.cancel()
        return self.in_flight.records

    def linger(self) -> None:
        """Wait for more records for the next delivery, if it has some and the settings let it wait."""
        seconds = self._context.batch.linger_seconds
        if seconds and self.backlog.ready_records and "linger" not in self._timers:
            self._timers.start(seconds, self._linger_over, "linger")

    def begun(self, offset: int) -> Begun | None:
        """Return the work in flight that a record is part of, or None if the record has not begun."""
        waiting = (Begun(work, why, None) for work, why in self.retries)
        every = itertools.chain(self.in_flight, waiting)
        return next((begun for begun in every if offset in begun.work.records.offsets), None)

    def find(self, offset: int) -> Record | None:
        """Return a record that is not completed, or None if it is not here."""
        if begun := self.begun(offset):
            return begun.work.records.find(offset)
        beyond = (found for batch, _ in self._beyond if (found := batch.find(offset)))
        return self.backlog.find(offset) or next(beyond, None)

    def _admit(self) -> None:
        """Move records to the backlog that are due and within the span of the offset map."""
        limit = self.tracker.frontier + SPAN_OFFSETS
        while self._beyond:
            batch, received_at = self._beyond.popleft()
            near = bisect_left(batch.offsets, limit)
            if self._context.delayed:
                near = next((n for n, record in enumerate(batch[:near]) if not self._is_due(record, received_at)), near)
            self.backlog.add(batch[:near])
            if near < len(batch):
                self._beyond.appendleft((batch[near:], received_at))
                break
        self.linger()
        if self._beyond and self.condition.state is LaneState.RUNNING:
            head = self.tracker.frontier
            what = "waits for its explicit acknowledgement" if head in self.acks.awaiting_ack else "is not completed"
            self.delay(f"offset {head} {what}, and the limit of {SPAN_OFFSETS} offsets beyond it is reached")

    def _is_due(self, record: Record, received_at: float) -> bool:
        """Return whether a record may be delivered now; if not, start a timer."""
        context = self._context
        if not context.delayed:
            return True
        delayed, clock = context.delayed(record), context.clock
        longest = delayed.delay_seconds - (clock.monotonic() - received_at)
        seconds = min(delayed.due - clock.time(), longest)
        if seconds > 0:
            if self.condition.state is LaneState.RUNNING:
                due = datetime.fromtimestamp(clock.time() + seconds, UTC)
                why = f"offset {record.offset} is due at {due:%Y-%m-%d %H:%M:%S} UTC"
                self.condition.change(LaneState.NOT_DUE, why)
            if "due" not in self._timers:
                self._timers.start(seconds, self._wake, "due")
        return seconds <= 0

    def _wake(self) -> None:
        if self.condition.state is LaneState.NOT_DUE:
            self.condition.change(LaneState.RUNNING)
        self._admit()

    def _back_off_over(self) -> None:
        if self.condition.state is LaneState.BACKING_OFF:  # the reason stays until the dead letters are written
            self.condition.change(LaneState.DELAYED, self.condition.reason)

    def _linger_over(self) -> None:
        self._lingered = True
