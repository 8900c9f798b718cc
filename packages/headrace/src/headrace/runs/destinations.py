"""Destinations of a run: another topic, or a backend or function, as if the records had just been read."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from headrace import errors
from headrace.delivery.dead_letter import REFUSALS, restored
from headrace.delivery.offset_map import decode
from headrace.delivery.outcomes import (
    ACK,
    HANDED_OFF,
    DeadLetter,
    DeadLetterWriter,
    Delivery,
    Destination,
    EpochOf,
    Reply,
    in_turn,
    no_epoch,
    not_taken,
)
from headrace.records import CommitOffsets, Header, OutgoingRecord, Produce, Record, TopicPartition

REPLAY = "headrace.replay"
"""Header of a record that a replay wrote to a topic: the id of the job."""
REPLAY_OF = "headrace.replay.of"
"""Header of the same record: `topic:partition:offset` of its original."""


class CopyToTopic:
    """Writes records to another topic: their bytes, headers and timestamp, and the partition if it is there too."""

    def __init__(self, topic: str, partitions: int, produce: Produce, job: str) -> None:
        self._topic, self._partitions, self._produce, self._job = topic, partitions, produce, job

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        try:
            results = await self._produce([self._outgoing(record) for record in delivery.records])
        except errors.HeadraceError as cause:
            raise errors.DestinationUnavailable(f"failed to write to {self._topic}: {cause.description}") from cause
        replies = [self._reply(result) for result in results]
        failure = next((reply.error for reply in replies if reply.error and not reply.permanent), "")
        if failure and ACK not in replies:
            raise errors.DestinationUnavailable(failure)
        return in_turn(replies)

    def _outgoing(self, record: Record) -> OutgoingRecord:
        headers: list[Header] = [header for header in record.headers if header[0] not in (REPLAY, REPLAY_OF)]
        position = f"{record.topic}:{record.partition}:{record.offset}".encode()
        headers += [(REPLAY, self._job.encode()), (REPLAY_OF, position)]
        partition = record.partition if record.partition < self._partitions else None
        time_ms = max(0, record.timestamp_ms)
        return OutgoingRecord(self._topic, record.key, record.value, headers, partition, time_ms)

    def _reply(self, result: Any) -> Reply:
        if not isinstance(result, errors.HeadraceError):
            return ACK
        if isinstance(result, REFUSALS):
            return Reply(type(result).__name__, result.description, permanent=True)
        return Reply(f"{self._topic} did not acknowledge: {result.description}", reached=False)


class RestoredDelivery:
    """Delivers the original records of dead letters, grouped by partition; other records are skipped."""

    def __init__(
        self,
        inner: Destination,
        selects: Callable[[Record], bool],
        is_origin: Callable[[str], bool],
        epoch_of: EpochOf = no_epoch,
    ) -> None:
        """Prepare; `selects` chooses the dead letters, `is_origin` returns whether they may be from a topic."""
        self.passed = 0
        """Records that were not delivered: not selected, or unproved."""
        self.unproved = 0
        """Dead letters whose origin is not proved."""
        self._inner, self._selects, self._is_origin, self._epoch_of = inner, selects, is_origin, epoch_of
        self._begun: defaultdict[int, set[int]] = defaultdict(set)

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        replies: list[Reply] = [HANDED_OFF] * len(delivery.records)
        selected = {index: restored(record) for index, record in enumerate(delivery.records) if self._selects(record)}
        proved = {index: record for index, record in selected.items() if self._is_origin(record.topic)}
        groups = _groups(proved)
        for number, group in enumerate(groups):
            records = list(group.values())
            origin = records[0].topic_partition
            part = delivery._replace(partition=origin, epoch=self._epoch_of(origin), records=records)
            try:
                answered = await self._inner.deliver(part)
            except errors.DeliveryError as cause:
                if not number:
                    raise
                # Delivered records are not repeated. Later groups wait: they may have later records of this partition.
                for index in itertools.chain.from_iterable(groups[number:]):
                    replies[index] = not_taken(cause)
                break
            for index, reply in zip(group, answered, strict=True):
                replies[index] = reply
        self._begun[delivery.partition.partition].update(delivery.records[index].offset for index in proved)
        self.passed += len(replies) - len(proved)
        self.unproved += len(selected) - len(proved)
        return replies

    def completed(self, positions: CommitOffsets) -> dict[int, list[int]]:
        """Return the delivered dead letters that are completed by these positions, by partition."""
        found: dict[int, list[int]] = {}
        for (_, number), at in positions.items():
            begun = self._begun.get(number, ())
            above = decode(at.metadata, at.offset) if at.metadata else None
            done = [offset for offset in begun if offset < at.offset or (above and above.has(offset))]
            found[number] = sorted(done)
        return found

    def forget(self, completed: Mapping[int, Sequence[int]]) -> None:
        """Do not return these dead letters again; call when they are saved as completed."""
        for number, offsets in completed.items():
            self._begun[number].difference_update(offsets)


def _groups(records: Mapping[int, Record]) -> list[dict[int, Record]]:
    """Group records by their original partition; a record that is there twice is in two groups."""
    groups: list[dict[int, Record]] = []
    open_groups: dict[TopicPartition, tuple[dict[int, Record], set[int]]] = {}
    for index, record in records.items():
        group, offsets = open_groups.get(record.topic_partition, (None, set()))
        if group is None or record.offset in offsets:
            group, offsets = {}, set()
            open_groups[record.topic_partition] = group, offsets
            groups.append(group)
        group[index] = record
        offsets.add(record.offset)
    return groups


class ReplayDeadLetters:
    """Writes dead letters for what fails in a replay; they name the job, and hold the original record."""

    def __init__(
        self, inner: DeadLetterWriter | None, job: str, *, restores: bool, fail: Callable[[errors.HeadraceError], None]
    ) -> None:
        """Prepare; without `inner` dead letters are off, and `fail` ends the job with the reason."""
        self._inner, self._job, self._restores, self._fail = inner, job, restores, fail

    async def write(self, dead_letters: Sequence[DeadLetter]) -> Collection[int] | None:
        if self._inner is None:
            first = dead_letters[0]
            why = (
                f"offset {first.record.offset} of {first.record.topic_partition} failed {first.attempts} times "
                f"({first.reply.error}: {first.reply.reason[:200]}), and dead letters are off: replay with lastRetry "
                "to drop records that fail"
            )
            self._fail(errors.HeadraceError(why))
            raise errors.DeadLetterFailed(why)
        return await self._inner.write([self._of(dead_letter) for dead_letter in dead_letters])

    def _of(self, dead_letter: DeadLetter) -> DeadLetter:
        reply = dead_letter.reply._replace(details=(*dead_letter.reply.details, ("replay", self._job)))
        record = restored(dead_letter.record) if self._restores else dead_letter.record
        return dead_letter._replace(record=record, reply=reply)
