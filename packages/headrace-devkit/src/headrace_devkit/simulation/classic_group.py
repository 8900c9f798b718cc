"""The coordinator's side of a classic group: who is a member, of which generation, and who waits for whom.

| State | until | then |
|---|---|---|
| empty | a member joins | preparing |
| preparing | all members have joined, or the rebalance has timed out | completing, with the next generation |
| completing | the leader sends the assignments, or a member joins or leaves | stable, or preparing |
| stable | a member joins with something new, leaves, or its session ends | preparing |

Time comes in as `now`; the coordinator calls `expire` at `next_deadline`. Source: Apache Kafka,
`GroupMetadataManager.classicGroupJoin`, `classicGroupSync`, `classicGroupHeartbeat`, `completeClassicGroupJoin`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from confluent_kafka import KafkaError

State = Literal["empty", "preparing", "completing", "stable"]
_NEW_MEMBER_SECONDS = 300.0
"""A member that joins for the first time is kept this long, so that a retry finds it."""


class JoinRequest(NamedTuple):
    """A request to join."""

    member_id: str
    client_id: str
    session_seconds: float
    rebalance_seconds: float
    protocols: tuple[tuple[str, Any], ...]
    """Names of assignors with what the member says to the leader, such as its topics and partitions."""
    instance_id: str | None = None


class JoinResponse(NamedTuple):
    """The response to a join."""

    error: int = 0
    member_id: str = ""
    generation: int = -1
    protocol: str = ""
    leader: str = ""
    members: Mapping[str, Any] | None = None
    """What each member has sent, for the leader."""


class SyncResponse(NamedTuple):
    """The response to a sync."""

    error: int = 0
    assignment: Any = None


class _ClassicMember:
    def __init__(self, member_id: str, request: JoinRequest) -> None:
        self.member_id = member_id
        self.request = request
        self.assignment: Any = None
        self.expires_at = 0.0
        self.is_new = True
        self.join: Callable[[JoinResponse], object] | None = None
        """Waits for the response to its join."""
        self.sync: Callable[[SyncResponse], object] | None = None
        self.has_synced = True


class ClassicGroup:
    """A group of the classic protocol."""

    def __init__(self, new_id: Callable[[str], str], initial_delay_seconds: float = 3.0) -> None:
        """Begin empty; `new_id` makes a member id from a client id or an instance id."""
        self.state: State = "empty"
        self.generation = 0
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, _ClassicMember] = {}
        self._new_id = new_id
        self._initial_delay_seconds = initial_delay_seconds
        self._pending: dict[str, float] = {}
        """Member ids that were given and not used yet, with the time at which they are forgotten."""
        self._static: dict[str, str] = {}
        """Member id by instance id."""
        self._due_at = 0.0
        """When the members must have joined, or synced; 0 if they have."""
        self._initial = False
        """Whether it waits for more members, because it was empty."""

    # Requests --------------------------------------------------------------------------------------------------------

    def join(self, request: JoinRequest, respond: Callable[[JoinResponse], object], now: float) -> None:
        """Take a request to join; the response may come much later."""
        known = self.members.get(request.member_id)
        if request.instance_id is not None:
            error = self._check_static(request)
            if error:
                respond(JoinResponse(error, request.member_id))
            elif known is None:
                self._join_static(request, respond, now)
            else:
                self._join_again(known, request, respond, now)
        elif not request.member_id:
            member_id = self._new_id(request.client_id)
            self._pending[member_id] = now + request.session_seconds
            respond(JoinResponse(KafkaError.MEMBER_ID_REQUIRED, member_id))
        elif request.member_id in self._pending:
            del self._pending[request.member_id]
            self._add(request.member_id, request, respond, now)
        elif known is None:
            respond(JoinResponse(KafkaError.UNKNOWN_MEMBER_ID, request.member_id))
        else:
            self._join_again(known, request, respond, now)

    def sync(
        self,
        member_id: str,
        generation: int,
        assignments: Mapping[str, Any],
        respond: Callable[[SyncResponse], object],
        now: float,
        instance_id: str | None = None,
    ) -> None:
        """Take a request for the assignment; that of the leader has all of them."""
        error = self._check(member_id, generation, instance_id)
        if not error and self.state == "preparing":
            error = KafkaError.REBALANCE_IN_PROGRESS
        if error:
            respond(SyncResponse(error))
            return
        member = self.members[member_id]
        member.has_synced = True
        if self.state == "stable":
            self._touch(member, now)
            respond(SyncResponse(0, member.assignment))
            return
        member.sync = respond
        if member_id == self.leader:
            for each in self.members.values():
                each.assignment = assignments.get(each.member_id)
            self.state = "stable"
            for each in self.members.values():
                self._touch(each, now)
                if each.sync:
                    waiting, each.sync = each.sync, None
                    waiting(SyncResponse(0, each.assignment))

    def heartbeat(self, member_id: str, generation: int, now: float, instance_id: str | None = None) -> int:
        """Return the error of a heartbeat, or 0."""
        error = self._check(member_id, generation, instance_id)
        if error:
            return error
        self._touch(self.members[member_id], now)
        return KafkaError.REBALANCE_IN_PROGRESS if self.state == "preparing" else 0

    def leave(self, member_id: str, now: float) -> int:
        """Remove a member at its request."""
        if self._pending.pop(member_id, None) is not None:
            self._joined_maybe(now)
            return 0
        if member_id not in self.members:
            return int(KafkaError.UNKNOWN_MEMBER_ID)
        self._remove(member_id, now)
        return 0

    def check_commit(self, member_id: str, generation: int, now: float, instance_id: str | None = None) -> int:
        """Return why a commit is refused, or 0. Which partitions the member has does not matter to Kafka.

        Source: Apache Kafka, `ClassicGroup.validateOffsetCommit`.
        """
        if generation < 0 and self.state == "empty":
            return 0  # it does not belong to a member
        if generation < 0 and not member_id:
            return int(KafkaError.UNKNOWN_MEMBER_ID)
        error = self._check(member_id, generation, instance_id)
        if not error and self.state == "completing":
            error = int(KafkaError.REBALANCE_IN_PROGRESS)
        if not error:
            self._touch(self.members[member_id], now)
        return error

    # Time ------------------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When something ends by itself: a session, a rebalance, an id that is not used."""
        found = [*self._pending.values(), *(m.expires_at for m in self.members.values() if not self._is_waiting(m))]
        if self.state == "preparing" or (
            self._due_at and not all(member.has_synced for member in self.members.values())
        ):
            found.append(self._due_at)
        return min(found, default=None)

    def expire(self, now: float) -> None:
        """End what is due."""
        for member_id in [one for one, at in self._pending.items() if at <= now]:
            del self._pending[member_id]
            self._joined_maybe(now)
        for member in list(self.members.values()):
            if member.expires_at <= now and not self._is_waiting(member):
                self._remove(member.member_id, now)
        if self.state == "preparing" and self._due_at <= now:
            self._complete(now)
        elif self.state in ("completing", "stable") and self._due_at and self._due_at <= now:
            self._due_at = 0.0
            for member in [one for one in self.members.values() if not one.has_synced]:
                self._remove(member.member_id, now)

    def moved(self, now: float) -> None:
        """Continue on another coordinator, which knows what is stored: members of the last stable generation.

        What waits is answered by the connection that breaks.
        Source: Apache Kafka, `GroupCoordinatorService.onElection`.
        """
        for member in self.members.values():
            member.join = member.sync = None
            member.has_synced = True
            member.is_new = False
            member.expires_at = now + member.request.session_seconds
        self._pending.clear()
        if self.state != "empty":
            self.state = "stable"
            for member_id in [one.member_id for one in self.members.values() if one.assignment is None]:
                self._forget(member_id)
            if not self.members:
                self.state = "empty"

    # Changes ---------------------------------------------------------------------------------------------------------

    def _check_static(self, request: JoinRequest) -> int:
        known = self._static.get(str(request.instance_id))
        if not request.member_id:
            return 0
        if known is None:
            return int(KafkaError.UNKNOWN_MEMBER_ID)
        return 0 if known == request.member_id else int(KafkaError.FENCED_INSTANCE_ID)

    def _check(self, member_id: str, generation: int, instance_id: str | None) -> int:
        if instance_id is not None:
            known = self._static.get(instance_id)
            if known is None:
                return int(KafkaError.UNKNOWN_MEMBER_ID)
            if known != member_id:
                return int(KafkaError.FENCED_INSTANCE_ID)
        if member_id not in self.members:
            return int(KafkaError.UNKNOWN_MEMBER_ID)
        return 0 if generation == self.generation else int(KafkaError.ILLEGAL_GENERATION)

    def _join_static(self, request: JoinRequest, respond: Callable[[JoinResponse], object], now: float) -> None:
        instance = str(request.instance_id)
        old = self._static.get(instance)
        if old is None:
            member_id = self._new_id(instance)
            self._static[instance] = member_id
            self._add(member_id, request, respond, now)
            return
        # A restarted process: it replaces the old one, whose requests are fenced from now on.
        member = self.members.pop(old)
        fenced = int(KafkaError.FENCED_INSTANCE_ID)
        if member.join:
            member.join(JoinResponse(fenced, old))
        if member.sync:
            member.sync(SyncResponse(fenced))
        member.join = member.sync = None
        member_id = member.member_id = self._new_id(instance)
        member.request = request
        self.members[member_id] = member
        self._static[instance] = member_id
        was_leader = self.leader == old
        if was_leader:
            self.leader = member_id
        self._touch(member, now)
        if self.state == "stable" and self._common_protocol() == self.protocol:
            # No rebalance, even if it asks for other topics; its sync has what the old one had. A leader gets the id of
            # the old one, so that it does not assign.
            # Source: Apache Kafka, `updateStaticMemberThenRebalanceOrCompleteJoin`.
            leader = old if was_leader else self.leader
            respond(JoinResponse(0, member_id, self.generation, self.protocol, leader))
            return
        self._wait_for_join(member, request, respond)
        self._rebalance_maybe(now)

    def _join_again(
        self, member: _ClassicMember, request: JoinRequest, respond: Callable[[JoinResponse], object], now: float
    ) -> None:
        same = member.request.protocols == request.protocols
        if (self.state == "completing" and same) or (
            self.state == "stable" and same and member.member_id != self.leader
        ):
            is_leader = member.member_id == self.leader
            respond(self._response_for(member, with_members=is_leader and self.state == "completing"))
            return
        self._wait_for_join(member, request, respond)
        self._rebalance_maybe(now)

    def _add(self, member_id: str, request: JoinRequest, respond: Callable[[JoinResponse], object], now: float) -> None:
        member = self.members[member_id] = _ClassicMember(member_id, request)
        member.expires_at = now + _NEW_MEMBER_SECONDS
        if self.state == "preparing" and self._initial:
            most = max(one.request.rebalance_seconds for one in self.members.values())
            self._due_at = min(now + self._initial_delay_seconds, max(self._due_at, now + most))
        self._wait_for_join(member, request, respond)
        self._rebalance_maybe(now)

    def _wait_for_join(
        self, member: _ClassicMember, request: JoinRequest, respond: Callable[[JoinResponse], object]
    ) -> None:
        member.request = request
        member.join = respond

    def _rebalance_maybe(self, now: float) -> None:
        if self.state == "preparing":
            self._joined_maybe(now)
            return
        for member in self.members.values():
            if member.sync:
                waiting, member.sync = member.sync, None
                self._touch(member, now)
                waiting(SyncResponse(int(KafkaError.REBALANCE_IN_PROGRESS)))
        self._due_at = 0.0
        self._initial = self.state == "empty"
        self.state = "preparing"
        if self._initial:
            most = max((one.request.rebalance_seconds for one in self.members.values()), default=0.0)
            self._due_at = now + min(self._initial_delay_seconds, most)
        else:
            self._due_at = now + max((one.request.rebalance_seconds for one in self.members.values()), default=0.0)
            self._joined_maybe(now)

    def _joined_maybe(self, now: float) -> None:
        if self.state != "preparing" or self._initial or self._pending:
            return
        if all(member.join for member in self.members.values()):
            self._complete(now)

    def _complete(self, now: float) -> None:
        """Begin the next generation with those that have joined; static members stay without."""
        self._initial = False
        for member in list(self.members.values()):
            if member.join is None and member.request.instance_id is None:
                self._forget(member.member_id)
        joined = [member for member in self.members.values() if member.join]
        if self.members and not joined:
            self._due_at = now + max(one.request.rebalance_seconds for one in self.members.values())
            return
        self.generation += 1
        if not self.members:
            self.state, self.protocol, self.leader = "empty", "", ""
            return
        if self.leader not in self.members or self.members[self.leader].join is None:
            self.leader = joined[0].member_id
        self.protocol = self._common_protocol()
        self.state = "completing"
        self._due_at = now + max(member.request.rebalance_seconds for member in self.members.values())
        for member in joined:
            member.is_new = False
            member.has_synced = False
            self._touch(member, now)
            waiting, member.join = member.join, None
            if waiting:
                waiting(self._response_for(member, with_members=member.member_id == self.leader))

    def _response_for(self, member: _ClassicMember, *, with_members: bool) -> JoinResponse:
        sent = {one.member_id: dict(one.request.protocols)[self.protocol] for one in self.members.values()}
        members = sent if with_members else None
        return JoinResponse(0, member.member_id, self.generation, self.protocol, self.leader, members)

    def _common_protocol(self) -> str:
        """Return the assignor that all support and most prefer."""
        names = [[name for name, _ in member.request.protocols] for member in self.members.values()]
        common = [name for name in names[0] if all(name in other for other in names)]
        votes = [next(name for name in each if name in common) for each in names]
        return max(common, key=votes.count)

    def _remove(self, member_id: str, now: float) -> None:
        self._forget(member_id)
        if self.state in ("completing", "stable"):
            self._rebalance_maybe(now)
        else:
            self._joined_maybe(now)

    def _forget(self, member_id: str) -> None:
        member = self.members.pop(member_id)
        if member.request.instance_id is not None:
            self._static.pop(member.request.instance_id, None)
        unknown = int(KafkaError.UNKNOWN_MEMBER_ID)
        if member.join:
            member.join(JoinResponse(unknown, member_id))
        if member.sync:
            member.sync(SyncResponse(unknown))

    def _touch(self, member: _ClassicMember, now: float) -> None:
        member.expires_at = now + member.request.session_seconds

    def _is_waiting(self, member: _ClassicMember) -> bool:
        return (member.join is not None and not member.is_new) or member.sync is not None
