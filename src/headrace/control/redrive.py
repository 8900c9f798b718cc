"""Dead letters back to where they came from.

How far a topic is redriven is the committed position of a consumer group (`headrace.redrive.<topic>`), so progress is
visible, and a redrive that was interrupted goes on where it stood. Kafka forgets the position of an unused group after
`offsets.retention.minutes` (7 days); a redrive after that starts at the first letter again.
"""

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.config.kafka import KafkaConfig
from headrace.control.dead_letters import group_of
from headrace.control.topics import read_window, window
from headrace.delivery.dead_letter import (
    REDRIVE_COUNT,
    REDRIVE_OF,
    Origin,
    letter_of,
    origin_of,
    own_headers,
)
from headrace.errors import HeadraceError, InvalidRequest
from headrace.kafka import Admin
from headrace.lifecycle import Clock
from headrace.records import Header, OutgoingRecord, Record, TopicPartition

Produce = Callable[[Sequence[OutgoingRecord]], Awaitable[Sequence[Any]]]
"""Writes records and returns a result per record; an error stands in the place of each that failed."""

_SLICE_RECORDS = 500
_SLICE_BYTES = 8_388_608


class Redriven(NamedTuple):
    """What a redrive did, or would do."""

    records: int
    targets: Mapping[str, int]
    """Topic to how many letters went back to it."""
    foreign: int
    """Records passed over because they are no dead letters."""


class RedriveOptions(NamedTuple):
    """How letters go back."""

    dry_run: bool = False
    """Count what would go where; write and commit nothing."""
    rate_records: float | None = None
    """Records per second at most."""
    from_beginning: bool = False
    """Start at the first letter, whatever was redriven already."""
    skip_foreign: bool = False
    """Pass over records that are no dead letters instead of refusing them."""


class Redrive:
    """Sends the letters of one dead letter topic back."""

    def __init__(self, kafka: KafkaConfig, admin: Admin, topic: str, produce: Produce, clock: Clock) -> None:
        self._kafka = kafka
        self._admin = admin
        self._topic = topic
        self._group = group_of(topic)
        self._produce = produce
        self._clock = clock
        self._partitions: dict[str, int] = {}

    async def run(
        self, options: RedriveOptions, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Redriven:
        """Send every letter that is left back to the partition it came from, and commit what is acknowledged.

        Key, value and the record's own headers are those the record had; `headrace.redrive.count` says how often it
        came back, `headrace.redrive.of` which record it was first. Its timestamp is now, because an old one could be
        beyond the topic's retention.

        If cancelled or killed, letters that went back and were not committed yet go back again next time; none is
        passed over. Two redrives of one topic at a time send letters twice.

        Args:
            options: How.
            progress: Told letters done and letters in all after each step.

        Raises:
            TopicNotFound: The dead letter topic, or one that letters came from, does not exist.
            InvalidRequest: A record is no dead letter, came from this very topic, or the group stands beyond the log.
            KafkaError: A letter could not be written; those before it are committed.
        """
        starts, ends = await self._left(options.from_beginning)
        total, done, foreign = sum(ends.values()) - sum(starts.values()), 0, 0
        targets: Counter[str] = Counter()
        async with contextlib.aclosing(self._slices(starts, ends, options.rate_records)) as slices:
            async for records in slices:
                letters = [r for r in records if not options.skip_foreign or origin_of(r.headers)]
                outgoing = [await self._outgoing(record) for record in letters]
                if not options.dry_run:
                    results = await self._produce(outgoing) if outgoing else []
                    await self._commit(records, dict(zip(map(_place, letters), results, strict=True)))
                targets.update(record.topic for record in outgoing)
                foreign += len(records) - len(letters)
                done += len(records)
                progress(done, total)
                if options.rate_records and not options.dry_run:
                    await self._clock.sleep(len(outgoing) / options.rate_records)
        if not options.dry_run:
            await self._admin.alter_group_offsets(self._group, ends)
        return Redriven(done - foreign, dict(targets), foreign)

    async def _left(self, from_beginning: bool) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        starts, ends = await window(self._admin, self._topic)
        committed = {} if from_beginning else await self._admin.committed(self._group)
        for partition, first in starts.items():
            position = committed.get(partition, first)
            if position > ends[partition]:
                raise InvalidRequest(
                    f"{partition} ends at {ends[partition]}, and group {self._group} stands at {position}: the topic "
                    "was deleted and made again since the last redrive. Redrive it with --from-beginning",
                    topic=self._topic,
                )
            starts[partition] = max(first, position)
        return starts, ends

    async def _slices(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], rate: float | None
    ) -> AsyncGenerator[list[Record], None]:
        """Yield records in steps of about a second of the rate, and small enough for the producer's budget."""
        most = max(1, min(_SLICE_RECORDS, int(rate or _SLICE_RECORDS)))
        async with contextlib.aclosing(read_window(self._kafka, starts, ends)) as batches:
            async for batch in batches:
                part: list[Record] = []
                size = 0
                for record in batch:
                    if part and (len(part) >= most or size + record.size_bytes > _SLICE_BYTES):
                        yield part
                        part, size = [], 0
                    part.append(record)
                    size += record.size_bytes
                if part:
                    yield part

    async def _commit(self, records: Sequence[Record], results: Mapping[tuple[TopicPartition, int], Any]) -> None:
        """Commit each partition up to its first letter that failed, then raise that failure if there is one."""
        positions: dict[TopicPartition, int] = {}
        stopped: dict[TopicPartition, HeadraceError] = {}
        for record in records:
            partition = record.topic_partition
            if isinstance(failure := results.get(_place(record)), HeadraceError):
                stopped.setdefault(partition, failure)
            if partition not in stopped:
                positions[partition] = record.offset + 1
        if positions:
            await self._admin.alter_group_offsets(self._group, positions)
        for failure in stopped.values():
            raise failure

    async def _outgoing(self, record: Record) -> OutgoingRecord:
        """Return the record that goes back from a letter."""
        origin = letter_of(record)
        target, wanted = origin.partition
        if target == self._topic or target.startswith("__"):
            raise InvalidRequest(
                f"record {record.offset} of {record.topic_partition} says it came from {target}: redriving there is "
                "refused, because it is the dead letter topic itself or internal to Kafka",
                topic=self._topic,
            )
        if target not in self._partitions:
            self._partitions[target] = len((await self._admin.describe_topic(target)).partitions)
        # A topic that was made again with fewer partitions: the key chooses.
        partition = wanted if 0 <= wanted < self._partitions[target] else None
        return OutgoingRecord(target, record.key, record.value, _redriven_headers(record.headers, origin), partition)


def _redriven_headers(headers: Sequence[Header], origin: Origin) -> list[Header]:
    own = own_headers(headers)
    earlier = dict(own)
    counted = earlier.get(REDRIVE_COUNT) or b""
    count = int(counted) + 1 if counted.isdigit() else 1
    first = earlier.get(REDRIVE_OF) or f"{origin.partition.topic}:{origin.partition.partition}:{origin.offset}".encode()
    kept = [header for header in own if header[0] not in (REDRIVE_COUNT, REDRIVE_OF)]
    return [*kept, (REDRIVE_COUNT, str(count).encode()), (REDRIVE_OF, first)]


def _place(record: Record) -> tuple[TopicPartition, int]:
    return record.topic_partition, record.offset
