"""One attempt: deliver a batch, see how each record ended, and write dead letters; what has not ended goes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.config.retry import RetryConfig
from headrace.delivery.lane import Batch, Lane
from headrace.delivery.protocols import ACK, DeadLetter, DeadLetterWriter, Delivery, Destination, Outcome, Verdict
from headrace.errors import DeadLetterFailed, DeliveryError
from headrace.lifecycle import Clock
from headrace.lifecycle.failpoints import reach
from headrace.records import Record

log = logging.getLogger(__name__)


class Counts:
    """What a pump has done since it began."""

    __slots__ = ("abandoned", "dead_letters", "delivered", "gap", "late", "redeliveries", "refusals", "spared", "taken")

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
        self.gap = 0
        """Offsets that were removed from the log before they were read, and passed because `on_gap` says so."""
        self.spared = 0
        """Records that had ended before a restart or a rebalance, and are not delivered again."""
        self.abandoned = 0
        """Records in flight when their partition had to be given up: so many duplicates to expect."""
        self.late = 0
        """Records that ended after their partition was given up; they come again elsewhere."""

    def read(self) -> dict[str, int]:
        """Return every count by its name."""
        return {name: getattr(self, name) for name in self.__slots__}


class AttemptRules(Protocol):
    """What the attempts of one pump share."""

    group: str
    destination: Destination
    dead_letters: DeadLetterWriter | None
    retry: RetryConfig
    clock: Clock
    counts: Counts


class Attempts:
    """Makes the attempts of one pump."""

    def __init__(self, rules: AttemptRules, on_ended: Callable[[Lane, Sequence[Record]], None]) -> None:
        self._rules = rules
        self._on_ended = on_ended

    async def make(self, lane: Lane, batch: Batch) -> None:
        """Deliver a batch, or write its letters. A destination that is down fails nobody: no attempt is used up."""
        if batch.letters:
            return await self._bury(lane, batch)
        rules = self._rules
        delivery = Delivery(rules.group, lane.partition, lane.tracker.epoch, batch.records, batch.attempt)
        reach("delivery.before")
        try:
            outcomes = await rules.destination.deliver(delivery)
        except DeliveryError as error:
            reach("delivery.refused")
            rules.counts.refusals += 1
            return lane.refused(batch, error.description)
        reach("delivery.after")
        if lane.fenced:
            rules.counts.late += len(batch.records)
            return None
        lane.moves()
        if outcomes.count(ACK) == len(batch.records):
            return self._end(lane, batch.records)
        return await self._settle(lane, batch, outcomes)

    async def _settle(self, lane: Lane, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        """End what was taken, have the failed tried again, and bury what has used up its attempts."""
        ended: list[Record] = []
        failed: list[Record] = []
        letters: list[DeadLetter] = []
        now = self._rules.clock.time()
        first = batch.first_failed_at or now
        attempt, attempts = batch.attempt, self._rules.retry.attempts
        for record, outcome in zip(batch.records, outcomes, strict=True):
            if outcome.verdict is Verdict.ACK:
                ended.append(record)
            elif outcome.verdict is Verdict.RETRY and attempt < attempts:
                failed.append(record)
            else:
                letters.append(DeadLetter(record, self._rules.group, attempt, outcome, first, now))
        if ended:
            self._end(lane, ended)
        if failed:
            reach("retry.before")
            self._rules.counts.redeliveries += len(failed)
            why = f"offset {failed[0].offset} failed {attempt} of {attempts} times, a retry is due"
            lane.try_later(Batch(failed, attempt + 1, first), why)
        if letters:
            await self._bury(lane, Batch([letter.record for letter in letters], attempt, first, letters))

    async def _bury(self, lane: Lane, batch: Batch) -> None:
        """Write dead letters; a record whose letter is not acknowledged has not ended, and its partition waits."""
        first, writer = batch.letters[0], self._rules.dead_letters
        if writer is None:
            return lane.stand(
                f"offset {first.record.offset} failed {first.attempts} times ({first.outcome.error}) and dead "
                "letters are off: repair the destination, or turn dead_letter.enabled on, and start again"
            )
        reach("letter.before")
        try:
            await writer.write(batch.letters)
        except DeadLetterFailed as error:
            return lane.refused(batch, error.description)
        reach("letter.after")
        if lane.fenced:
            self._rules.counts.late += len(batch.records)
            return None
        lane.moves()
        count, error_class = len(batch.letters), first.outcome.error
        self._rules.counts.dead_letters += count
        place = f"the first is offset {first.record.offset}"
        log.warning("%s: dead letters=%d, %s: %s", lane.label, count, place, error_class)
        return self._on_ended(lane, batch.records)

    def _end(self, lane: Lane, records: Sequence[Record]) -> None:
        self._rules.counts.delivered += len(records)
        self._on_ended(lane, records)
