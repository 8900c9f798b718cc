"""Where consumer groups stand."""

from __future__ import annotations

from headrace.errors import NotFound
from headrace.kafka import Admin, PartitionLag


async def lag_of(admin: Admin, group: str) -> list[PartitionLag]:
    """Return the lag of a group on every partition of every topic it has committed, sorted.

    A partition without a committed offset counts from its first record.

    Raises:
        NotFound: The cluster does not know the group.
        KafkaUnavailable: No broker answers.
    """
    committed = await admin.committed(group)
    if not committed and group not in {known.name for known in await admin.list_groups()}:
        raise NotFound(f"group {group} does not exist: see headrace groups list", group=group)
    found = []
    for topic in sorted({partition.topic for partition in committed}):
        for partition, (first, end) in (await admin.topic_offsets(topic)).items():
            position = committed.get(partition)
            found.append(
                PartitionLag(partition, position, end, max(0, end - (first if position is None else position)))
            )
    return sorted(found)
