"""Where a group begins in its partitions, and what is missing where the place it left off at is gone.

Nothing is ever reset by the client. For the thread that owns the consumer; every call asks Kafka and has a limit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import confluent_kafka

from headrace.config.membership import ConsumerConfig
from headrace.records import Committed, TopicPartition

_LIMIT_SECONDS = 3.0
"""The thread that asks polls nothing meanwhile, and other partitions wait for it."""
_LOG_SECONDS = 1.0
"""For one partition's log: its leader may be away."""


StoredOffsets = Callable[[str, TopicPartition, int], Awaitable[int | None]]
"""Asks a backend that keeps a group's offsets where a partition goes on in an assignment epoch; None if it has no
offset. Raises HeadraceError if there is no answer."""


class ReadPolicy(NamedTuple):
    """How a group reads: where it begins, what is done where its place is gone, how it takes part in the group."""

    reset: Literal["earliest", "latest"] = "earliest"
    """Where a group without committed offset begins."""
    on_gap: Literal["stop", "continue"] = "stop"
    """Whether a partition whose next records were removed stands still, or goes on at the start of the log."""
    as_one: bool = False
    """Whether a topic that joins the others of a group that reads some already begins at its start: as with patterns,
    where it was created later."""
    member: ConsumerConfig = ConsumerConfig()
    """Session, assignment and fetches."""
    stored_offsets: StoredOffsets | None = None
    """Where the group goes on, if that is not Kafka's to say."""


class Start(NamedTuple):
    """Where to begin in a partition."""

    offset: int
    """An offset, or the client's number for the beginning."""
    committed: Committed | None = None
    """What the group has committed, or is to commit now."""
    is_new: bool = False
    """Whether it is to be committed now: "latest" is a moment, so it is written down when it is chosen."""
    epoch: int = 0
    """Number of the assignment."""


class Gap(NamedTuple):
    """Offsets that a group should read next, and that are not in the log."""

    first: int
    end: int
    """One more than the last."""
    start: int
    """Where the log starts."""

    @property
    def is_cut_off(self) -> bool:
        """Whether the log ends before the group's position, instead of starting behind it."""
        return self.end != self.start

    def __str__(self) -> str:
        why = "the log ends there, before the group's position" if self.is_cut_off else "removed before they were read"
        return f"offsets {self.first} to {self.end - 1} ({self.end - self.first}) are no longer in the log: {why}"


def find_starts(
    client: Any,
    partitions: Sequence[TopicPartition],
    policy: ReadPolicy,
    seen: Collection[str] = (),
    subscribed: Iterable[str] = (),
    passed: Callable[[], bool] = lambda: False,
    at_end: set[TopicPartition] | None = None,
) -> dict[TopicPartition, Start | confluent_kafka.KafkaError]:
    """Return where to begin: at what is committed, else at the start or the end as the policy says.

    What was added to what the group reads already begins at its start, whatever the policy says, because its first
    records would be skipped otherwise: a partition (reliability.md, row B9), a topic that was created anew (row B10),
    and a topic that joins others if the policy has them as one.

    An error stands in the place of each start that is not known; the other partitions begin.

    Args:
        client: A member of the group.
        partitions: What is assigned.
        policy: What is done where nothing is committed.
        seen: Topics that this process has read before.
        subscribed: All topics the group reads.
        passed: Whether the time is up; then the rest is left out.
        at_end: Partitions that are to begin at their end. Kept by the caller until that is known: by then a partition
            beside them may have a committed offset, and they would count as added.

    Raises:
        KafkaException: The group's coordinator did not answer.
    """
    starts: dict[TopicPartition, Any] = {}
    at_end = set() if at_end is None else at_end
    read_before: dict[str, bool] = dict.fromkeys(seen, True)
    for partition, committed in committed_offsets(client, partitions).items():
        topic = partition.topic
        if isinstance(committed, confluent_kafka.KafkaError):
            starts[partition] = committed
            continue
        if not committed and policy.reset == "latest" and topic not in read_before:
            read_before[topic] = _reads(client, {topic, *(subscribed if policy.as_one else ())})
        if committed:
            starts[partition] = Start(committed.offset, committed)
        elif policy.reset == "earliest" or (read_before[topic] and partition not in at_end):
            starts[partition] = Start(confluent_kafka.OFFSET_BEGINNING)
        else:
            at_end.add(partition)
            if passed():
                continue
            try:
                _, end = client.get_watermark_offsets(_plain(partition), timeout=_LOG_SECONDS)
                starts[partition] = Start(end, Committed(end), is_new=True)
            except confluent_kafka.KafkaException as cause:
                starts[partition] = cause.args[0]
    return starts


def committed_offsets(client: Any, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Any]:
    """Return what the group has committed: a `Committed`, None where it has not, a KafkaError where it is not known.

    Raises:
        KafkaException: The group's coordinator did not answer.
    """
    items = client.committed([_plain(partition) for partition in partitions], timeout=_LIMIT_SECONDS)
    errors = {TopicPartition(item.topic, item.partition): item.error for item in items if item.error}
    found = {partition: known if known.offset >= 0 else None for partition, known in from_client(items).items()}
    return {**found, **errors}


def find_gap(client: Any, partition: TopicPartition, position: int) -> Gap | None:
    """Return what is missing at a position that is out of range, or None if it is in range by now.

    Raises:
        KafkaException: Kafka did not answer.
    """
    start, end = client.get_watermark_offsets(_plain(partition), timeout=_LOG_SECONDS)
    if 0 <= position < start:
        return Gap(position, start, start)
    return Gap(end, position, start) if position > end else None


def to_client(offsets: Mapping[TopicPartition, Committed]) -> list[Any]:
    """Return what is to be committed, as the client takes it."""
    return [confluent_kafka.TopicPartition(p.topic, p.partition, at.offset, at.metadata) for p, at in offsets.items()]


def from_client(offsets: Sequence[Any]) -> dict[TopicPartition, Committed]:
    """Return committed offsets, as the client says them."""
    return {TopicPartition(p.topic, p.partition): Committed(p.offset, p.metadata or "") for p in offsets}


def _reads(client: Any, topics: Collection[str]) -> bool:
    known = client.list_topics(timeout=_LIMIT_SECONDS).topics
    places = [TopicPartition(topic, number) for topic in topics if topic in known for number in known[topic].partitions]
    found = committed_offsets(client, places).values() if places else ()
    for error in found:
        if isinstance(error, confluent_kafka.KafkaError):
            raise confluent_kafka.KafkaException(error)
    return any(found)


def _plain(partition: TopicPartition) -> Any:
    return confluent_kafka.TopicPartition(partition.topic, partition.partition)
