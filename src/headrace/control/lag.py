"""How far consumer groups are behind: asked once, or often enough for a dashboard."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.errors import HeadraceError, NotFound
from headrace.kafka import Admin
from headrace.lifecycle import Clock, Service
from headrace.records import TopicPartition

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 5.0


class PartitionLag(NamedTuple):
    """Where a group stands on a partition. `committed` None: nothing committed; the lag then counts from the start."""

    partition: TopicPartition
    committed: int | None
    end: int
    lag: int


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


class LagMonitor(Service):
    """Publishes the lag of groups per partition; a question that fails is asked again, and breaks nothing."""

    def __init__(
        self, admin: Admin, groups: Sequence[str], clock: Clock, publish: Callable[[str, TopicPartition, int], None]
    ) -> None:
        super().__init__("lag")
        self._admin = admin
        self._groups = groups
        self._clock = clock
        self._publish = publish

    async def start(self) -> None:
        self.spawn(self._watch(), "watch")

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(_INTERVAL_SECONDS)
            for group in self._groups:
                try:
                    for entry in await lag_of(self._admin, group):
                        self._publish(group, entry.partition, entry.lag)
                except HeadraceError as error:
                    log.debug("lag of %s is not known: %s", group, error.description)
