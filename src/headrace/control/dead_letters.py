"""Dead letters as operators meet them: how many are left and why, and one by one."""

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import NamedTuple

from headrace.config.kafka import KafkaConfig
from headrace.control.topics import read_window, window
from headrace.delivery.dead_letter import Origin, letter_of, origin_of
from headrace.errors import InvalidRequest
from headrace.kafka import Admin
from headrace.records import Record


class Summary(NamedTuple):
    """A dead letter topic in numbers."""

    topic: str
    total: int
    """Letters in the topic."""
    left: int
    """Letters that are not redriven yet."""
    errors: Mapping[str, int]
    """Error class to how many of those that are left."""
    foreign: int
    """Records that are no dead letters."""


def group_of(topic: str) -> str:
    """Return the group whose committed position is how far a dead letter topic is redriven."""
    return f"headrace.redrive.{topic}"


async def dead_letter_topics(admin: Admin, configured: Iterable[str] = ()) -> list[str]:
    """Return the dead letter topics of the cluster: those that are configured and those named `*.dlq`."""
    wanted = set(configured)
    names = [topic.name for topic in await admin.list_topics()]
    return [name for name in names if name.endswith(".dlq") or name in wanted]


async def summary(kafka: KafkaConfig, admin: Admin, topic: str) -> Summary:
    """Read a dead letter topic through and count.

    Raises:
        TopicNotFound: The cluster does not have the topic.
        InvalidRequest: It holds records, and none is a dead letter.
    """
    starts, ends = await window(admin, topic)
    committed = await admin.committed(group_of(topic))
    total = left = foreign = 0
    errors: Counter[str] = Counter()
    async for batch in read_window(kafka, starts, ends):
        for record in batch:
            origin = origin_of(record.headers)
            total += 1
            if origin is None:
                foreign += 1
            elif record.offset >= committed.get(record.topic_partition, 0):
                left += 1
                errors[origin.error] += 1
    if total and foreign == total:
        raise InvalidRequest(
            f"{topic} is no dead letter topic: none of its records has headrace.dlq headers. See headrace dlq list",
            topic=topic,
        )
    return Summary(topic, total - foreign, left, dict(errors.most_common()), foreign)


async def letters(
    kafka: KafkaConfig, admin: Admin, topic: str, partition: int | None = None, offset: int | None = None
) -> AsyncGenerator[tuple[Record, Origin], None]:
    """Read dead letters with what their headers say, in offset order inside each partition.

    Raises:
        TopicNotFound: The cluster does not have the topic.
        PartitionNotFound: The topic does not have the partition.
        InvalidRequest: The offset is not in the log, or a record is no dead letter.
    """
    starts, ends = await window(admin, topic, partition, offset)
    async with contextlib.aclosing(read_window(kafka, starts, ends)) as batches:
        async for batch in batches:
            for record in batch:
                yield record, letter_of(record)
