"""The health of topics, and ranges of their offsets."""

from headrace.errors import InvalidRequest, PartitionNotFound
from headrace.kafka import Admin, PartitionInfo
from headrace.kafka import read_window as read_window
from headrace.records import TopicPartition


def unhealthy(partition: PartitionInfo) -> str:
    """Return the problem of a partition: `no leader`, `under-replicated`, or an empty text."""
    if partition.leader < 0:
        return "no leader"
    return "under-replicated" if len(partition.in_sync) < len(partition.replicas) else ""


async def window(
    admin: Admin, topic: str, partition: int | None = None, offset: int | None = None
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return where reading starts and ends: the whole topic, one partition, or one partition from an offset on.

    Raises:
        TopicNotFound: The cluster does not have the topic.
        PartitionNotFound: The topic does not have the partition.
        InvalidRequest: The offset is not in the partition's log.
    """
    offsets = await admin.topic_offsets(topic)
    if partition is not None:
        chosen = TopicPartition(topic, partition)
        if chosen not in offsets:
            last = len(offsets) - 1
            raise PartitionNotFound(f"topic {topic} has no partition {partition}: it has 0 to {last}", topic=topic)
        offsets = {chosen: offsets[chosen]}
    if offset is not None:
        for found, (first, end) in offsets.items():
            if not first <= offset < end:
                held = f"it holds {first} to {end - 1}" if end > first else "it is empty"
                raise InvalidRequest(f"offset {offset} is not in {found}: {held}", topic=topic, partition=partition)
            offsets = {found: (offset, end)}
    return {p: first for p, (first, _) in offsets.items()}, {p: end for p, (_, end) in offsets.items()}
