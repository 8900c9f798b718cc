"""Dead letters of one origin, delivered and judged as their consumer's own records are, but for attempts: one each."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from headrace.control.running_consumer import RunningConsumer
from headrace.delivery.dead_letter import Origin
from headrace.delivery.limit import SharedSlots
from headrace.delivery.policy import judge, last_error
from headrace.delivery.protocols import (
    DeadLetter,
    Delivery,
    Outcome,
    Reply,
)
from headrace.errors import DeadLetterFailed, DestinationRefused, DestinationUnavailable
from headrace.lifecycle import Clock
from headrace.records import Record

log = logging.getLogger(__name__)


class Letter(NamedTuple):
    """A dead letter, its history, and the record it was."""

    record: Record
    origin: Origin
    was: Record


@dataclasses.dataclass(slots=True)
class Redelivered:
    """What became of a batch of letters."""

    last: Letter
    ended: int = 0
    again: int = 0
    """Those of them that are dead letters once more."""
    given_up: int = 0
    """Those of them that failed for the last time."""
    left: int = 0
    """Letters that were delivered and have not ended."""
    why: str = ""
    """Of what is left."""


class OneOrigin:
    """Delivers letters that came from one partition and group."""

    def __init__(
        self, consumer: RunningConsumer, delivery: Delivery, done: Redelivered, last_retry: bool, clock: Clock
    ) -> None:
        """Prepare; `delivery` is what all have in common, `done` is added to; `last_retry`: what fails has ended."""
        self._consumer, self._delivery, self._done = consumer, delivery, done
        self._last_retry, self._clock = last_retry, clock
        self._slots = SharedSlots(consumer.pump.breaker.limit)
        # One attempt, but a threshold looks at what another attempt would be for.
        self._policy = consumer.delivery.retry.model_copy(update={"attempts": 2, "deadline_seconds": None})

    async def deliver(self, letters: Sequence[Letter]) -> list[Letter]:
        """Deliver letters and return those that have ended.

        A record that has several letters, as after a crash, is delivered once for all of them.

        Raises:
            DestinationUnavailable: The backend does not answer, or speaks of itself.
        """
        by_offset: dict[int, list[Letter]] = {}
        for letter in letters:
            by_offset.setdefault(letter.was.offset, []).append(letter)
        ended = await self._deliver([by_offset[offset][0] for offset in sorted(by_offset)])
        every = [copy for letter in ended for copy in by_offset[letter.was.offset]]
        self._done.ended += len(every)
        return every

    async def _deliver(self, letters: Sequence[Letter]) -> list[Letter]:
        records = [letter.was for letter in letters]
        attempt = 1 + max(letter.origin.attempts for letter in letters)
        try:
            async with self._slots.slot():
                replies = await self._consumer.destination.deliver(
                    self._delivery._replace(records=records, attempt=attempt)
                )
        except DestinationRefused as refusal:
            return self._leave(letters, refusal.description)
        now = self._clock.time()
        judged, why = judge(records, replies, self._policy), last_error(replies)
        if Outcome.ROLL_BACK in judged:
            return self._leave(letters, f"more failed than the roll-back threshold allows: {why}")
        of = {letter.was.offset: (letter, reply) for letter, reply in zip(letters, replies, strict=True)}

        def found(outcome: Outcome) -> list[Record]:
            return [record for record, _ in judged.get(outcome, ())]

        delivered, skipped = found(Outcome.DELIVERED), found(Outcome.SKIPPED)
        ended = [of[record.offset][0] for record in (*delivered, *skipped)]
        self._tell(delivered, Outcome.DELIVERED)
        self._tell(skipped, Outcome.SKIPPED, [of[record.offset][1] for record in skipped])
        failed = [*found(Outcome.RETRY), *found(Outcome.DEAD_LETTER)]
        ended += await self._bury([_again(*of[record.offset], self._delivery.group, now) for record in failed], of)
        self._leave([of[record.offset][0] for record in found(Outcome.UNAVAILABLE)], why)
        together = [of[record.offset][0] for record in found(Outcome.SPLIT)]
        middle = len(together) // 2
        for half, rest in ((together[:middle], together[middle:]), (together[middle:], [])):
            try:
                ended += await self._deliver(half) if half else []
            except DestinationUnavailable as cause:
                if not ended:
                    raise
                self._leave([*half, *rest], cause.description)
                break
        return ended

    async def _bury(self, again: Sequence[DeadLetter], of: dict[int, tuple[Letter, Reply]]) -> list[Letter]:
        letters = [of[letter.record.offset][0] for letter in again]
        if self._last_retry:
            for letter in again:
                what = f"{letter.record.topic_partition} offset {letter.record.offset}"
                log.warning("dead letter of %s failed at its last retry (%s) and has ended", what, letter.reply.error)
            self._done.given_up += len(letters)
            self._tell([letter.record for letter in again], Outcome.GIVEN_UP, [letter.reply for letter in again])
        elif letters and self._consumer.dead_letters is None:
            return self._leave(letters, f"{again[0].reply.error}, and dead letters are off")
        elif letters and self._consumer.dead_letters:
            try:
                await self._consumer.dead_letters.write(again)
            except DeadLetterFailed as failure:
                missing = failure.parameters.get("missing", range(len(letters)))
                self._leave([letters[index] for index in missing], failure.description)
                again = [letter for index, letter in enumerate(again) if index not in missing]
                letters = [letter for index, letter in enumerate(letters) if index not in missing]
            self._done.again += len(letters)
            self._tell([letter.record for letter in again], Outcome.DEAD_LETTER, [letter.reply for letter in again])
        return letters

    def _tell(self, records: Sequence[Record], how: Outcome, replies: Sequence[Reply] = ()) -> None:
        if records and (on_ended := self._consumer.pump.hooks.on_ended):
            size_bytes = sum([record.size_bytes for record in records])
            on_ended(records, size_bytes, how, replies, self._delivery.replay)

    def _leave(self, letters: Sequence[Letter], why: str) -> list[Letter]:
        self._done.left += len(letters)
        self._done.why = why if letters else self._done.why
        return []


def _again(letter: Letter, reply: Reply, group: str, now: float) -> DeadLetter:
    try:
        first = datetime.fromisoformat(letter.origin.first_failure).timestamp()
    except ValueError:
        first = now
    return DeadLetter(letter.was, group, letter.origin.attempts + 1, reply, first, now)
