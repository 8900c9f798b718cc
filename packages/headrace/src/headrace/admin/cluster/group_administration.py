"""Shows consumer groups, and sets the committed offsets of one that has no members; each reset can be previewed."""

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.config.topic_names import Kind
from headrace.consumers.lag import lag_of
from headrace.errors import CommitRefused, InvalidRequest, KafkaError, NotFound, PartitionNotFound, TopicInternal
from headrace.kafka import Admin
from headrace.kafka.cluster_admin import ClusterAdmin
from headrace.kafka.names import check_group
from headrace.kafka.timestamps import milliseconds_of
from headrace.records import TopicPartition
from headrace.runtime import Clock

_UNKNOWN_MEMBER, _NOT_EMPTY = 25, 68
_Offset = Annotated[int, Meta(ge=0, le=2**63 - 2)]
_Shift = Annotated[int, Meta(ge=-(2**62), le=2**62)]


class GroupSummary(msgspec.Struct):
    """A consumer group; `state` is Kafka's word for it."""

    group: str
    state: str
    members: int


class GroupList(msgspec.Struct):
    """The consumer groups of the cluster that the caller may read."""

    groups: list[GroupSummary]


class GroupMemberView(msgspec.Struct):
    """A member of a group."""

    member: str
    client: str
    host: str
    static_id: str | None
    """Its `group.instance.id`."""
    partitions: list[str]


class GroupPartitionView(msgspec.Struct):
    """The offsets of a group in a partition; `committed` is null where it has none."""

    topic: str
    partition: int
    committed: int | None
    end_offset: int
    lag: int


class GroupView(msgspec.Struct):
    """A group, its members and their assignments, and its offsets."""

    group: str
    state: str
    protocol: str
    """`classic` or `consumer`."""
    assignor: str
    coordinator: int | None
    lag: int
    members: list[GroupMemberView]
    offsets: list[GroupPartitionView]


class OffsetsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Where a group continues: exactly one of `to`, `offset`, `time` and `shift`."""

    to: Literal["earliest", "latest"] | None = None
    offset: _Offset | None = None
    time: int | Annotated[str, Meta(max_length=64)] | None = None
    """The first record with this timestamp or a later one: milliseconds since the epoch, ISO 8601, or an age (`2h`)."""
    shift: _Shift | None = None
    """Added to the committed offset; negative to read records again."""
    topic: Annotated[str, Meta(max_length=249)] | None = None
    """By default every topic with a committed offset of the group."""
    partitions: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=10_000)] | None = None
    """Of `topic`; by default all."""
    dry_run: bool = False
    """Whether to return a preview only."""


class OffsetReset(msgspec.Struct):
    """The new offset of a group in a partition, limited to those of the log."""

    topic: str
    partition: int
    before: int | None
    after: int
    lag: int
    """Records from `after` to the end."""


class OffsetsResponse(msgspec.Struct):
    """The offsets of a group, set or previewed."""

    group: str
    dry_run: bool
    members: int
    """Members of the group; with any of them only a preview is possible."""
    offsets: list[OffsetReset]


class GroupAdministration:
    """Groups of one cluster."""

    def __init__(self, admin: Admin, kind_of: Callable[[str], Kind], clock: Clock) -> None:
        """Prepare; `kind_of` returns the kind of an internal topic."""
        self._admin = admin
        self._kind_of = kind_of
        self._cluster = ClusterAdmin(admin)
        self._clock = clock

    async def summaries(self) -> list[GroupSummary]:
        return [GroupSummary(*group) for group in await self._admin.list_groups()]

    async def show(self, name: str) -> GroupView:
        """Return a group.

        Raises:
            NotFound: The cluster does not know it.
        """
        found = await self._cluster.group(name)
        if found is None:
            raise NotFound(f"group {name} does not exist: see GET /groups or headrace groups list", group=name)
        members = []
        topics: set[str] = set()
        for member in found.members:
            assigned = sorted(TopicPartition(p.topic, p.partition) for p in member.assignment.topic_partitions)
            topics.update(partition.topic for partition in assigned)
            host = member.host.lstrip("/")
            partitions = [str(partition) for partition in assigned]
            members.append(
                GroupMemberView(member.member_id, member.client_id, host, member.group_instance_id, partitions)
            )
        lags = await lag_of(self._admin, name, sorted(topics))
        offsets = [GroupPartitionView(*entry.partition, entry.committed, entry.end, entry.lag) for entry in lags]
        lag = sum(entry.lag for entry in lags)
        return GroupView(name, found.state, found.protocol, found.assignor, found.coordinator, lag, members, offsets)

    async def reset(self, group: str, request: OffsetsRequest) -> OffsetsResponse:
        """Set committed offsets, or preview that.

        Raises:
            CommitRefused: The group has members.
            InvalidRequest: The request does not say one position, or has none to shift from.
            TopicInternal: The topic is internal.
            NotFound: The group has no offsets and no topic is named, or a partition does not exist.
        """
        check_group(group)
        if sum(each is not None for each in (request.to, request.offset, request.time, request.shift)) != 1:
            raise InvalidRequest("set exactly one of to (earliest or latest), offset, time and shift")
        members = len(await self._admin.group_members(group))
        if members and not request.dry_run:
            raise _active(group, f"{members} active member{'s' if members > 1 else ''}")
        committed = await self._admin.committed(group)
        partitions = await self._partitions(group, request, committed)
        starts = await self._admin.start_offsets(partitions)
        ends = await self._admin.end_offsets(partitions)
        targets = await self._targets(request, partitions, committed, starts, ends)
        # Beyond the log a consumer's auto.offset.reset would decide where it continues.
        after = {p: min(max(offset, starts[p]), ends[p]) for p, offset in targets.items()}
        if not request.dry_run:
            try:
                await self._admin.alter_group_offsets(group, after)
            except KafkaError as error:
                if error.parameters.get("kafka_code") in (_UNKNOWN_MEMBER, _NOT_EMPTY):
                    raise _active(group, "active members") from error
                raise
        resets = [OffsetReset(*p, committed.get(p), offset, ends[p] - offset) for p, offset in sorted(after.items())]
        return OffsetsResponse(group, request.dry_run, members, resets)

    async def _partitions(
        self, group: str, request: OffsetsRequest, committed: Collection[TopicPartition]
    ) -> list[TopicPartition]:
        if request.topic is None:
            if request.partitions is not None:
                raise InvalidRequest("partitions are those of a topic: pass topic as well")
            # On an internal topic, offsets count batches or mark what Headrace has done.
            chosen = sorted(partition for partition in committed if self._kind_of(partition.topic) != "state")
            if not chosen:
                raise NotFound(f"group {group} has committed no offset: name the topic", group=group)
            return chosen
        if self._kind_of(request.topic) == "state":
            raise TopicInternal(f"{request.topic} is internal: name a topic of yours", topic=request.topic)
        info = await self._admin.describe_topic(request.topic, "Read")
        known = {partition.partition for partition in info.partitions}
        numbers = known if request.partitions is None else set(request.partitions)
        if numbers - known:
            raise PartitionNotFound(f"{request.topic} has no partition {min(numbers - known)}; it has {len(known)}")
        return [TopicPartition(request.topic, number) for number in sorted(numbers)]

    async def _targets(
        self,
        request: OffsetsRequest,
        partitions: Collection[TopicPartition],
        committed: Mapping[TopicPartition, int],
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
    ) -> dict[TopicPartition, int]:
        if request.to is not None:
            return dict(starts if request.to == "earliest" else ends)
        if request.offset is not None:
            return dict.fromkeys(partitions, request.offset)
        if request.time is not None:
            since_ms = milliseconds_of(request.time, self._clock.time())
            return {**ends, **await self._admin.offsets_since(partitions, since_ms)}
        assert request.shift is not None
        if missing := [str(partition) for partition in partitions if partition not in committed]:
            raise InvalidRequest(f"the group has no committed offset of {missing[0]} to shift: use to, offset or time")
        return {partition: committed[partition] + request.shift for partition in partitions}


def _active(group: str, who: str) -> CommitRefused:
    return CommitRefused(f"group {group} has {who}: stop its consumers and wait until they have left", group=group)
