"""Retry topics: a record that has used up its attempts waits in a topic with a delay, and is delivered again when due.

Key, value and the record's own headers stay byte for byte; its origin and due time are in headers after them. All
records of a topic have the same delay, so they are due in the order of the topic.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from headrace.config.consumers import RetryConfig
from headrace.delivery.blocked_keys import BlockedKeys
from headrace.delivery.dead_letter import REFUSALS, iso
from headrace.delivery.outcomes import (
    HANDED_OFF,
    DeadLetter,
    DeadLetterWriter,
    DelayedRecord,
    Delivery,
    Destination,
    EpochOf,
    KeyUnblocker,
    Reply,
    no_epoch,
)
from headrace.delivery.policy import action_of
from headrace.errors import DeadLetterFailed, HeadraceError
from headrace.records import Header, OutgoingRecord, Produce, Record, TopicPartition
from headrace.runtime import Clock

PREFIX = "headrace.retry."
_NAMES = tuple(
    PREFIX + name
    for name in ("topic", "partition", "offset", "timestamp", "attempts", "first_failure", "error", "due", "blocked")
)
_TABLE_ID = PREFIX + "blocked_in"
"""Kafka's id of the topic of blocked keys; before the others, which every record of a retry topic has."""
_ERROR_BYTES = 256


class RetryTopics(KeyUnblocker):
    """Writes failed records to the next retry topic, and after the last one as dead letters."""

    def __init__(
        self,
        group: str,
        retry: RetryConfig,
        produce: Produce,
        clock: Clock,
        *,
        dead_letters: DeadLetterWriter | None,
        blocked: BlockedKeys | None = None,
    ) -> None:
        """Prepare; `dead_letters` gets records after the last retry topic. Without it their partition stalls."""
        self.group = group
        self.retry = retry
        self.blocked = blocked
        self._produce = produce
        self._clock = clock
        self._dead_letters = dead_letters
        self._topics = retry.topic_names(group)
        self._unmarked: set[tuple[TopicPartition, int]] = (
            set()
        )  # records of retry topics that are completed, but still block their keys

    async def write(self, dead_letters: Sequence[DeadLetter]) -> Collection[int]:
        """See `DeadLetterWriter`. A record that its retry topic rejects becomes a dead letter."""
        now = self._clock.time()
        dead_letters = list(dead_letters)
        copies: dict[int, Record] = {}
        levels: dict[int, int] = {}
        for index, dead_letter in enumerate(dead_letters):
            topic, level = dead_letter.record.topic, 0
            if topic in self._topics:
                copies[index] = dead_letter.record
                dead_letters[index] = dead_letter = dead_letter._replace(
                    record=delayed_of(dead_letter.record).origin, group=self.group
                )
                level = self._topics.index(topic) + 1
            if self._may_delay(dead_letter, level):
                levels[index] = level
        failed = await self._delay(dead_letters, levels, now) if levels else {}
        delayed = [index for index in levels if index not in failed]
        refused = [index for index, why in failed.items() if isinstance(why, REFUSALS)]
        # A record that was never delivered does not become a dead letter: it waits for its key in its own topic.
        dead = [index for index in range(len(dead_letters)) if index not in levels]
        dead += [index for index in refused if dead_letters[index].attempts]
        failed = {index: why for index, why in failed.items() if index not in dead}
        unwritten = [index for index in dead if not (index in copies and self.is_completed(copies[index]))]
        failed |= await self._write_dead_letters(dead_letters, unwritten) if unwritten else {}
        for index in refused:
            if index not in failed or index not in dead:
                with contextlib.suppress(DeadLetterFailed):
                    await self.unblock(dead_letters[index].record)
        failed |= await self._complete_all({index: copy for index, copy in copies.items() if index not in failed})
        if failed:
            why = next(iter(failed.values())).description
            raise DeadLetterFailed(why, missing=[*failed], delayed=[index for index in delayed if index not in failed])
        return delayed

    async def _complete_all(self, copies: Mapping[int, Record]) -> dict[int, HeadraceError]:
        """Unblock the keys of records of a retry topic; return the failures, by index."""
        problems: dict[int, HeadraceError] = {}
        for index, copy in copies.items():
            try:
                await self.complete(copy)
            except DeadLetterFailed as failure:
                problems[index] = failure
        return problems

    def delayed(self, copy: Record) -> DelayedRecord:
        """Decode a record of a retry topic, with its longest wait."""
        if copy.topic not in self._topics:
            return delayed_of(copy)
        return delayed_of(copy)._replace(delay_seconds=self.retry.topics[self._topics.index(copy.topic)])

    def is_completed(self, copy: Record) -> bool:
        """Whether a record of a retry topic was delivered or dead-lettered, and only still blocks its key."""
        return (copy.topic_partition, copy.offset) in self._unmarked

    async def complete(self, copy: Record) -> None:
        """Unblock the key of a record of a retry topic that is completed or skipped.

        Raises:
            DeadLetterFailed: The write failed. `is_completed` stays true until it succeeds, so nothing is delivered
                twice.
        """
        delayed = delayed_of(copy)
        if self.blocked and delayed.entry is not None:
            identity = (copy.topic_partition, copy.offset)
            self._unmarked.add(identity)
            await self.blocked.complete(delayed)
            self._unmarked.discard(identity)

    async def unblock(self, record: Record) -> None:  # whether or not it has reached a retry topic
        if self.blocked:
            await self.blocked.unblock(record)

    async def rewind(self, partition: TopicPartition, offset: int) -> None:  # so copies of them are not delivered
        if self.blocked:
            await self.blocked.rewind(partition, offset)

    def _may_delay(self, dead_letter: DeadLetter, level: int) -> bool:
        is_permanent = dead_letter.attempts and action_of(dead_letter.reply, self.retry) != "retry"
        return level < len(self.retry.topics) and not is_permanent

    async def _delay(
        self, dead_letters: Sequence[DeadLetter], levels: Mapping[int, int], now: float
    ) -> dict[int, HeadraceError]:
        """Write the entries of blocked keys, then records to their retry topics; return the failures, by index."""
        records = {index: dead_letters[index].record for index in levels}
        keyed = [index for index, record in records.items() if record.key is not None]
        entries: dict[int, int] = {}
        if self.blocked and keyed:
            try:
                entries = dict(zip(keyed, await self.blocked.block([records[p] for p in keyed]), strict=True))
            except DeadLetterFailed as failure:
                return dict.fromkeys(levels, failure)
        outgoing = []
        for index, level in levels.items():
            record, due = records[index], now + self.retry.topics[level]
            headers = [*record.headers, *delayed_headers(dead_letters[index], due, entries.get(index))]
            if self.blocked and index in entries:
                headers.insert(-len(_NAMES), (_TABLE_ID, self.blocked.table_id.encode()))
            outgoing.append(OutgoingRecord(self._topics[level], record.key, record.value, headers))
        try:
            results = zip(levels, await self._produce(outgoing), strict=True)
        except HeadraceError as cause:
            return dict.fromkeys(levels, cause)
        return {index: result for index, result in results if isinstance(result, HeadraceError)}

    async def _write_dead_letters(
        self, dead_letters: Sequence[DeadLetter], indexes: Sequence[int]
    ) -> dict[int, HeadraceError]:
        """Write dead letters; return the failures, by index."""
        if self._dead_letters is None:
            first = dead_letters[indexes[0]]
            off = DeadLetterFailed(
                f"offset {first.record.offset} of {first.record.topic_partition} failed {first.attempts} times "
                f"({first.reply.error}), and dead letters are off; repair the destination, or set "
                "dead_letter.enabled to true, and restart"
            )
            return dict.fromkeys(indexes, off)
        try:
            await self._dead_letters.write([dead_letters[index] for index in indexes])
        except DeadLetterFailed as failure:
            missing = failure.parameters.get("missing", range(len(indexes)))
            return dict.fromkeys([indexes[index] for index in missing], failure)
        return {}


