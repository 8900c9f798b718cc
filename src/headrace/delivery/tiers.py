"""Retry tiers: a record that has used up its attempts waits in a topic of its delay, and is delivered again when due.

Key, value and the record's own headers stay byte for byte; where it comes from and when it is due are headers of our
own behind them. All records of a topic wait equally long, so they are due in the order they lie there, and looking at
the first is enough. Source: delivery.md 2.1 (uForwarder), 4.5.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime
from typing import Any

from headrace.config.retry import RetryConfig
from headrace.delivery.dead_letter import iso, write_all
from headrace.delivery.parked import ParkedKeys
from headrace.delivery.policy import action_of
from headrace.delivery.protocols import (
    ELSEWHERE,
    DeadLetter,
    DeadLetterWriter,
    Delivery,
    Destination,
    Outcome,
    Verdict,
    Waiting,
)
from headrace.errors import DeadLetterFailed
from headrace.lifecycle import Clock
from headrace.records import Header, OutgoingRecord, Record

PREFIX = "headrace.retry."
_NAMES = tuple(
    PREFIX + name
    for name in ("topic", "partition", "offset", "timestamp", "attempts", "first_failure", "error", "due", "parked")
)
_ERROR_BYTES = 256


class Tiers:
    """Writes failed records to the next tier, and those that have been through all of them as dead letters."""

    def __init__(
        self,
        group: str,
        retry: RetryConfig,
        produce: Callable[[Sequence[OutgoingRecord]], Awaitable[Sequence[Any]]],
        clock: Clock,
        *,
        dead_letters: DeadLetterWriter | None,
        parked: ParkedKeys | None = None,
    ) -> None:
        """Prepare.

        Args:
            group: Group of the consumer the records come from.
            retry: Delays, deadline, and what counts as failed for good.
            produce: Writes records; an error stands in the place of each that failed.
            clock: For due times.
            dead_letters: Where records go after the last tier; without it their partition stands still.
            parked: Keys whose order is kept across the delay.
        """
        self.group = group
        self.retry = retry
        self.parked = parked
        self._produce = produce
        self._clock = clock
        self._dead_letters = dead_letters
        self._topics = retry.tier_topics(group)

    async def write(self, letters: Sequence[DeadLetter]) -> Collection[int]:
        """Write every letter; see `DeadLetterWriter`. If one fails, all are to be repeated."""
        now = self._clock.time()
        delayed: list[tuple[DeadLetter, int]] = []
        places: list[int] = []
        dead: list[DeadLetter] = []
        ended: list[Waiting] = []
        for place, letter in enumerate(letters):
            topic, tier = letter.record.topic, 0
            if topic in self._topics:
                waiting = waiting_of(letter.record)
                letter = letter._replace(record=waiting.origin, group=self.group)
                tier = self._topics.index(topic) + 1
                ended.append(waiting)
            if self._may_wait(letter, tier, now):
                delayed.append((letter, tier))
                places.append(place)
            else:
                dead.append(letter)
        if delayed:
            await self._delay(delayed, now)
        if dead:
            await self._bury(dead)
        for waiting in ended:
            await self.end(waiting)
        return places

    async def end(self, waiting: Waiting) -> None:
        """Let go what waits behind a record that has ended.

        Raises:
            DeadLetterFailed: It is not written that the record has ended; so it has not.
        """
        if self.parked and waiting.parked is not None:
            await self.parked.end(waiting.origin)

    async def let_go(self, origin: Record) -> None:
        """Let go what waits behind a record that is skipped, whether or not it has come into a tier.

        Raises:
            DeadLetterFailed: It is not written that the record has ended; so it has not.
        """
        if self.parked:
            await self.parked.end(origin)

    def _may_wait(self, letter: DeadLetter, tier: int, now: float) -> bool:
        retry = self.retry
        if tier >= len(retry.tiers) or action_of(letter.outcome, retry) != "retry":
            return False
        first = letter.first_failed_at or now
        return not retry.deadline_seconds or now + retry.tiers[tier] <= first + retry.deadline_seconds

    async def _delay(self, letters: Sequence[tuple[DeadLetter, int]], now: float) -> None:
        """Write records to their tiers, and before that, that their keys wait: so nobody passes them."""
        keyed = [letter.record for letter, _ in letters if letter.record.key is not None]
        entries = iter(await self.parked.park(keyed) if self.parked and keyed else ())
        outgoing = []
        for letter, tier in letters:
            record, due = letter.record, now + self.retry.tiers[tier]
            entry = next(entries, None) if record.key is not None else None
            headers = [*record.headers, *waiting_headers(letter, due, entry)]
            outgoing.append(OutgoingRecord(self._topics[tier], record.key, record.value, headers))
        await write_all(self._produce, outgoing, f"records of {letters[0][0].record.topic} that are to wait")

    async def _bury(self, letters: Sequence[DeadLetter]) -> None:
        if self._dead_letters is None:
            first = letters[0]
            raise DeadLetterFailed(
                f"offset {first.record.offset} of {first.record.topic_partition} failed {first.attempts} times "
                f"({first.outcome.error}) and dead letters are off: repair the destination, or turn "
                "dead_letter.enabled on, and start again"
            )
        try:
            await self._dead_letters.write(letters)
        except DeadLetterFailed as failure:
            raise DeadLetterFailed(failure.description) from failure  # it counts places in this list, not in ours


class TierDestination:
    """Gives a destination the records of the tiers as their origin had them, one by one."""

    def __init__(self, inner: Destination, tiers: Tiers) -> None:
        self._inner = inner
        self._tiers = tiers

    async def deliver(self, delivery: Delivery) -> Sequence[Outcome]:
        """Deliver; a record that has ended while its copy still lay in the tier is not delivered again."""
        return [await self._deliver(delivery, waiting_of(record)) for record in delivery.records]

    async def _deliver(self, delivery: Delivery, waiting: Waiting) -> Outcome:
        tiers, origin = self._tiers, waiting.origin
        if tiers.parked and waiting.parked is not None:
            await tiers.parked.catch_up(delivery, waiting.parked)
            if origin.offset not in tiers.parked.of(origin):
                return ELSEWHERE
        one = delivery._replace(group=tiers.group, partition=origin.topic_partition, records=[origin])
        outcome = (await self._inner.deliver(one))[0]
        if outcome.verdict is Verdict.ACK or action_of(outcome, tiers.retry) == "skip":
            await tiers.end(waiting)
        return outcome


def waiting_of(record: Record) -> Waiting:
    """Return what a record in a tier is; one that somebody else wrote is what it is."""
    headers = record.headers
    own, ours = headers[: -len(_NAMES)], headers[-len(_NAMES) :]
    if tuple(name for name, _ in ours) != _NAMES:
        return Waiting(record)
    try:
        topic, partition, offset, timestamp, attempts, first, _, due, parked = ((v or b"").decode() for _, v in ours)
        origin = Record(
            topic, int(partition), int(offset), int(timestamp), record.key, record.value, lambda: own, record.size_bytes
        )
        return Waiting(origin, int(attempts), _seconds(first), _seconds(due), int(parked) if parked else None)
    except ValueError:
        return Waiting(record)


def waiting_headers(letter: DeadLetter, due: float, parked: int | None = None) -> list[Header]:
    """Return the headers that stand last in a record of a tier, and say what it is."""
    record = letter.record
    texts = (
        record.topic,
        str(record.partition),
        str(record.offset),
        str(record.timestamp_ms),
        str(letter.attempts),
        iso(letter.first_failed_at) if letter.first_failed_at else "",
        letter.outcome.error,
        iso(due),
        "" if parked is None else str(parked),
    )
    return [(name, text.encode()[:_ERROR_BYTES]) for name, text in zip(_NAMES, texts, strict=True)]


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
