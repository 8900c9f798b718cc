"""The backlog of a lane: its records that have not begun, and which of them may begin now.

A record is ready, or waits behind an earlier one of its key; records of slow keys are kept apart, so that they fill
deliveries of their own. Every step costs the same however much is open. Source: delivery.md 4.2.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol

from headrace.config.consumers import BatchConfig, Ordering, RetryConfig
from headrace.delivery.breaker import Breaker
from headrace.delivery.protocols import Waiting
from headrace.delivery.rate import Rate
from headrace.delivery.slow_keys import ALONE, FEW, SLOW, SlowKeys
from headrace.lifecycle import Clock
from headrace.records import Record, TopicPartition

if TYPE_CHECKING:
    from headrace.delivery.lane import Lane


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
    rate: Rate
    waiting: Callable[[Record], Waiting] | None
    """Of retry tiers: what a record is and when it is due, later ones not earlier; such records come one by one."""

    def later(self, seconds: float, call: Callable[[], None]) -> asyncio.Task[None]:
        """Call something after a pause, unless the task is cancelled."""

    @property
    def lanes(self) -> Mapping[TopicPartition, Lane]:
        """The lanes of the present assignment."""

    def offer(self, lane: Lane) -> None:
        """Say that a lane may have something to begin."""


class Backlog:
    """Records of one lane that have not begun."""

    def __init__(self, rules: LaneRules) -> None:
        self.apart = 0
        """Deliveries under way of records that have a slow key, or one that may be."""
        self._rules = rules
        self.ready: deque[Record] = deque()
        """Records of usual keys that may begin."""
        self._behind: dict[bytes | None, deque[Record] | None] = {}  # keys under way, and what waits behind each
        self._keys = SlowKeys(rules.batch.max_records)
        self._slow: dict[int, deque[Record]] = {ALONE: deque(), FEW: deque(), SLOW: deque()}  # ready, perhaps slow

    def __iter__(self) -> Iterator[Record]:
        """Look at every record, those that are ready first."""
        yield from self.ready
        for ready in self._slow.values():
            yield from ready
        for waiting in self._behind.values():
            yield from waiting or ()

    @property
    def is_slow_turn(self) -> bool:
        """Whether records of slow keys may begin."""
        return bool(self._keys.marks) and self._mark > 0

    def add(self, records: Sequence[Record]) -> None:
        """Take records behind all earlier ones."""
        if self._rules.ordering != "key":
            self.ready.extend(records)
            return
        ordered_nulls, behind = self._rules.ordered_null_keys, self._behind
        for record in records:
            key = record.key
            if key is None and not ordered_nulls:
                self.ready.append(record)
            elif key not in behind:
                behind[key] = None
                self._ready_for(key).append(record)
            elif (waiting := behind[key]) is None:
                behind[key] = deque((record,))
            else:
                waiting.append(record)

    def take_slow(self) -> list[Record]:
        """Return records of slow keys to be delivered together; only if it is their turn."""
        mark = self._mark
        return self._portion(self._slow[mark], self._keys.full_records(mark))

    def take(self) -> list[Record]:
        """Return records to be delivered together; only if some are ready."""
        return self._portion(self.ready, self._keys.next_records())

    def release(self, records: Sequence[Record]) -> None:
        """Let go what waited behind these records, of which each was the first of its key."""
        behind = self._behind
        for record in records:
            key = record.key
            if waiting := behind.get(key):
                self._ready_for(key).append(waiting.popleft())
            else:
                behind.pop(key, None)  # a drained lane has forgotten its keys

    def learn(self, records: Sequence[Record], seconds: float) -> None:
        """Note how long a delivery of these records took, which ended well."""
        self._keys.learn(records, seconds)

    def resize(self) -> None:
        """Take note that the size of a full delivery has changed."""
        self._keys.resize(self._rules.batch.max_records)

    def remove(self, offset: int) -> Record | None:
        """Take a record out; the next one of its key goes on if this was the first. None if it is not here."""
        for ready in (self.ready, *self._slow.values()):
            if record := pop(ready, offset):
                if self._rules.ordering == "key":
                    self.release([record])
                return record
        return next((record for queue in self._behind.values() if queue and (record := pop(queue, offset))), None)

    def clear(self) -> None:
        """Forget everything."""
        self.ready.clear()
        self._behind.clear()
        for ready in self._slow.values():
            ready.clear()

    @property
    def _mark(self) -> int:
        """Which of the slow keys may begin, if any: while others wait, half of the places are for those.

        They fill deliveries, but for a quarter of their places, so that they do not all wait for the slowest.
        """
        places = self._rules.breaker.limit.places // (len(self._rules.lanes) or 1) // (2 if self.ready else 1)
        if self.apart >= max(1, places):
            return 0
        for mark, ready in self._slow.items():
            if ready and (self.apart < max(1, places // 4) or len(ready) >= self._keys.full_records(mark)):
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
        if self._rules.ordering == "key":
            # A key whose turn came late may be before others; within a delivery offsets ascend.
            records.sort(key=_offset)
        return records

    def _ready_for(self, key: bytes | None) -> deque[Record]:
        return self._slow.get(self._keys.marks.get(key, 0), self.ready)


def pop(queue: deque[Record], offset: int) -> Record | None:
    """Take the record with an offset out of a queue; None if it is not there."""
    for index, record in enumerate(queue):
        if record.offset == offset:
            del queue[index]
            return record
    return None


def _offset(record: Record) -> int:
    return record.offset
