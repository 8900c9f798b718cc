"""The committed offsets of all groups, and those that open transactions will commit.

Pure: who may commit is decided by the group, and time comes in.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

Partition = tuple[str, int]


_MOST_METADATA = 4095
"""Characters; `offset.metadata.max.bytes` is 4096."""


class CommittedOffset(NamedTuple):
    """What a group has committed of a partition."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1

    @property
    def is_too_large(self) -> bool:
        """Whether the coordinator refuses its metadata."""
        return len(self.metadata) > _MOST_METADATA


class OffsetsOfGroups:
    """The offsets of all groups of a cluster."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[Partition, CommittedOffset]] = {}
        self._pending: dict[str, dict[int, dict[Partition, CommittedOffset]]] = {}
        """By group and producer id: what its open transaction commits."""

    def commit(self, group: str, offsets: Mapping[Partition, CommittedOffset]) -> None:
        self._groups.setdefault(group, {}).update(offsets)

    def commit_later(self, group: str, producer_id: int, offsets: Mapping[Partition, CommittedOffset]) -> None:
        """Take offsets of a transaction, which count when it is committed."""
        self._pending.setdefault(group, {}).setdefault(producer_id, {}).update(offsets)

    def end_transaction(self, group: str, producer_id: int, *, committed: bool) -> None:
        """Apply or drop what a transaction has sent."""
        offsets = self._pending.get(group, {}).pop(producer_id, {})
        if committed:
            self.commit(group, offsets)

    def committed(self, group: str) -> dict[Partition, CommittedOffset]:
        return dict(self._groups.get(group, {}))

    def is_pending(self, group: str, partition: Partition) -> bool:
        """Whether an open transaction commits this partition: a reader of stable offsets must wait then."""
        return any(partition in offsets for offsets in self._pending.get(group, {}).values())

    def groups(self) -> list[str]:
        """Return the groups that have committed something."""
        return [group for group, offsets in self._groups.items() if offsets]

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        """Delete the offsets of a group, or those of some partitions."""
        if partitions is None:
            self._groups.pop(group, None)
            return
        for partition in partitions:
            self._groups.get(group, {}).pop(partition, None)

    def forget_topic(self, topic: str) -> None:
        """Delete what all groups have committed of a topic that is deleted."""
        for offsets in self._groups.values():
            for partition in [one for one in offsets if one[0] == topic]:
                del offsets[partition]
