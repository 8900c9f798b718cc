"""The lag of consumer groups: read once, or repeatedly for metrics."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from headrace.errors import HeadraceError, NotFound
from headrace.kafka import Admin
from headrace.records import TopicPartition
from headrace.runtime import Clock, Service

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 5.0
_STALE_SECONDS = 30.0
"""After this time a lag counts as unknown; a round over many groups may take long."""


class PartitionLag(NamedTuple):
    """The offsets of a group in a partition. Without a committed offset the lag counts from the start."""

    partition: TopicPartition
    committed: int | None
    end: int
    lag: int
    written: int
    """The end including open transactions; records after their start cannot be read until they are finished."""


async def lag_of(admin: Admin, group: str, topics: Sequence[str] = ()) -> list[PartitionLag]:
    """Return the lag of a group on every partition of `topics` and of every topic it has committed, sorted.

    A partition without a committed offset counts from its first record. A topic that is gone is left out.

    Raises:
        NotFound: The cluster does not know the group, and no topics are named.
        KafkaUnauthorized: Reading the group is not permitted.
        KafkaUnavailable: No broker responds.
    """
    committed = await admin.committed(group)
    if not (committed or topics) and group not in {known.name for known in await admin.list_groups()}:
        await admin.group_members(group)  # Kafka omits groups the caller may not see; this raises then
        raise NotFound(f"group {group} does not exist: see headrace groups list", group=group)
    found = []
    for topic in {partition.topic for partition in committed}.union(topics):
        with contextlib.suppress(NotFound):
            offsets = await admin.topic_offsets(topic)
            written = await admin.written_offsets(offsets)
            for partition, (first, end) in offsets.items():
                position = committed.get(partition)
                lag = max(0, end - (first if position is None else position))
                found.append(PartitionLag(partition, position, end, lag, max(end, written[partition])))
    return sorted(found)


class GroupTopics(NamedTuple):
    """A group, its cluster and its topics."""

    admin: Admin
    """Administration of the cluster."""
    topics: list[str]
    """Topics that it reads; further ones are found by its commits."""
    partitions: frozenset[int] = frozenset()
    """Numbers of the partitions that it reads; empty for all. Others count if it has committed an offset of them."""


class LagMonitor(Service):
    """Keeps the lag of groups per partition. Failed requests are retried; in an outage the lag is unknown."""

    def __init__(self, groups: Callable[[], Mapping[str, GroupTopics]], clock: Clock) -> None:
        """Prepare; `groups` returns the present groups by name."""
        super().__init__("lag")
        self._groups = groups
        self._clock = clock
        self._found: dict[str, tuple[float, Admin, Mapping[TopicPartition, PartitionLag]]] = {}

    def of(self, group: str) -> Mapping[TopicPartition, PartitionLag]:
        """Return the recent lag of a group by partition; empty while it is unknown."""
        if group not in self._found:
            return {}
        at, admin, found = self._found[group]
        return {} if admin.reachability.outage or self._clock.monotonic() - at > _STALE_SECONDS else found

    def all(self) -> Iterator[tuple[str, TopicPartition, int]]:
        """Yield group, partition and lag in records, if known."""
        for group in self._groups():
            for partition, entry in self.of(group).items():
                yield group, partition, entry.lag

    async def run(self) -> None:
        while True:
            for group, (admin, topics, numbers) in self._groups().items():
                at = self._clock.monotonic()
                try:
                    found = await lag_of(admin, group, topics)
                except HeadraceError as error:
                    log.debug("failed to read the lag of %s: %s", group, error.description)
                else:
                    if group not in self._groups():  # removed during the request
                        continue
                    if numbers:
                        found = [p for p in found if p.committed is not None or p.partition.partition in numbers]
                    self._found[group] = at, admin, {entry.partition: entry for entry in found}
            present = self._groups()
            self._found = {group: known for group, known in self._found.items() if group in present}
            await self._clock.sleep(_INTERVAL_SECONDS)
