"""One lane: the records of a partition that have not ended, and which of them may be delivered now.

One mechanism for the three orders. A record is ready, or under way, or waits behind another one: in order `key` behind
an earlier record of its key, in order `partition` behind the batch before, in order `none` behind nothing. Every step
costs the same however much is open. Source: delivery.md 4.2.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from random import Random
from typing import NamedTuple, Protocol

from headrace.config.consumers import BatchConfig, Ordering
from headrace.config.retry import RetryConfig
from headrace.delivery.breaker import Breaker
from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.delivery.protocols import DeadLetter, Waiting
from headrace.delivery.retry import pause_seconds
from headrace.delivery.slow_keys import ALONE, FEW, SLOW, SlowKeys
from headrace.delivery.tracker import AckTracker
from headrace.lifecycle import Clock
from headrace.records import Committed, Record, TopicPartition

log = logging.getLogger(__name__)

_STANDING_SECONDS = 5.0


class Batch(NamedTuple):
    """Records that are delivered together, and their history."""

    records: Sequence[Record]
    attempt: int = 1
    first_failed_at: float = 0.0
    """Seconds since the epoch; 0 before the first failure."""
    refusals: int = 0
    """How often the destination did not take these records though it took others."""
    began_at: float = 0.0
    """In order `key` and at the first try: when it was taken, of the clock that only grows."""
    is_apart: bool = False
    """Whether it has a slow key, or one that may be."""
    letters: Sequence[DeadLetter] = ()
    """Dead letters of these records: then they are to be written, and nothing is to be delivered."""


class LaneRules(Protocol):
    """What the lanes of one pump share."""

    group: str
    ordering: Ordering
    ordered_null_keys: bool
    batch: BatchConfig
    retry: RetryConfig
    clock: Clock
    chance: Random
    breaker: Breaker
    waiting: Callable[[Record], Waiting] | None
    """Of retry tiers: what a record is and when it is due, later ones not earlier; such records come one by one."""

    def later(self, seconds: float, call: Callable[[], None]) -> asyncio.Task[None]:
        """Call something after a pause, unless the task is cancelled."""

    @property
    def lanes(self) -> Mapping[TopicPartition, Lane]:
        """The lanes of the present assignment."""

    def offer(self, lane: Lane) -> None:
        """Say that a lane may have something to begin."""


class Lane:
    """The records of one partition for one assignment epoch."""

    def __init__(self, partition: TopicPartition, epoch: int, committed: Committed | None, rules: LaneRules) -> None:
        self.partition = partition
        self.tracker = AckTracker(epoch, committed)
        self.under_way: dict[asyncio.Task[None], Batch] = {}
        """Who is delivering, and what."""
        self.idle = asyncio.Event()
        """Set while nothing is under way."""
        self.idle.set()
        self.fenced = False
        """Whether results that still come mean nothing: the partition belongs to somebody else."""
        self.sleeps = ""
        """What it waits for that is not due yet, in one sentence; empty while nothing does."""
        self._why = ""
        self._waits_since = 0.0
        self._standing_said = False
        self._rules = rules
        self._ready: deque[Record] = deque()
        self._again: deque[Batch] = deque()  # due once more
        self._halves: list[Batch] = []  # wait for the end of the half before, the last one first
        self._behind: dict[bytes | None, deque[Record] | None] = {}  # keys under way, and what waits behind each
        self._slow_keys = SlowKeys(rules.batch.max_records)
        self._slow: dict[int, deque[Record]] = {ALONE: deque(), FEW: deque(), SLOW: deque()}  # ready, perhaps slow
        self._apart = 0  # deliveries of these under way
        self._beyond: deque[Record] = deque()  # not due yet, or too far ahead of the first unfinished record
        self._begun = 0
        self._refusals = 0
        self._took_again = False
        self._blocked = False
        self._draining = False
        self._lingers = self._lingered = False
        self._pauses: set[asyncio.Task[None]] = set()

    @property
    def waits_for(self) -> str:
        """Why the lane does not move, in one sentence; empty while it does."""
        return self._blames_breaker(self._rules.breaker.waits_for) or self._why

    @property
    def standing(self) -> str:
        """Why the lane has not moved for a while; empty while it moves or has paused only just now."""
        still = self._why and self._rules.clock.monotonic() - self._waits_since >= _STANDING_SECONDS
        return self._blames_breaker(self._rules.breaker.standing) or (self._why if still else "")

    @property
    def startable(self) -> bool:
        """Whether `take` has something."""
        if self._blocked or self._draining:
            return False
        return bool(self._again or self._fresh)

    @property
    def _fresh(self) -> bool:
        """Whether records may begin that have not begun before."""
        if self._slow_keys.marks and self._slow_mark:
            return True
        rules = self._rules
        if not self._ready or (self._begun and rules.ordering == "partition"):
            return False
        batch = rules.batch
        return not batch.linger_seconds or self._lingered or len(self._ready) >= batch.max_records

    def add(self, records: Sequence[Record]) -> Sequence[Record]:
        """Take records from the source, in offset order; return those that had ended before this assignment."""
        ended = self.tracker.delivered([record.offset for record in records])
        fresh = [record for record in records if record.offset not in ended] if ended else records
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
        if self._slow_keys.marks and (mark := self._slow_mark):
            records = self._portion(self._slow[mark], self._slow_keys.full_records(mark))
            return Batch(records, began_at=self._rules.clock.monotonic(), is_apart=True)
        records = self._portion(self._ready, self._slow_keys.next_records())
        self._lingered = False
        self._linger()
        if self._rules.waiting:
            waiting = self._rules.waiting(records[0])
            return Batch(records, waiting.attempts + 1, waiting.first_failed_at)
        if self._rules.ordering == "key":
            return Batch(records, began_at=self._rules.clock.monotonic())
        return Batch(records)

    @property
    def _slow_mark(self) -> int:
        """Which of the slow keys may begin, if any: while others wait, half of the places are for those.

        They fill deliveries, but for a quarter of their places, so that they do not all wait for the slowest.
        """
        places = self._rules.breaker.limit.places // (len(self._rules.lanes) or 1) // (2 if self._ready else 1)
        if self._apart >= max(1, places):
            return 0
        for mark, ready in self._slow.items():
            if ready and (self._apart < max(1, places // 4) or len(ready) >= self._slow_keys.full_records(mark)):
                return mark
        return 0

    def _portion(self, ready: deque[Record], most_records: int) -> list[Record]:
        batch = self._rules.batch
        records = [ready.popleft()]
        size = records[0].size_bytes
        while ready and len(records) < most_records:
            size += ready[0].size_bytes
            if size > batch.max_bytes:
                break
            records.append(ready.popleft())
        self._begun += len(records)
        if self._rules.ordering == "key":
            # A key whose turn came late may be before others; within a delivery offsets ascend.
            records.sort(key=_offset)
        return records

    def begin(self, task: asyncio.Task[None], batch: Batch) -> None:
        """Note that a task delivers a batch."""
        self.under_way[task] = batch
        self._apart += batch.is_apart
        self.idle.clear()

    def leave(self, task: asyncio.Task[None]) -> None:
        """Note that a task delivers nothing of this lane any more."""
        if batch := self.under_way.pop(task, None):
            self._apart -= batch.is_apart
        if not self.under_way:
            self.idle.set()

    def ended(self, records: Sequence[Record]) -> None:
        """Let go what waited behind these records, which have ended."""
        self._begun -= len(records)
        if self._rules.ordering == "key":
            self._release_keys(records)
        if self._halves and self._begun == sum(len(half.records) for half in self._halves):
            self._again.append(self._halves.pop())
        if self._beyond:
            self._admit()

    def went_well(self, batch: Batch) -> None:
        """Note that the destination took all of a batch."""
        self.moves()
        if batch.began_at:
            self._slow_keys.learn(batch.records, self._rules.clock.monotonic() - batch.began_at)

    def moves(self) -> None:
        """Note that a destination or a dead letter topic did its work."""
        self._refusals = 0
        self._why = ""
        if self._standing_said:
            self._standing_said = False
            log.info("%s moves again", self.label)

    def try_later(self, batch: Batch, why: str) -> None:
        """Deliver records once more after a pause; what does not wait behind them goes on."""
        retry = self._rules.retry
        failures = max(1, batch.attempt - 1 + batch.refusals)
        self._rest(pause_seconds(failures, retry, self._rules.chance), why, lambda: self.give_back(batch))

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
        if not self._blocked:
            self._refusals += 1
            self._blocked = True
            self._rest(pause_seconds(self._refusals, self._rules.retry, self._rules.chance), why, self._unblock)

    def stand(self, why: str) -> None:
        """Stand still for good: somebody has to do something."""
        self._blocked = True
        self.waits(why)
        log.error("%s stands still: %s", self.label, why)

    def waits(self, why: str) -> None:
        """Say why the lane does not move; the log is told when it has not for a while."""
        if not self._why:
            self._waits_since = self._rules.clock.monotonic()
        self._why = why
        if self.standing and not self._standing_said:
            self._standing_said = True
            log.warning("%s stands still: %s", self.label, why)

    def drain(self) -> None:
        """Begin nothing more and forget what was not begun: it is not committed, so it comes again."""
        self._draining = True
        for pause in self._pauses:
            pause.cancel()
        for waiting in (self._ready, self._again, self._halves, self._beyond, self._behind):
            waiting.clear()
        for ready in self._slow.values():
            ready.clear()

    def fence(self) -> int:
        """End what is under way now; its results mean nothing. Returns how many records that is."""
        self.drain()
        self.fenced = True
        for task in self.under_way:
            task.cancel()
        return sum(len(batch.records) for batch in self.under_way.values())

    @property
    def label(self) -> str:
        """The lane's name in the log."""
        return f"group {self._rules.group}, {self.partition}"

    def _blames_breaker(self, why: str) -> str:
        return why if why and not self._blocked and self.tracker.open_records else ""

    def _enter(self, records: Sequence[Record]) -> None:
        if self._rules.ordering != "key":
            self._ready.extend(records)
        else:
            ordered_nulls, behind = self._rules.ordered_null_keys, self._behind
            for record in records:
                key = record.key
                if key is None and not ordered_nulls:
                    self._ready.append(record)
                elif key not in behind:
                    behind[key] = None
                    self._ready_for(key).append(record)
                elif (waiting := behind[key]) is None:
                    behind[key] = deque((record,))
                else:
                    waiting.append(record)
        self._linger()

    def _release_keys(self, records: Sequence[Record]) -> None:
        behind = self._behind
        for record in records:
            key = record.key
            if waiting := behind.get(key):
                self._ready_for(key).append(waiting.popleft())
            else:
                behind.pop(key, None)  # a drained lane has forgotten its keys

    def _ready_for(self, key: bytes | None) -> deque[Record]:
        return self._slow.get(self._slow_keys.marks.get(key, 0), self._ready)

    def _admit(self) -> None:
        limit = self.tracker.frontier + SPAN_OFFSETS
        near = []
        while self._beyond and self._beyond[0].offset < limit and self._is_due(self._beyond[0]):
            near.append(self._beyond.popleft())
        self._enter(near)
        if self._beyond and not (self._why or self.sleeps):
            head = self.tracker.frontier
            self.waits(
                f"offset {head} has not ended, and everything up to {SPAN_OFFSETS} offsets ahead of it was begun"
            )

    def _is_due(self, record: Record) -> bool:
        """Return whether a record may be delivered by now; if not, the lane wakes when it may."""
        if not self._rules.waiting:
            return True
        due = self._rules.waiting(record).due
        seconds = due - self._rules.clock.time()
        if seconds > 0 and not self.sleeps:
            self.sleeps = f"offset {record.offset} is due at {datetime.fromtimestamp(due, UTC):%Y-%m-%d %H:%M:%S} UTC"
            self._pause(seconds, self._wake)
        return seconds <= 0

    def _wake(self) -> None:
        self.sleeps = ""
        self._admit()

    def _linger(self) -> None:
        seconds = self._rules.batch.linger_seconds
        if seconds and self._ready and not self._lingers:
            self._lingers = True
            self._pause(seconds, self._linger_over)

    def _linger_over(self) -> None:
        self._lingers, self._lingered = False, True

    def _unblock(self) -> None:
        self._blocked = False

    def _rest(self, seconds: float, why: str, then: Callable[[], None]) -> None:
        self.waits(why)
        self._pause(seconds, then)

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        def go_on() -> None:
            then()
            self._rules.offer(self)

        if not self._draining:
            pause = self._rules.later(seconds, go_on)
            self._pauses.add(pause)
            pause.add_done_callback(self._pauses.discard)


def _offset(record: Record) -> int:
    return record.offset
