"""One attempt: deliver a batch, see how each record ended, and write dead letters; what has not ended goes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from headrace.config.consumers import RetryConfig
from headrace.delivery.batch import Batch
from headrace.delivery.breaker import Breaker, Doubt
from headrace.delivery.lane import Lane
from headrace.delivery.policy import Judgement, judge
from headrace.delivery.protocols import (
    ACK,
    DeadLetter,
    DeadLetterWriter,
    Delivery,
    Destination,
    Outcome,
    Verdict,
    Waiting,
)
from headrace.errors import DeadLetterFailed, DeliveryError
from headrace.lifecycle import Clock
from headrace.lifecycle.failpoints import reach
from headrace.records import Record

log = logging.getLogger(__name__)

_SLOW_SECONDS = 5.0


class Counts:
    """What a pump has done since it began."""

    def __init__(self) -> None:
        self.taken = 0
        """Records the source handed over."""
        self.delivered = 0
        """Records that ended by success."""
        self.delegated = 0
        """Records that ended without a delivery: blocked by their key, delivered before, or not requested."""
        self.dead_letters = 0
        """Records that ended in a dead letter topic."""
        self.delayed = 0
        """Records that ended in a retry tier, from which they are delivered again."""
        self.skipped = 0
        """Records that failed and ended, because the policy takes that failure for handled already."""
        self.skipped_by_hand = 0
        """Records that ended because somebody said so, with a reason."""
        self.given_up = 0
        """Records that failed for good and ended without a dead letter, because it was their last retry."""
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
        return dict(vars(self))


class AttemptRules(Protocol):
    """What the attempts of one pump share."""

    group: str
    destination: Destination
    dead_letters: DeadLetterWriter | None
    retry: RetryConfig
    clock: Clock
    counts: Counts
    breaker: Breaker
    waiting: Callable[[Record], Waiting] | None
    replay: str

    def delivery_epoch(self, lane: Lane) -> int:
        """Return the epoch that deliveries of a lane carry."""

    def later(self, seconds: float, call: Callable[[], None]) -> asyncio.Task[None]:
        """Call something after a pause, unless the task is cancelled."""


class Attempts:
    """Makes the attempts of one pump."""

    def __init__(
        self, rules: AttemptRules, on_ended: Callable[[Lane, Sequence[Record], str, Sequence[Outcome]], None]
    ) -> None:
        self._rules = rules
        self._on_ended = on_ended

    async def make(self, lane: Lane, batch: Batch, ticket: int) -> None:
        """Deliver a batch, or write its letters. A destination that is down fails nobody: no attempt is used up."""
        if batch.letters:
            return await self._bury(lane, batch)
        rules = self._rules
        epoch = rules.delivery_epoch(lane)
        delivery = Delivery(rules.group, lane.partition, epoch, batch.records, batch.attempt, rules.replay)
        reach("delivery.before")
        try:
            outcomes = await rules.destination.deliver(delivery)
        except DeadLetterFailed as failure:
            # Kafka did not take it, which says nothing of the destination.
            if not lane.is_over:
                lane.try_later(batch._replace(refusals=batch.refusals + 1), failure.description)
            return None
        except DeliveryError as error:
            reach("delivery.refused")
            self._refused(lane, batch, ticket, error.description, error.wait_seconds)
            return None
        reach("delivery.after")
        if lane.is_over:
            rules.counts.late += len(batch.records)
            return None
        if outcomes.count(ACK) == len(batch.records):
            rules.breaker.answered(ticket, len(batch.records))
            lane.went_well(batch)
            return self._end(lane, batch.records)
        return await self._settle(lane, batch, ticket, outcomes)

    def _refused(self, lane: Lane, batch: Batch, ticket: int, why: str, wait_seconds: float | None = None) -> bool:
        """Keep a batch that the destination did not take, until it takes anything or, when it does, for a while.

        Returns:
            Whether the destination is to blame.
        """
        self._rules.counts.refusals += 1
        if lane.is_over:
            return False
        if self._rules.breaker.refused(ticket, why, wait_seconds):
            lane.give_back(batch)
            return True
        lane.try_later(batch._replace(refusals=batch.refusals + 1), why)
        return False

    async def _settle(self, lane: Lane, batch: Batch, ticket: int, outcomes: Sequence[Outcome]) -> None:
        """Do with each record what the policy says."""
        rules, attempt = self._rules, batch.attempt
        now = rules.clock.time()
        judged = judge(batch, outcomes, rules.retry, rules.group, now)
        if self._to_blame(lane, batch, ticket, judged, outcomes):
            if kept := judged.keep():
                lane.give_back(batch._replace(records=kept))
        elif not judged.waiting:
            lane.moves()
        self._end(lane, judged.ended)
        if judged.elsewhere:
            rules.counts.delegated += len(judged.elsewhere)
            self._on_ended(lane, judged.elsewhere, "", ())
        if judged.skipped:
            rules.counts.skipped += len(judged.skipped)
            log.info("%s: skipped=%d by policy: %s", lane.label, len(judged.skipped), judged.why)
            self._on_ended(lane, judged.skipped, "skipped", [Outcome(Verdict.RETRY, judged.why)] * len(judged.skipped))
        if again := judged.again:
            reach("retry.before")
            rules.counts.redeliveries += len(again)
            why = f"offset {again[0].offset} failed {attempt} of {rules.retry.attempts} times"
            lane.try_later(Batch(again, attempt + 1, batch.first_failed_at or now), why)
        if together := judged.together:
            why = f"{len(together)} records from offset {together[0].offset} on failed together: {judged.why}"
            lane.halve(batch._replace(records=together), why)
        if letters := judged.letters:
            await self._bury(lane, Batch(_records(letters), attempt, letters[0].first_failed_at, letters=letters))

    def _to_blame(self, lane: Lane, batch: Batch, ticket: int, judged: Judgement, outcomes: Sequence[Outcome]) -> bool:
        """Tell the breaker what the destination did; return whether it is to blame for what failed."""
        rules = self._rules
        well = len(judged.ended) + len(judged.skipped)
        # Whoever comes from a tier was doubted before: a process that has nothing but them would never see a success.
        fresh = batch.attempt == 1 and not rules.waiting
        doubts = _doubts(batch, judged, outcomes) if fresh else []
        if judged.waiting:
            if well:
                rules.breaker.answered(ticket, well)
            return self._refused(lane, batch._replace(records=judged.waiting), ticket, judged.why)
        if not any(outcome.reached for outcome in outcomes):
            return False  # the destination saw none of them
        return not rules.breaker.answered(ticket, well, doubts, judged.why)

    async def _bury(self, lane: Lane, batch: Batch) -> None:
        """Write dead letters; a record whose letter is not acknowledged has not ended, and its partition waits."""
        first, writer = batch.letters[0], self._rules.dead_letters
        if self._rules.retry.last_retry:
            return self._give_up(lane, batch)
        if writer is None:
            return lane.stand(
                batch,
                f"offset {first.record.offset} failed {first.attempts} times ({first.outcome.error}) and dead "
                "letters are off: repair the destination, or turn dead_letter.enabled on, and start again",
            )
        lane.narrow(batch)
        reach("letter.before")
        result = await self._write(lane, writer, batch.letters)
        reach("letter.after")
        if lane.is_over:
            self._rules.counts.late += len(batch.records)
            return None
        failure = result if isinstance(result, DeadLetterFailed) else None
        said: Mapping[str, Any] = failure.parameters if failure else {"missing": (), "delayed": result}
        missing, delayed = said.get("missing", range(len(batch.letters))), said.get("delayed", ())
        if len(missing) < len(batch.letters):
            dead = [letter for at, letter in enumerate(batch.letters) if at not in delayed and at not in missing]
            self._buried(lane, dead, [batch.letters[at] for at in delayed])
        if failure:
            if lane.trouble != failure.description:
                log.warning("%s waits, so that nothing is passed over: %s", lane.label, failure.description)
            left = [letter for index, letter in enumerate(batch.letters) if index in missing]
            lane.refused(batch._replace(records=_records(left), letters=left), failure.description)
        return None

    async def _write(
        self, lane: Lane, writer: DeadLetterWriter, letters: Sequence[DeadLetter]
    ) -> DeadLetterFailed | Collection[int]:
        """Write letters, and say so if that takes long: Kafka may hold a write for minutes before it fails.

        Returns the places of those that are delivered later, or why it failed.
        """
        why = f"dead letters={len(letters)} from offset {letters[0].record.offset} on are not acknowledged"
        if not lane.trouble:
            lane.waits(why)
        alarm = self._rules.later(_SLOW_SECONDS, lambda: log.warning("%s waits, %s yet", lane.label, why))
        try:
            return await writer.write(letters) or ()
        except DeadLetterFailed as failure:
            return failure
        finally:
            alarm.cancel()

    def _buried(self, lane: Lane, dead: Sequence[DeadLetter], delayed: Sequence[DeadLetter]) -> None:
        lane.moves()
        self._rules.counts.dead_letters += len(dead)
        self._rules.counts.delayed += len(delayed)
        what = f"dead letters={len(dead)}" + (f", delayed={len(delayed)}" if delayed else "")
        first = min([*dead, *delayed], key=lambda letter: letter.record.offset)
        level = logging.WARNING if dead else logging.INFO
        offset, error_class = first.record.offset, first.outcome.error
        log.log(level, "%s: %s, the first is offset %d: %s", lane.label, what, offset, error_class)
        if dead:
            self._on_ended(lane, _records(dead), "dead letter", [letter.outcome for letter in dead])
        if delayed:
            self._on_ended(lane, _records(delayed), "", ())

    def _give_up(self, lane: Lane, batch: Batch) -> None:
        """End records that must not become dead letters again; each is named, because nothing else holds it."""
        for letter in batch.letters:
            failed = f"offset {letter.record.offset} failed {letter.attempts} times ({letter.outcome.error})"
            log.warning("%s: %s and is given up, because retry.last_retry is on", lane.label, failed)
        self._rules.counts.given_up += len(batch.letters)
        self._on_ended(lane, batch.records, "given up", [letter.outcome for letter in batch.letters])

    def _end(self, lane: Lane, records: Sequence[Record]) -> None:
        self._rules.counts.delivered += len(records)
        if records:
            self._on_ended(lane, records, "delivered", ())


def _doubts(batch: Batch, judged: Judgement, outcomes: Sequence[Outcome]) -> list[Doubt]:
    """Return what speaks against the destination; what it never saw, as records that cannot be decoded, does not."""
    partition = batch.records[0].topic_partition
    if judged.together:
        return [(partition, judged.together[0].offset, len(judged.together))]
    said = zip(batch.records, outcomes, strict=True)
    failed = [record for record, outcome in said if outcome.verdict is Verdict.RETRY and record not in judged.skipped]
    return [(partition, record.offset, 1) for record in failed]


def _records(letters: Sequence[DeadLetter]) -> list[Record]:
    return [letter.record for letter in letters]
