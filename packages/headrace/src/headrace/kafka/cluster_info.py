"""What `Admin` returns about the cluster, its topics and its groups."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.records import TopicPartition


class PartitionInfo(NamedTuple):
    """One partition: its leader's broker id (-1: none), replicas and in-sync replicas by broker id."""

    partition: int
    leader: int
    replicas: Sequence[int]
    in_sync: Sequence[int]

    @property
    def problem(self) -> str:
        """`no leader`, `under-replicated`, or an empty string."""
        if self.leader < 0:
            return "no leader"
        return "under-replicated" if len(self.in_sync) < len(self.replicas) else ""


class TopicInfo(NamedTuple):
    """A topic and its partitions in ascending order."""

    name: str
    partitions: Sequence[PartitionInfo]

    @property
    def replication_factor(self) -> int:
        """Replicas of the first partition."""
        return len(self.partitions[0].replicas) if self.partitions else 0


class GroupInfo(NamedTuple):
    """A consumer group: its name, Kafka's word for its state, and how many members it has."""

    name: str
    state: str
    members: int


class GroupMember(NamedTuple):
    """A member of a group: its client id, the partitions it is assigned, and the address it calls from."""

    client: str
    partitions: Sequence[TopicPartition]
    host: str

    @classmethod
    def of(cls, member: Any) -> "GroupMember":
        """Return the member that the client describes."""
        assigned = [TopicPartition(p.topic, p.partition) for p in member.assignment.topic_partitions]
        return cls(member.client_id, assigned, member.host.lstrip("/"))


class ClusterInfo(NamedTuple):
    """The number of brokers in the cluster now, and the configuration of one of them by Kafka's names."""

    brokers: int
    missing: Sequence[int]
    """Ids of the brokers that have replicas and are not in the cluster now."""
    configs: Mapping[str, str]
    refused: str = ""
    """Why the configuration must not be read; empty if it was read."""
