"""Creates, describes, changes and deletes topics; each change can be previewed, and internal topics are protected."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from headrace.config.topic_names import Kind
from headrace.errors import InvalidRequest, TopicInternal
from headrace.kafka import Admin
from headrace.kafka.cluster_admin import ClusterAdmin, TopicConfig
from headrace.kafka.cluster_info import PartitionInfo
from headrace.kafka.names import check_topic
from headrace.records import TopicPartition

_Partitions = Annotated[int, Meta(ge=1, le=10_000)]
_Replicas = Annotated[int, Meta(ge=1, le=32_767)]
_Name = Annotated[str, Meta(max_length=249)]
_Value = Annotated[str, Meta(max_length=10_000)] | bool | int | float
_SCHEMAS: Final = "_schemas"
"""Topic of the schema registry."""


class ReplicaView(msgspec.Struct):
    """A replica of a partition."""

    broker: int
    leader: bool
    in_sync: bool


class TopicPartitionView(msgspec.Struct):
    """A partition, its replicas in the order of preference, and its offsets."""

    partition: int
    leader: int
    """Id of a broker; -1 without a leader."""
    replicas: list[ReplicaView]
    first_offset: int
    end_offset: int
    problem: str
    """`no leader`, `under-replicated` or empty."""


class TopicView(msgspec.Struct):
    """A topic."""

    name: str
    replication_factor: int
    partitions: list[TopicPartitionView]
    under_replicated: int
    """Partitions with a problem."""
    records: int
    """Offsets between the first and the end; compaction and transactions leave gaps. Kafka's client gives no bytes."""
    configs: dict[str, str | None]
    """Those that differ from Kafka's defaults."""


class TopicConfigs(msgspec.Struct):
    """Every configuration of a topic."""

    configs: list[TopicConfig]


class NewTopicRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A topic to create."""

    name: _Name
    partitions: _Partitions = 1
    replication_factor: _Replicas | None = None
    """By default that of the brokers."""
    configs: Annotated[dict[str, _Value], Meta(max_length=100)] = {}
    """Topic configurations by Kafka's names."""
    dry_run: bool = False
    """Whether Kafka only checks the request."""


class TopicChangeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What to change of a topic. Kafka checks all of it before the first change."""

    configs: Annotated[dict[str, _Value | None], Meta(max_length=100)] = {}
    """Configurations to set by Kafka's names; null restores the default."""
    partitions: _Partitions | None = None
    """The new total, which is larger."""
    dry_run: bool = False
    """Whether Kafka only checks the request, and the response is a preview."""


class TopicChange(msgspec.Struct):
    """One change of a topic."""

    what: str
    """`config retention.ms`, `partitions`, or another such name."""
    before: str | int | None
    after: str | int | None


class TopicChanges(msgspec.Struct):
    """The changes of a topic, made or previewed; what has the requested value already is left out."""

    topic: str
    dry_run: bool
    changes: list[TopicChange]


class TopicAdministration:
    """Topics of one cluster."""

    def __init__(self, admin: Admin, kind_of: Callable[[str], Kind]) -> None:
        """Prepare; `kind_of` returns the kind of an internal topic."""
        self._admin = admin
        self._cluster = ClusterAdmin(admin)
        self._kind_of = kind_of

    async def names(self) -> list[str]:
        """Return the topics that are not internal to Kafka."""
        return [topic.name for topic in await self._admin.list_topics()]

    async def show(self, name: str) -> TopicView:
        info = await self._admin.describe_topic(name)
        offsets = await self._admin.topic_offsets(name)
        partitions = [
            _partition(partition, *offsets.get(TopicPartition(name, partition.partition), (0, 0)))
            for partition in info.partitions
        ]
        problems = sum(bool(partition.problem) for partition in partitions)
        records = sum(partition.end_offset - partition.first_offset for partition in partitions)
        configs = {one.name: one.value for one in await self._cluster.configs(name) if not one.is_default}
        return TopicView(name, info.replication_factor, partitions, problems, records, configs)

    async def configs(self, name: str) -> TopicConfigs:
        await self._admin.describe_topic(name)
        return TopicConfigs(await self._cluster.configs(name))

    def check_changeable(self, name: str) -> None:
        """Raise TopicInternal for a topic of Kafka, Headrace or the schema registry."""
        kind = self._kind_of(check_topic(name))
        if name == _SCHEMAS or kind not in ("", "dead_letter"):
            raise TopicInternal(f"{name} is internal: its owner alone changes it, so name a topic of yours", topic=name)

    async def create(self, request: NewTopicRequest) -> TopicChanges:
        """Create a topic.

        Raises:
            InvalidRequest: The topic exists, or Kafka rejects a value.
            TopicInternal: It would be an internal topic.
        """
        self.check_changeable(request.name)
        configs = {name: _text(value) for name, value in request.configs.items()}
        factor = request.replication_factor
        await self._cluster.create(request.name, request.partitions, factor or -1, configs, dry_run=request.dry_run)
        changes = [TopicChange("partitions", None, request.partitions)]
        changes += [TopicChange("replication factor", None, factor)] if factor else []
        changes += [TopicChange(f"config {name}", None, value) for name, value in configs.items()]
        return TopicChanges(request.name, request.dry_run, changes)

    async def change(self, name: str, request: TopicChangeRequest) -> TopicChanges:
        """Change a topic, or preview the change.

        Raises:
            InvalidRequest: Nothing is to change, or Kafka rejects a value.
            TopicInternal: The topic is internal.
            TopicNotFound: The cluster does not have it.
        """
        self.check_changeable(name)
        if not (request.configs or request.partitions):
            raise InvalidRequest("nothing to change: pass configs or partitions")
        info = await self._admin.describe_topic(name)
        before = {one.name: one for one in await self._cluster.configs(name)}
        configs = {key: None if value is None else _text(value) for key, value in request.configs.items()}
        total = request.partitions if request.partitions != len(info.partitions) else None
        await self._apply(name, configs, total, dry_run=True)
        changes = _config_changes(configs, before)
        changes += [TopicChange("partitions", len(info.partitions), total)] if total else []
        if not request.dry_run:
            await self._apply(name, configs, total, dry_run=False)
        return TopicChanges(name, request.dry_run, changes)

    async def delete(self, name: str) -> None:
        """Delete a topic with its records.

        Raises:
            TopicInternal: The topic is internal.
            TopicNotFound: The cluster does not have it.
        """
        self.check_changeable(name)
        await self._cluster.delete(name)

    async def _apply(self, name: str, configs: Mapping[str, str | None], total: int | None, *, dry_run: bool) -> None:
        if configs:
            await self._cluster.alter_configs(name, configs, dry_run=dry_run)
        if total:
            await self._cluster.add_partitions(name, total, dry_run=dry_run)


def _partition(info: PartitionInfo, first: int, end: int) -> TopicPartitionView:
    replicas = [ReplicaView(broker, broker == info.leader, broker in info.in_sync) for broker in info.replicas]
    return TopicPartitionView(info.partition, info.leader, replicas, first, end, info.problem)


def _config_changes(configs: Mapping[str, str | None], before: Mapping[str, TopicConfig]) -> list[TopicChange]:
    changes = []
    for key, value in configs.items():
        known = before.get(key)
        old = known.value if known else None
        is_set = known is not None and known.source == "dynamic_topic_config"
        if (value is None and is_set) or (value is not None and value != old):
            changes.append(TopicChange(f"config {key}", old, value))
    return changes


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
