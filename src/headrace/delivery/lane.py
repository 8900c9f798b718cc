"""One lane: the records of a partition that have not ended, and which of them may be delivered now.

One mechanism for the three orders. A record is ready, or under way, or waits behind another one: in order `key` behind
an earlier record of its key, in order `partition` behind the batch before, in order `none` behind nothing. Every step
costs the same however much is open. Source: delivery.md 4.2.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from headrace.delivery.backlog import Backlog, LaneRules, pop
from headrace.delivery.batch import Batch
from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.delivery.retry import pause_seconds
from headrace.delivery.tracker import AckTracker
from headrace.records import Committed, Record, TopicPartition

log = logging.getLogger(__name__)

_STANDING_SECONDS = 5.0


class Lane:
    """The records of one partition for one assignment epoch."""

    def __init__(self, partition: TopicPartition, epoch: int, committed: Committed | None, rules: LaneRules) -> None:
        self.partition = partition
        self.tracker = AckTracker(epoch, committed)
        self.backlog = Backlog(rules)
        """What has not begun."""
        self.under_way: dict[asyncio.Task[None], Batch] = {}
        """Who is delivering, and what."""
        self.begun_at: dict[asyncio.Task[None], float] = {}
        """Since when, of the clock that only grows."""
        self.idle = asyncio.Event()
        """Set while nothing is under way."""
        self.idle.set()
        self.fenced = False
        """Whether results that still come mean nothing: the partition belongs to somebody else."""
        self.draining = False
        """Whether nothing begins any more in this assignment."""
        self.held = ""
        """Why nothing new begins, as somebody wants it so; empty while it may."""
        self.leaves = ""
        """What will become of it instead, in one sentence; empty unless it drains for something else than a revoke."""
        self.sleeps = ""
        """What it waits for that is not due yet, in one sentence; empty while nothing does."""
        self.trouble = ""
        """What went wrong last, in one sentence; empty once something went well."""
        self.blocked = False
        """Whether nothing begins until that has ended."""
        self.head_since = rules.clock.time()
        """Since when the first unfinished record is the first; seconds since the epoch."""
        self.rests: dict[object, tuple[Batch, str]] = {}
        """What pauses before it is tried again, and why."""
        self._waits_since = 0.0
        self._standing_said = False
        self._rules = rules
        self._again: deque[Batch] = deque()  # due once more
        self._halves: list[Batch] = []  # wait for the end of the half before, the last one first
        self._beyond: deque[Record] = deque()  # not due yet, or too far ahead of the first unfinished record
        self._seen_at: dict[int, float] = {}  # records of a retry topic, by the clock that only grows
        self._over: set[asyncio.Task[None]] = set()  # whose results mean nothing
        self._begun = 0
        self._refusals = 0
        self._took_again = False
        self._lingers = self._lingered = False
        self._pauses: set[asyncio.Task[None]] = set()

    @property
    def standing(self) -> str:
        """Why the lane has not moved for a while; empty while it moves or has paused only just now."""
        still = self.trouble and self._rules.clock.monotonic() - self._waits_since >= _STANDING_SECONDS
        blames = not self.blocked and self.tracker.open_records
        return (self._rules.breaker.standing if blames else "") or (self.trouble if still else "")

    @property
    def is_over(self) -> bool:
        """Whether what the present task brings means nothing: it was given back, or belongs to somebody else."""
        return self.fenced or (bool(self._over) and asyncio.current_task() in self._over)

    @property
    def startable(self) -> bool:
        """Whether `take` has something."""
        if self.blocked or self.draining or self.held or (self.under_way and self._rules.ordering == "partition"):
            return False
        return bool(self._again or self._fresh)

    @property
    def _fresh(self) -> bool:
        """Whether records may begin that have not begun before."""
        backlog, rules = self.backlog, self._rules
        if backlog.is_slow_turn:
            return True
        if not backlog.ready or (self._begun and rules.ordering == "partition"):
            return False
        batch = rules.batch
        return not batch.linger_seconds or self._lingered or len(backlog.ready) >= batch.max_records

    def add(self, records: Sequence[Record]) -> Sequence[Record]:
        """Take records from the source, in offset order; return those that had ended before this assignment."""
        if not self.tracker.has_open:
            self.head_since = self._rules.clock.time()
        ended = self.tracker.delivered([record.offset for record in records])
        fresh = [record for record in records if record.offset not in ended] if ended else records
        if self._rules.waiting:
            self._seen_at.update(dict.fromkeys([record.offset for record in fresh], self._rules.clock.monotonic()))
        if self._beyond or self._rules.waiting or (fresh and fresh[-1].offset >= self.tracker.frontier + SPAN_OFFSETS):
            self._beyond.extend(fresh)
            self._admit()
        else:
            self._enter(fresh)
        return [record for record in records if record.offset in ended] if ended else ()

    def take(self) -> Batch:
        """Return what is to be delivered next; only when `startable`."""
        # In turns with what is fresh, or a bad record that tries a destination hides that others would be taken.
        self._took_again = bool(self._again) and not (self._took_again and self._fresh)
        if self._took_again:
            return self._again.popleft()
        if self.backlog.is_slow_turn:
            records = self.backlog.take_slow()
            self._begun += len(records)
            return Batch(records, began_at=self._rules.clock.monotonic(), is_apart=True)
        records = self.backlog.take()
        self._begun += len(records)
        self._lingered = False
        self._linger()
        if self._rules.waiting:
            waiting = self._rules.waiting(records[0])
            return Batch(records, waiting.attempts + 1, waiting.first_failed_at)
        if self._rules.ordering == "key":
            return Batch(records, began_at=self._rules.clock.monotonic())
        return Batch(records)

    def begin(self, task: asyncio.Task[None], batch: Batch) -> None:
        """Note that a task delivers a batch."""
        self.under_way[task] = batch
        self.begun_at[task] = self._rules.clock.monotonic()
        self.backlog.apart += batch.is_apart
        self.idle.clear()

    def leave(self, task: asyncio.Task[None]) -> None:
        """Note that a task delivers nothing of this lane any more."""
        if batch := self.under_way.pop(task, None):
            del self.begun_at[task]
            if self._over:
                self._over.discard(task)
            self.backlog.apart -= batch.is_apart
        if not self.under_way:
            self.idle.set()

    def ended(self, records: Sequence[Record]) -> None:
        """Let go what waited behind these records, which have ended."""
        self._begun -= len(records)
        if self._rules.ordering == "key":
            self.backlog.release(records)
            self._linger()
        if self._halves and self._begun == sum(len(half.records) for half in self._halves):
            self._again.append(self._halves.pop())
        if self._beyond:
            self._admit()

    def went_well(self, batch: Batch) -> None:
        """Note that the destination took all of a batch."""
        self.moves()
        if batch.began_at:
            self.backlog.learn(batch.records, self._rules.clock.monotonic() - batch.began_at)

    def moves(self) -> None:
        """Note that a destination or a dead letter topic did its work."""
        self._refusals = 0
        self.trouble = ""
        if self._standing_said:
            self._standing_said = False
            log.info("%s moves again", self.label)

    def try_later(self, batch: Batch, why: str) -> None:
        """Deliver records once more after a pause; what does not wait behind them goes on."""
        retry = self._rules.retry
        failures = max(1, batch.attempt - 1 + batch.refusals)
        seconds, place = pause_seconds(failures, retry, self._rules.chance), object()
        due = datetime.fromtimestamp(self._rules.clock.time() + seconds, UTC)
        why = f"{why}, a retry is due at {due:%H:%M:%S} UTC"
        self.rests[place] = batch, why
        self._rest(seconds, why, lambda: self._rested(place))

    def halve(self, batch: Batch, why: str) -> None:
        """Deliver a batch that failed as a whole in two; in order `partition` one after the other."""
        middle = len(batch.records) // 2
        second = batch._replace(records=batch.records[middle:])
        if self._rules.ordering == "partition":
            self._halves.append(second)
        else:
            self.try_later(second, why)
        self.try_later(batch._replace(records=batch.records[:middle]), why)

    def give_back(self, batch: Batch) -> None:
        """Take back a batch that the destination did not take; another one, if there is one, may try first."""
        self._again.append(batch._replace(began_at=0.0))

    def refused(self, batch: Batch, why: str) -> None:
        """Take back a batch whose dead letters are not written; the whole lane pauses."""
        self.give_back(batch)
        if not self.blocked:
            self._refusals += 1
            self.blocked = True
            self._rest(pause_seconds(self._refusals, self._rules.retry, self._rules.chance), why, self._unblock)

    def stand(self, batch: Batch, why: str) -> None:
        """Take back a batch that cannot end, and stand still for good: somebody has to do something."""
        self._again.append(batch)
        self.blocked = True
        self.waits(why)
        log.error("%s stands still: %s", self.label, why)

    def waits(self, why: str) -> None:
        """Say why the lane does not move; the log is told when it has not for a while."""
        if not self.trouble:
            self._waits_since = self._rules.clock.monotonic()
        self.trouble = why
        if self.standing and not self._standing_said:
            self._standing_said = True
            log.warning("%s stands still: %s", self.label, why)

    def drain(self) -> None:
        """Begin nothing more and forget what was not begun: it is not committed, so it comes again."""
        self.draining = True
        for pause in self._pauses:
            pause.cancel()
        self.backlog.clear()
        self.rests.clear()
        for waiting in (self._again, self._halves, self._beyond, self._seen_at):
            waiting.clear()

    def fence(self) -> int:
        """End what is under way now; its results mean nothing. Returns how many records that is."""
        self.drain()
        self.fenced = True
        for task in self.under_way:
            task.cancel()
        return sum(len(batch.records) for batch in self.under_way.values())

    # While it lives --------------------------------------------------------------------------------------------------

    def begun(self) -> Iterator[tuple[Batch, str, float | None]]:
        """Look at what has begun and not ended: the records, why they pause, and since when they are under way."""
        yield from ((batch, "", self.begun_at[task]) for task, batch in self.under_way.items())
        yield from ((batch, why, None) for batch, why in self.rests.values())
        yield from ((batch, "", None) for batch in (*self._again, *self._halves))

    def waiting(self) -> Iterator[Record]:
        """Look at what has not begun."""
        yield from self.backlog
        yield from self._beyond

    def narrow(self, batch: Batch) -> None:
        """Note that of what the present task delivered these records are left, and dead letters of them are written."""
        task = asyncio.current_task()
        if task in self.under_way:
            self.under_way[task] = batch._replace(is_apart=self.under_way[task].is_apart)

    def remove(self, offset: int) -> Record | None:
        """Take out a record that has just ended without a delivery; what waited behind it goes on.

        An attempt that it is part of is given up, and the others of that attempt are given back.
        """
        if record := self._remove_begun(offset):
            self.ended([record])
        else:
            record = self.backlog.remove(offset) or pop(self._beyond, offset)
            self._seen_at.pop(offset, None)
            self._linger()
        if not self.blocked:
            self.moves()  # it may have been the trouble; if not, that is said again
        if self._beyond:
            self._admit()
        return record

    def change(self) -> None:
        """Take note that the size of deliveries, or how long they wait to fill up, has changed."""
        self.backlog.resize()
        self._linger()

    def _remove_begun(self, offset: int) -> Record | None:
        for task, batch in self.under_way.items():
            if found := batch.without(offset):
                # Whatever it still brings means nothing; so a mate of the record is not in two places.
                self._over.add(task)
                task.cancel()
                self.under_way[task] = batch._replace(records=(), letters=())
                self._keep(found[1])
                return found[0]
        for place, (batch, why) in self.rests.items():
            if found := batch.without(offset):
                self.rests[place] = found[1], why
                return found[0]
        for waiting in (self._again, self._halves):
            for index, batch in enumerate(waiting):
                if found := batch.without(offset):
                    del waiting[index]
                    if found[1].records:
                        waiting.insert(index, found[1])
                    if batch.letters:  # what could not be written blocked the lane
                        self._unblock()
                    return found[0]
        return None

    def _keep(self, batch: Batch) -> None:
        if batch.records:
            self.give_back(batch)

    @property
    def label(self) -> str:
        """The lane's name in the log."""
        return f"group {self._rules.group}, {self.partition}"

    def _enter(self, records: Sequence[Record]) -> None:
        self.backlog.add(records)
        self._linger()

    def _rested(self, place: object) -> None:
        if found := self.rests.pop(place, None):
            self._keep(found[0])

    def _admit(self) -> None:
        limit = self.tracker.frontier + SPAN_OFFSETS
        near = []
        while self._beyond and self._beyond[0].offset < limit and self._is_due(self._beyond[0]):
            near.append(self._beyond.popleft())
            self._seen_at.pop(near[-1].offset, None)
        self._enter(near)
        if self._beyond and not (self.trouble or self.sleeps):
            head = self.tracker.frontier
            self.waits(
                f"offset {head} has not ended, and everything up to {SPAN_OFFSETS} offsets ahead of it was begun"
            )

    def _is_due(self, record: Record) -> bool:
        """Return whether a record may be delivered by now; if not, the lane wakes when it may."""
        if not self._rules.waiting:
            return True
        waiting, clock = self._rules.waiting(record), self._rules.clock
        longest = waiting.delay_seconds - (clock.monotonic() - self._seen_at.get(record.offset, clock.monotonic()))
        seconds = min(waiting.due - clock.time(), longest)
        if seconds > 0 and not self.sleeps:
            due = datetime.fromtimestamp(clock.time() + seconds, UTC)
            self.sleeps = f"offset {record.offset} is due at {due:%Y-%m-%d %H:%M:%S} UTC"
            self._pause(seconds, self._wake)
        return seconds <= 0

    def _wake(self) -> None:
        self.sleeps = ""
        self._admit()

    def _linger(self) -> None:
        seconds = self._rules.batch.linger_seconds
        if seconds and self.backlog.ready and not self._lingers:
            self._lingers = True
            self._pause(seconds, self._linger_over)

    def _linger_over(self) -> None:
        self._lingers, self._lingered = False, True

    def _unblock(self) -> None:
        self.blocked = False

    def _rest(self, seconds: float, why: str, then: Callable[[], None]) -> None:
        self.waits(why)
        self._pause(seconds, then)

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        def go_on() -> None:
            then()
            self._rules.offer(self)

        if not self.draining:
            pause = self._rules.later(seconds, go_on)
            self._pauses.add(pause)
            pause.add_done_callback(self._pauses.discard)
