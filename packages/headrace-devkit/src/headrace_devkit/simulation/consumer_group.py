"""The coordinator's side of a group of the consumer protocol (KIP-848): epochs, and who gives up what for whom.

| State of a member | What it waits for |
|---|---|
| stable | nothing: it has its target assignment, as far as it is computed |
| unrevoked | it must give up partitions, and its epoch stays until it has |
| unreleased | it has the epoch of the target, and waits for partitions that others must give up |

Time comes in as `now`; the coordinator calls `expire` at `next_deadline`. Source: Apache Kafka,
`GroupMetadataManager.consumerGroupHeartbeat`, `CurrentAssignmentBuilder`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from confluent_kafka import KafkaError

Partition = tuple[str, int]
LEAVE, LEAVE_FOR_A_MOMENT = -1, -2
"""Epochs by which a member leaves; a static one may come back."""


class Heartbeat(NamedTuple):
    """A heartbeat; None stands for what has not changed."""

    member_id: str
    epoch: int
    instance_id: str | None = None
    rebalance_seconds: float | None = None
    topics: tuple[str, ...] | None = None
    owned: frozenset[Partition] | None = None


class HeartbeatResponse(NamedTuple):
    """The response to a heartbeat."""

    error: int = 0
    epoch: int = 0
    interval_seconds: float = 5.0
    assignment: frozenset[Partition] | None = None
    """None if nothing has changed."""


class _GroupMember:
    def __init__(self, member_id: str, instance_id: str | None) -> None:
        self.member_id = member_id
        self.instance_id = instance_id
        self.topics: tuple[str, ...] = ()
        self.rebalance_seconds = 300.0
        self.state: Literal["stable", "unrevoked", "unreleased"] = "stable"
        self.epoch = 0
        self.previous_epoch = 0
        self.assigned: frozenset[Partition] = frozenset()
        self.to_revoke: frozenset[Partition] = frozenset()
        self.assigned_at: dict[Partition, int] = {}
        """The epoch in which each partition was assigned to it."""
        self.has_left = False
        """Whether it is a static member that may come back."""
        self.expires_at = 0.0
        self.revoke_by = 0.0
        """When it must have given up what it must; 0 if nothing."""


class ConsumerGroup:
    """A group of the consumer protocol."""

    def __init__(
        self, partitions_of: Callable[[str], int], *, session_seconds: float = 45.0, interval_seconds: float = 5.0
    ) -> None:
        """Begin empty; `partitions_of` tells how many partitions a topic has, 0 if it does not exist."""
        self.epoch = 0
        self.members: dict[str, _GroupMember] = {}
        self._partitions_of = partitions_of
        self._session_seconds = session_seconds
        self._interval_seconds = interval_seconds
        self._targets: dict[str, frozenset[Partition]] = {}
        self._target_epoch = 0
        self._known_topics: dict[str, int] = {}
        self._static: dict[str, str] = {}

    # Requests --------------------------------------------------------------------------------------------------------

    def heartbeat(self, request: Heartbeat, now: float) -> HeartbeatResponse:
        """Take a heartbeat: it joins, leaves, says what it owns, and gets what it may own."""
        if request.epoch < 0:
            return self._leave(request, now)
        member = self.members.get(request.member_id)
        if request.epoch == 0:
            joined = self._join(request, member)
            if isinstance(joined, int):
                return HeartbeatResponse(joined)
            member = joined
        elif member is None:
            return HeartbeatResponse(int(KafkaError.UNKNOWN_MEMBER_ID))
        elif error := self._check_epoch(member, request):
            return HeartbeatResponse(error)
        before = member.assigned
        if request.rebalance_seconds is not None:
            member.rebalance_seconds = request.rebalance_seconds
        self._change_epoch(member, request)
        self._assign()
        self._reconcile(member, request.owned, now)
        member.expires_at = now + self._session_seconds
        has_changed = request.epoch == 0 or member.assigned != before or request.topics is not None
        return HeartbeatResponse(0, member.epoch, self._interval_seconds, member.assigned if has_changed else None)

    def check_commit(self, member_id: str, epoch: int, partitions: Iterable[Partition]) -> int:
        """Return why a commit is refused, or 0. At the member's epoch it does not matter which partitions it has.

        An earlier epoch may commit what the member has had since then.
        Source: KIP-1251; Apache Kafka 4.3, `ConsumerGroup.validateOffsetCommit`.
        """
        if epoch < 0 and not self.members:
            return 0
        member = self.members.get(member_id)
        if member is None:
            return int(KafkaError.UNKNOWN_MEMBER_ID)
        if epoch == member.epoch:
            return 0
        since = [member.assigned_at.get(partition, epoch + 1) for partition in partitions]
        return 0 if epoch < member.epoch and max(since, default=0) <= epoch else int(KafkaError.STALE_MEMBER_EPOCH)

    @property
    def state(self) -> str:
        if not self.members:
            return "empty"
        if self.epoch > self._target_epoch:
            return "assigning"
        settled = all(one.state == "stable" and one.epoch == self._target_epoch for one in self.members.values())
        return "stable" if settled else "reconciling"

    # Time ------------------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When a session ends, or the time in which a member must give up partitions."""
        sessions = [one.expires_at for one in self.members.values()]
        return min([*sessions, *(one.revoke_by for one in self.members.values() if one.revoke_by)], default=None)

    def expire(self, now: float) -> None:
        """Fence the members that are due."""
        for member in list(self.members.values()):
            if member.expires_at <= now or (member.revoke_by and member.revoke_by <= now):
                self._remove(member)

    def moved(self, now: float) -> None:
        """Continue on another coordinator, where each session begins anew."""
        for member in self.members.values():
            member.expires_at = now + self._session_seconds
            if member.revoke_by:
                member.revoke_by = now + member.rebalance_seconds

    # Changes ---------------------------------------------------------------------------------------------------------

    def _join(self, request: Heartbeat, member: _GroupMember | None) -> _GroupMember | int:
        if request.instance_id is not None:
            known = self.members.get(self._static.get(request.instance_id, ""))
            if known is not None and known.member_id != request.member_id:
                if not known.has_left:
                    return int(KafkaError.UNRELEASED_INSTANCE_ID)
                return self._take_over(known, request.member_id)
            self._static[request.instance_id] = request.member_id
        if member is None:
            member = self.members[request.member_id] = _GroupMember(request.member_id, request.instance_id)
        return member

    def _take_over(self, old: _GroupMember, member_id: str) -> _GroupMember:
        """Give a static member that comes back what it had, under its new id."""
        del self.members[old.member_id]
        if old.member_id in self._targets:
            self._targets[member_id] = self._targets.pop(old.member_id)
        old.member_id, old.has_left = member_id, False
        old.epoch = old.previous_epoch = self._target_epoch
        self.members[member_id] = old
        self._static[str(old.instance_id)] = member_id
        return old

    def _leave(self, request: Heartbeat, now: float) -> HeartbeatResponse:
        member = self.members.get(request.member_id)
        if member is None:
            return HeartbeatResponse(int(KafkaError.UNKNOWN_MEMBER_ID), request.epoch)
        if request.epoch == LEAVE_FOR_A_MOMENT:
            member.has_left = True
            member.assigned_at = dict.fromkeys(member.assigned, 0)
            member.epoch = LEAVE_FOR_A_MOMENT
            member.to_revoke, member.revoke_by = frozenset(), 0.0
            member.expires_at = now + self._session_seconds
        else:
            self._remove(member)
        return HeartbeatResponse(0, request.epoch)

    def _check_epoch(self, member: _GroupMember, request: Heartbeat) -> int:
        if request.epoch == member.epoch:
            return 0
        is_retry = request.epoch == member.previous_epoch and (
            request.owned is None or request.owned <= member.assigned
        )
        return 0 if is_retry else int(KafkaError.FENCED_MEMBER_EPOCH)

    def _change_epoch(self, member: _GroupMember, request: Heartbeat) -> None:
        """Begin another epoch if a subscription or a topic has changed."""
        is_changed = request.topics is not None and request.topics != member.topics
        if request.topics is not None:
            member.topics = request.topics
        topics = {topic: self._partitions_of(topic) for one in self.members.values() for topic in one.topics}
        if is_changed or topics != self._known_topics:
            self._known_topics = topics
            self.epoch += 1

    def _assign(self) -> None:
        """Compute the target assignment of this epoch."""
        if self._target_epoch < self.epoch:
            topics = {member.member_id: member.topics for member in self.members.values()}
            self._targets = assign_uniformly(topics, self._known_topics, self._targets)
            self._target_epoch = self.epoch

    def _reconcile(self, member: _GroupMember, owned: frozenset[Partition] | None, now: float) -> None:
        if member.state == "unrevoked":
            if owned is None or owned & member.to_revoke:
                return
            member.to_revoke, member.revoke_by = frozenset(), 0.0
        elif member.state == "stable" and member.epoch == self._target_epoch:
            return
        target = self._targets.get(member.member_id, frozenset())
        taken = {p for one in self.members.values() if one is not member for p in one.assigned | one.to_revoke}
        kept = member.assigned & target
        to_revoke = member.assigned - target
        free = target - member.assigned - taken
        if to_revoke and (owned is None or owned & to_revoke):
            member.state, member.assigned, member.to_revoke = "unrevoked", kept, to_revoke
            member.revoke_by = now + member.rebalance_seconds
            return
        waits = bool((target - member.assigned) & taken)
        if member.epoch != self._target_epoch:
            member.previous_epoch, member.epoch = member.epoch, self._target_epoch
        member.assigned = kept | free
        member.assigned_at = {p: member.assigned_at.get(p, member.epoch) for p in member.assigned}
        member.state = "unreleased" if waits else "stable"

    def _remove(self, member: _GroupMember) -> None:
        del self.members[member.member_id]
        self._targets.pop(member.member_id, None)
        if member.instance_id is not None and self._static.get(member.instance_id) == member.member_id:
            del self._static[member.instance_id]
        self.epoch += 1
        self._known_topics = {
            topic: self._partitions_of(topic) for one in self.members.values() for topic in one.topics
        }


