"""One lane: the records of a partition in their order, delivered one batch after another until each has ended."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from headrace.config.consumers import BatchConfig, RetryConfig
from headrace.delivery.offset_map import SPAN_OFFSETS
from headrace.delivery.protocols import ACK, DeadLetter, DeadLetterWriter, Delivery, Destination, Outcome, Verdict
from headrace.delivery.retry import pause_seconds
from headrace.delivery.tracker import AckTracker
from headrace.errors import DeadLetterFailed, DeliveryError
from headrace.lifecycle import Clock
from headrace.records import Committed, Record, TopicPartition

log = logging.getLogger(__name__)

_STANDING_SECONDS = 5.0


class _Drained(Exception):
    """The lane was drained while its records wait for another attempt: they come again elsewhere."""


class Counts:
    """What a pump has done since it began."""

    __slots__ = ("abandoned", "dead_letters", "delivered", "late", "redeliveries", "refusals", "spared", "taken")

    def __init__(self) -> None:
        self.taken = 0
        """Records the source handed over."""
        self.delivered = 0
        """Records that ended by success."""
        self.dead_letters = 0
        """Records that ended in a dead letter topic."""
        self.redeliveries = 0
        """Attempts after the first, in records."""
        self.refusals = 0
        """Deliveries the destination as a whole did not take."""
        self.spared = 0
        """Records that had ended before a restart or a rebalance, and are not delivered again."""
        self.abandoned = 0
        """Records in flight when their partition had to be given up: so many duplicates to expect."""
        self.late = 0
        """Records that ended after their partition was given up; they come again elsewhere."""

    def read(self) -> dict[str, int]:
        """Return every count by its name."""
        return {name: getattr(self, name) for name in self.__slots__}


class LaneRules(Protocol):
    """What lanes of one pump share."""

    group: str
    destination: Destination
    dead_letters: DeadLetterWriter | None
    batch: BatchConfig
    retry: RetryConfig
    clock: Clock
    chance: Random
    counts: Counts


class Lane:
    """Delivers one partition for one assignment epoch."""

    def __init__(
        self,
        partition: TopicPartition,
        epoch: int,
        rules: LaneRules,
        committed: Committed | None,
        on_ended: Callable[[Lane, Sequence[Record]], None],
    ) -> None:
        self.partition = partition
        self.tracker = AckTracker(epoch, committed)
        self.in_flight = 0
        """Records of the delivery under way."""
        self.waits_for = ""
        """Why the lane does not move, in one sentence; empty while it does."""
        self.resting = True
        """Whether cancelling the lane now abandons nothing: it waits for records or for a pause to end."""
        self._rules = rules
        self._on_ended = on_ended
        self._waits_since = 0.0
        self._standing_said = False
        self._pending: deque[Record] = deque()
        self._draining = False
        self._arrived = asyncio.Event()

    @property
    def standing(self) -> str:
        """Why the lane has not moved for a while; empty while it moves or has paused only just now."""
        still = self._rules.clock.monotonic() - self._waits_since >= _STANDING_SECONDS
        return self.waits_for if still else ""

    def add(self, records: Sequence[Record]) -> Sequence[Record]:
        """Take records from the source, in offset order; return those that had ended before this assignment."""
        ended = self.tracker.delivered([record.offset for record in records])
        self._pending.extend([record for record in records if record.offset not in ended] if ended else records)
        self._arrived.set()
        return [record for record in records if record.offset in ended] if ended else ()

    def drain(self) -> bool:
        """Forget what was not started (it is not committed, so it comes again) and end after the delivery under way.

        Returns:
            Whether there is one; if not, the lane only waits, and cancelling it abandons nothing.
        """
        self._pending.clear()
        self._draining = True
        return not self.resting

    async def run(self) -> None:
        """Deliver until drained or cancelled."""
        try:
            while not self._draining:
                await self._deliver(await self._next_batch())
        except _Drained:
            return

    async def _next_batch(self) -> list[Record]:
        batch = self._rules.batch
        while not self._pending:
            self._arrived.clear()
            await self._arrived.wait()
        if batch.linger_seconds and len(self._pending) < batch.max_records:
            await self._rules.clock.sleep(batch.linger_seconds)
        records = [self._pending.popleft()]
        size = records[0].size_bytes
        limit = records[0].offset + SPAN_OFFSETS
        while self._pending and len(records) < batch.max_records and self._pending[0].offset < limit:
            size += self._pending[0].size_bytes
            if size > batch.max_bytes:
                break
            records.append(self._pending.popleft())
        return records

    async def _deliver(self, records: Sequence[Record]) -> None:
        attempt, first_failed_at = 1, 0.0
        while records:
            outcomes = await self._attempt(records, attempt)
            if outcomes.count(ACK) == len(records):
                self._rules.counts.delivered += len(records)
                self._end(records)
                return
            now = self._rules.clock.time()
            first_failed_at = first_failed_at or now
            ended, failed, letters = self._sort(records, outcomes, attempt, (first_failed_at, now))
            self._rules.counts.delivered += len(ended)
            self._end(ended)
            if letters:
                await self._bury(letters)
                self._end([letter.record for letter in letters])
            records = failed
            if failed:
                self._rules.counts.redeliveries += len(failed)
                await self._rest(
                    pause_seconds(attempt, self._rules.retry, self._rules.chance),
                    f"offset {failed[0].offset} failed {attempt} of {self._rules.retry.attempts} times, a retry is due",
                )
                attempt += 1

    async def _attempt(self, records: Sequence[Record], attempt: int) -> Sequence[Outcome]:
        """Deliver once, waiting as long as it takes for the destination to be there.

        A destination that is down fails nobody: no record's attempts are used up.
        """
        delivery = Delivery(self._rules.group, self.partition, self.tracker.epoch, records, attempt)
        refusals = 0
        while True:
            self.in_flight, self.resting = len(records), False
            try:
                outcomes = await self._rules.destination.deliver(delivery)
            except DeliveryError as error:
                refusals += 1
                self._rules.counts.refusals += 1
                self.in_flight = 0
                await self._rest(pause_seconds(refusals, self._rules.retry, self._rules.chance), error.description)
                continue
            self.in_flight = 0
            self._moves()
            return outcomes

    def _sort(
        self, records: Sequence[Record], outcomes: Sequence[Outcome], attempt: int, times: tuple[float, float]
    ) -> tuple[list[Record], list[Record], list[DeadLetter]]:
        ended, failed, letters = [], [], []
        for record, outcome in zip(records, outcomes, strict=True):
            if outcome.verdict is Verdict.ACK:
                ended.append(record)
            elif outcome.verdict is Verdict.RETRY and attempt < self._rules.retry.attempts:
                failed.append(record)
            else:
                letters.append(DeadLetter(record, self._rules.group, attempt, outcome, *times))
        return ended, failed, letters

    async def _bury(self, letters: Sequence[DeadLetter]) -> None:
        """Write dead letters and return only when they are safe: a record whose letter is not written has not ended."""
        failures = 0
        writer = self._rules.dead_letters
        if writer is None:
            letter = letters[0]
            await self._stand(
                f"offset {letter.record.offset} failed {letter.attempts} times ({letter.outcome.error}) and dead "
                "letters are off: repair the destination, or turn dead_letter.enabled on, and start again"
            )
            return
        while True:
            self.resting = False
            try:
                await writer.write(letters)
            except DeadLetterFailed as error:
                failures += 1
                await self._rest(pause_seconds(failures, self._rules.retry, self._rules.chance), error.description)
                continue
            self._moves()
            self._rules.counts.dead_letters += len(letters)
            first = letters[0]
            log.warning(
                "%s: dead letters=%d, the first is offset %d: %s",
                self._label(),
                len(letters),
                first.record.offset,
                first.outcome.error,
            )
            return

    async def _rest(self, seconds: float, why: str) -> None:
        self._waits(why)
        await self._rules.clock.sleep(seconds)

    async def _stand(self, why: str) -> None:
        self._waits(why)
        log.error("%s stands still: %s", self._label(), why)
        await asyncio.Event().wait()

    def _waits(self, why: str) -> None:
        if not self.waits_for:
            self._waits_since = self._rules.clock.monotonic()
        self.waits_for, self.resting = why, True
        if self._draining:
            raise _Drained
        if self.standing and not self._standing_said:
            self._standing_said = True
            log.warning("%s stands still: %s", self._label(), why)

    def _moves(self) -> None:
        self.waits_for = ""
        if self._standing_said:
            self._standing_said = False
            log.info("%s moves again", self._label())

    def _label(self) -> str:
        return f"group {self._rules.group}, {self.partition}"

    def _end(self, records: Sequence[Record]) -> None:
        self.resting = True
        if records:
            self._on_ended(self, records)