class RetryTopicDestination(KeyUnblocker):
    """Delivers the records of retry topics as they were at their origin, one by one."""

    def __init__(self, inner: Destination, topics: RetryTopics, epoch_of: EpochOf = no_epoch) -> None:
        """Prepare; `epoch_of` returns the live epochs of the records' original partitions."""
        self._inner = inner
        self._epoch_of = epoch_of
        self._topics = topics

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        """Deliver; a record that was completed while its copy was still in the retry topic is not delivered again."""
        return [await self._deliver(delivery, record) for record in delivery.records]

    async def unblock(self, record: Record) -> None:
        await self._topics.complete(record)

    async def _deliver(self, delivery: Delivery, copy: Record) -> Reply:
        topics = self._topics
        delayed = delayed_of(copy)
        origin = delayed.origin
        reply = HANDED_OFF
        if topics.blocked and delayed.entry is not None and not await topics.blocked.is_waiting(delivery, delayed):
            return HANDED_OFF
        if not topics.is_completed(copy):
            partition = origin.topic_partition
            one = delivery._replace(
                group=topics.group, partition=partition, epoch=self._epoch_of(partition), records=[origin]
            )
            reply = (await self._inner.deliver(one))[0]
        if not reply.error or action_of(reply, topics.retry) == "skip":
            await topics.complete(copy)
        return reply


def delayed_of(record: Record) -> DelayedRecord:
    """Decode a record of a retry topic; a record that Headrace did not write is its own origin."""
    headers = record.headers
    own, added = headers[: -len(_NAMES)], headers[-len(_NAMES) :]
    if tuple(name for name, _ in added) != _NAMES:
        return DelayedRecord(record)
    table_id = ""
    if own and own[-1][0] == _TABLE_ID:
        own, table_id = own[:-1], (own[-1][1] or b"").decode(errors="replace")
    try:
        topic, partition, offset, timestamp, attempts, first, _, due, entry = ((v or b"").decode() for _, v in added)
        origin = Record(
            topic, int(partition), int(offset), int(timestamp), record.key, record.value, lambda: own, record.size_bytes
        )
        at = int(entry) if entry else None
        return DelayedRecord(origin, int(attempts), _seconds(first), _seconds(due), at, table_id)
    except ValueError:
        return DelayedRecord(record)


def delayed_headers(dead_letter: DeadLetter, due: float, entry: int | None = None) -> list[Header]:
    """Return the last headers of a record in a retry topic: its origin, history and due time."""
    record = dead_letter.record
    texts = (
        record.topic,
        str(record.partition),
        str(record.offset),
        str(record.timestamp_ms),
        str(dead_letter.attempts),
        iso(dead_letter.first_failed_at) if dead_letter.first_failed_at else "",
        dead_letter.reply.error,
        iso(due),
        "" if entry is None else str(entry),
    )
    return [(name, text.encode()[:_ERROR_BYTES]) for name, text in zip(_NAMES, texts, strict=True)]


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