def assign_uniformly(
    topics_of: Mapping[str, Sequence[str]], counts: Mapping[str, int], current: Mapping[str, Iterable[Partition]]
) -> dict[str, frozenset[Partition]]:
    """Share partitions evenly among members, and move as few as possible.

    Source: Apache Kafka, `UniformHomogeneousAssignmentBuilder`; where members differ in topics, each partition goes to
    the member that has the fewest.
    """
    members = sorted(topics_of)
    partitions = [
        (topic, number)
        for topic in sorted({topic for topics in topics_of.values() for topic in topics})
        for number in range(counts.get(topic, 0))
    ]
    if not members:
        return {}
    existing = set(partitions)
    is_alike = len({tuple(sorted(topics)) for topics in topics_of.values()}) == 1
    least, more = divmod(len(partitions), len(members))
    found: dict[str, list[Partition]] = {}
    for member in members:
        kept = [p for p in sorted(current.get(member, ())) if p in existing and p[0] in topics_of[member]]
        if is_alike:
            quota = least + 1 if more and len(kept) > least else least
            more -= quota > least
            kept = kept[:quota]
        found[member] = kept
    taken = {p for kept in found.values() for p in kept}
    for partition in partitions:
        if partition not in taken:
            candidates = [member for member in members if partition[0] in topics_of[member]]
            chosen = min(candidates, key=lambda member: len(found[member]))
            found[chosen].append(partition)
    if not is_alike:
        _even_out(found, topics_of)
    return {member: frozenset(kept) for member, kept in found.items()}


def _even_out(found: dict[str, list[Partition]], topics_of: Mapping[str, Sequence[str]]) -> None:
    """Move partitions from members with more to members with fewer that also read the topic."""
    moved = True
    while moved:
        moved = False
        for kept in found.values():
            for partition in sorted(kept, reverse=True):
                others = [one for one in found if partition[0] in topics_of[one]]
                fewest = min(others, key=lambda one: len(found[one]))
                if len(found[fewest]) + 1 < len(kept):
                    kept.remove(partition)
                    found[fewest].append(partition)
                    moved = True
