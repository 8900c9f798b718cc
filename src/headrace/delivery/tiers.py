"""Retry tiers: a record that has used up its attempts waits in a topic of its delay, and is delivered again when due.

Key, value and the record's own headers stay byte for byte; where it comes from and when it is due are headers of our
own behind them. All records of a topic wait equally long, so they are due in the order they lie there, and looking at
the first is enough. Source: delivery.md 2.1 (uForwarder), 4.5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace.config.consumers import RetryConfig
from headrace.delivery.dead_letter import iso, write_each
from headrace.delivery.parked import ParkedKeys
from headrace.delivery.policy import action_of
from headrace.delivery.protocols import (
    ELSEWHERE,
    DeadLetter,
    DeadLetterWriter,
    Delivery,
    Destination,
    EpochOf,
    Outcome,
    Verdict,
    Waiting,
    no_epoch,
)
from headrace.errors import DeadLetterFailed, HeadraceError, RecordTooLarge
from headrace.lifecycle import Clock
from headrace.records import Header, OutgoingRecord, Record, TopicPartition

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
        self._unmarked: set[tuple[TopicPartition, int]] = set()  # of retry topics: ended, but their keys are blocked

    async def write(self, letters: Sequence[DeadLetter]) -> Collection[int]:
        """Write every letter; see `DeadLetterWriter`. What is too large for its retry topic is a dead letter."""
        now = self._clock.time()
        letters, copies = list(letters), dict[int, Record]()
        tiers: dict[int, int] = {}
        for place, letter in enumerate(letters):
            topic, tier = letter.record.topic, 0
            if topic in self._topics:
                copies[place] = letter.record
                letters[place] = letter = letter._replace(record=waiting_of(letter.record).origin, group=self.group)
                tier = self._topics.index(topic) + 1
            if self._may_wait(letter, tier, now):
                tiers[place] = tier
        failed = await self._delay(letters, tiers, now) if tiers else {}
        delayed = [place for place in tiers if place not in failed]
        too_large = [place for place, why in failed.items() if isinstance(why, RecordTooLarge)]
        # One that was never delivered is no dead letter: it waits for its key where it came from.
        dead = [place for place in range(len(letters)) if place not in tiers]
        dead += [place for place in too_large if letters[place].attempts]
        failed = {place: why for place, why in failed.items() if place not in dead}
        unwritten = [place for place in dead if not (place in copies and self.has_ended(copies[place]))]
        failed |= await self._bury(letters, unwritten) if unwritten else {}
        for place in too_large:
            if place not in failed or place not in dead:
                with contextlib.suppress(DeadLetterFailed):
                    await self.let_go(letters[place].record)
        failed |= await self._end_all({place: copy for place, copy in copies.items() if place not in failed})
        if failed:
            why = next(iter(failed.values())).description
            raise DeadLetterFailed(why, missing=[*failed], delayed=[place for place in delayed if place not in failed])
        return delayed

    async def _end_all(self, copies: Mapping[int, Record]) -> dict[int, HeadraceError]:
        """Unblock the keys of records of a retry topic; return why that is not written, by their places."""
        problems: dict[int, HeadraceError] = {}
        for place, copy in copies.items():
            try:
                await self.end(copy)
            except DeadLetterFailed as failure:
                problems[place] = failure
        return problems

    def waiting(self, copy: Record) -> Waiting:
        """Return what a record of a retry topic is, and how long it waits at most."""
        if copy.topic not in self._topics:
            return waiting_of(copy)
        return waiting_of(copy)._replace(delay_seconds=self.retry.tiers[self._topics.index(copy.topic)])

    def has_ended(self, copy: Record) -> bool:
        """Whether a record of a retry topic was delivered or buried, and only its key is still blocked."""
        return (copy.topic_partition, copy.offset) in self._unmarked

    async def end(self, copy: Record) -> None:
        """Unblock the key of a record of a retry topic, which has ended.

        Raises:
            DeadLetterFailed: It is not written. `has_ended` is true until it is, so nothing is delivered twice.
        """
        waiting = waiting_of(copy)
        if self.parked and waiting.parked is not None:
            place = (copy.topic_partition, copy.offset)
            self._unmarked.add(place)
            await self.parked.end(waiting.origin)
            self._unmarked.discard(place)

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

    async def _delay(
        self, letters: Sequence[DeadLetter], tiers: Mapping[int, int], now: float
    ) -> dict[int, HeadraceError]:
        """Write records to their retry topics, and before that, that their keys wait: so nobody passes them.

        Returns:
            Why records are not written, by their places.
        """
        records = {place: letters[place].record for place in tiers}
        keyed = [place for place, record in records.items() if record.key is not None]
        entries: dict[int, int] = {}
        if self.parked and keyed:
            try:
                entries = dict(zip(keyed, await self.parked.park([records[p] for p in keyed]), strict=True))
            except DeadLetterFailed as failure:
                return dict.fromkeys(tiers, failure)
        outgoing = []
        for place, tier in tiers.items():
            record, due = records[place], now + self.retry.tiers[tier]
            headers = [*record.headers, *waiting_headers(letters[place], due, entries.get(place))]
            outgoing.append(OutgoingRecord(self._topics[tier], record.key, record.value, headers))
        results = zip(tiers, await write_each(self._produce, outgoing), strict=True)
        return {place: result for place, result in results if isinstance(result, HeadraceError)}

    async def _bury(self, letters: Sequence[DeadLetter], places: Sequence[int]) -> dict[int, HeadraceError]:
        """Write dead letters; return why some are not written, by their places."""
        if self._dead_letters is None:
            first = letters[places[0]]
            off = DeadLetterFailed(
                f"offset {first.record.offset} of {first.record.topic_partition} failed {first.attempts} times "
                f"({first.outcome.error}) and dead letters are off: repair the destination, or turn "
                "dead_letter.enabled on, and start again"
            )
            return dict.fromkeys(places, off)
        try:
            await self._dead_letters.write([letters[place] for place in places])
        except DeadLetterFailed as failure:
            missing = failure.parameters.get("missing", range(len(places)))
            return dict.fromkeys([places[index] for index in missing], failure)
        return {}


class TierDestination:
    """Gives a destination the records of the tiers as their origin had them, one by one."""

    def __init__(self, inner: Destination, tiers: Tiers, epoch_of: EpochOf = no_epoch) -> None:
        """Prepare; `epoch_of` tells the live epochs of the partitions that the records came from."""
        self._inner, self._epoch_of = inner, epoch_of
        self._tiers = tiers

    async def deliver(self, delivery: Delivery) -> Sequence[Outcome]:
        """Deliver; a record that has ended while its copy still lay in the tier is not delivered again."""
        return [await self._deliver(delivery, record) for record in delivery.records]

    async def _deliver(self, delivery: Delivery, copy: Record) -> Outcome:
        tiers, waiting = self._tiers, waiting_of(copy)
        origin, outcome = waiting.origin, ELSEWHERE
        if tiers.parked and waiting.parked is not None:
            await tiers.parked.catch_up(delivery, waiting.parked)
            if origin.offset not in tiers.parked.of(origin):
                return ELSEWHERE
        if not tiers.has_ended(copy):
            place = origin.topic_partition
            one = delivery._replace(group=tiers.group, partition=place, epoch=self._epoch_of(place), records=[origin])
            outcome = (await self._inner.deliver(one))[0]
        if outcome.verdict is Verdict.ACK or action_of(outcome, tiers.retry) == "skip":
            await tiers.end(copy)
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
