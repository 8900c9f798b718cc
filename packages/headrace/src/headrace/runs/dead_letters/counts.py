"""Dead letter topics: their names, and how many dead letters each holds, by offsets alone."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.model import HeadraceConfig
from headrace.config.section import fits_any
from headrace.errors import HeadraceError, InvalidRequest
from headrace.kafka import Admin, read_window
from headrace.kafka.timestamps import iso_ms
from headrace.records import Offsets, TopicPartition
from headrace.runs.dead_letters.completed_offsets import CompletedOffsets, load_completed

_ENDINGS = (".dlq", ".quarantine")
_FEW_OFFSETS, _READ_SECONDS = 1000, 5.0


class DeadLetterCount(msgspec.Struct, frozen=True, rename="camel"):
    """A dead letter topic in numbers."""

    topic: str
    partitions: int
    dead_letters: int
    """Upper bound, by offsets: transactions, compaction and other records take some of them."""
    left: int
    """Those that are not completed: counted if they span at most a thousand offsets, else an upper bound."""
    oldest: str | None
    """Time of the first dead letter, ISO 8601, UTC; None if there is none."""
    newest: str | None
    """Time of the newest dead letter."""


class DeadLetterCounts(msgspec.Struct, frozen=True):
    """Every dead letter topic in numbers."""

    topics: list[DeadLetterCount]


class DeadLetterTopics:
    """The dead letter topics of a cluster: those of the configuration, and those named `*.dlq` or `*.quarantine`."""

    def __init__(self, admin: Admin, config: HeadraceConfig) -> None:
        """Prepare; the settings name further dead letter topics."""
        self._admin, self._foreign = admin, config.foreign_dead_letters
        self._consumers = list(config.reactive_consumers.values())

    async def names(self) -> dict[str, tuple[int, ReactiveConsumerConfig | None]]:
        """Return each with the number of its partitions and the consumer that writes it, in the order of names."""
        sizes = {topic.name: len(topic.partitions) for topic in await self._admin.list_topics()}
        writers: dict[str, ReactiveConsumerConfig] = {}
        for consumer in self._consumers:
            for origin in {*consumer.topics, *filter(fits_any(consumer.topic_patterns), sizes)}:
                writers.setdefault(consumer.dead_letter.topic_for(origin), consumer)
        chosen = (name for name in sizes if name.endswith(_ENDINGS) or name in writers or name in self._foreign)
        return {name: (sizes[name], writers.get(name)) for name in chosen}

    async def counts(self, only: str | None = None) -> list[DeadLetterCount]:
        """Return every dead letter topic, or one, in numbers. No record is read.

        Raises:
            TopicNotFound: The cluster does not have the topic.
            InvalidRequest: It is not a dead letter topic.
        """
        names = await self.names()
        if only is None:
            origins = [(one.dead_letter, topic) for one in self._consumers for topic in one.topics]
            expected = {settings.topic_for(topic) for settings, topic in origins if settings.enabled}
            await self._admin.topic_ids(expected - names.keys(), "Read")  # Kafka omits topics the caller may not see
        else:
            if only not in names:
                await self._admin.describe_topic(only, "Read")
                raise not_one(
                    only, "its name does not end in .dlq or .quarantine, and no consumer of the file writes it"
                )
            names = {only: names[only]}
        partitions = [TopicPartition(name, number) for name, (size, _) in names.items() for number in range(size)]
        starts, ends = await self._admin.start_offsets(partitions), await self._admin.end_offsets(partitions)
        times = await self._admin.time_bounds(partitions)
        completed = await load_completed(self._admin, names)
        first = {p: completed[p.topic].first_left(p.partition, starts[p], ends[p]) for p in partitions}
        read = await self._read_left(names, first, ends, completed)
        counts = [
            _count(topic, [p for p in partitions if p.topic == topic], starts, ends, times, completed)
            for topic in names
        ]
        return [msgspec.structs.replace(each, left=read.get(each.topic, each.left)) for each in counts]

    async def _read_left(
        self, names: Iterable[str], first: Offsets, ends: Offsets, completed: Mapping[str, CompletedOffsets]
    ) -> dict[str, int]:
        """Count what is left in topics with few offsets by reading, because markers of transactions take offsets."""
        spans = {name: sum(ends[p] - at for p, at in first.items() if p.topic == name) for name in names}
        starts = {p: at for p, at in first.items() if at < ends[p] and spans[p.topic] <= _FEW_OFFSETS}
        left = dict.fromkeys([p.topic for p in starts], 0)
        if not starts:
            return left
        try:
            async with asyncio.timeout(_READ_SECONDS):
                window = read_window(self._admin.config, starts, {p: ends[p] for p in starts})
                async with contextlib.aclosing(window) as batches:
                    async for batch in batches:
                        for record in batch:
                            left[record.topic] += not completed[record.topic].is_completed(
                                record.partition, record.offset
                            )
        except (HeadraceError, TimeoutError):
            return {}  # the caller then reports the number of offsets, which is an upper bound
        return left


def not_one(topic: str, why: str) -> InvalidRequest:
    """Return the error for a topic that is not a dead letter topic."""
    return InvalidRequest(f"{topic} is not a dead letter topic: {why}. See headrace dlq list", topic=topic)


def _count(
    topic: str,
    partitions: Sequence[TopicPartition],
    starts: Offsets,
    ends: Offsets,
    times: Mapping[TopicPartition, tuple[int, int]],
    completed: Mapping[str, CompletedOffsets],
) -> DeadLetterCount:
    dead_letters = sum(ends[p] - starts[p] for p in partitions)
    gone = sum(completed[topic].completed_count(p.partition, starts[p], ends[p]) for p in partitions)
    known = [times[p] for p in partitions if p in times]
    return DeadLetterCount(
        topic,
        len(partitions),
        dead_letters,
        dead_letters - gone,
        oldest=iso_ms(min(first for first, _ in known)) if known else None,
        newest=iso_ms(max(last for _, last in known)) if known else None,
    )
