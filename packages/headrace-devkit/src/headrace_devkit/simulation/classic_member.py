"""A client's membership under the classic protocol: join, sync, heartbeats, and the leader's assignment.

Source: librdkafka, `rdkafka_cgrp.c`: `rd_kafka_cgrp_handle_JoinGroup`, `rd_kafka_cgrp_handle_SyncGroup_memberstate`,
`rd_kafka_cgrp_handle_Heartbeat`, `rd_kafka_cgrp_session_timeout_check`, `rd_kafka_cgrp_modify_subscription`.
"""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError

from headrace_devkit.simulation import assignors
from headrace_devkit.simulation.assignors import MemberTopics
from headrace_devkit.simulation.classic_group import JoinRequest, JoinResponse
from headrace_devkit.simulation.group_member import GroupMembership, Protocol
from headrace_devkit.simulation.offsets import Partition

_JOIN_PAUSE_SECONDS = 1.0


class _SubscribedTopics:
    """Which subscribed topics exist, and which were reported to be missing."""

    def __init__(self, member: GroupMembership) -> None:
        self._member = member
        self.counts: dict[str, int] = {}
        """Those that exist, with their number of partitions."""
        self._reported: set[str] = set()
        self.refresh_at = 0.0

    def must_refresh(self) -> bool:
        """Whether metadata of a topic is too old, or was never requested."""
        member = self._member
        oldest = member.cluster.world.now - member.settings.refresh_seconds
        known = [(topic, member.cluster.topics.get(topic)) for topic in member.subscription]
        return any(one.read_at < oldest if one else topic not in self._reported for topic, one in known)

    def check(self) -> bool:
        """Return whether something has changed, and report what is missing, once."""
        member = self._member
        cluster = member.cluster
        for topic in member.subscription:
            if topic in cluster.topics:
                self._reported.discard(topic)
            elif topic not in self._reported:
                self._reported.add(topic)
                text = f"Subscribed topic not available: {topic}: Broker: Unknown topic or partition"
                member.host.problem(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, text), topic)
        before = self.counts
        self.counts = {topic: count for topic in sorted(member.subscription) if (count := cluster.count(topic))}
        return self.counts != before


class _Session:
    """The heartbeats of a member, and until when its session lasts without one."""

    def __init__(self) -> None:
        self.ends_at = 0.0
        """0 once it has ended."""
        self.beat_at = 0.0
        self.is_beating = False


class ClassicMember(GroupMembership):
    """A member of a classic group."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.assignor = ""
        """The one that the group uses; empty before the first join."""
        self._topics = _SubscribedTopics(self)
        self._session = _Session()
        self._waits_for_response = False
        self._join_not_before = 0.0
        self._next_subscription: list[str] | None = None

    @property
    def protocol(self) -> Protocol:
        if not self.assignor:
            return "none"
        return "cooperative" if self.assignor == assignors.COOPERATIVE else "eager"

    @property
    def has_joined(self) -> bool:
        return bool(self.member_id)

    @property
    def _beats(self) -> bool:
        return self.rebalance.join_state in ("steady", "wait-assign-call", "wait-unassign-call")

    # MemberTopics ----------------------------------------------------------------------------------------------------

    def subscribe(self, topics: list[str]) -> None:
        if self.fatal is not None:
            return
        self._next_subscription = None
        if self.is_rebalancing:
            self._next_subscription = topics
            return
        if self.protocol == "cooperative" and self.subscription:
            self._modify(topics)
            return
        if self.subscription:
            self._drop_subscription(leave=False)
        self.subscription = topics
        if self.rebalance.join_state == "init":
            self._join()
        self.serve()

    def unsubscribe(self) -> None:
        if self.is_rebalancing and not self.rebalance.is_terminating:
            self._next_subscription = []
            return
        self._drop_subscription(leave=True)
        self.serve()

    def _drop_subscription(self, *, leave: bool) -> None:
        self.rebalance.checks_poll = False
        self.subscription = []
        self._topics.counts = {}
        if leave and self.has_joined:
            self.rebalance.leaves_on_unassign = True
        if not self.rebalance.is_lost:
            self.revoke_all(lost=False)

    def _modify(self, topics: list[str]) -> None:
        """Change a subscription without a full revoke; metadata comes first."""
        self.subscription = topics
        self._refresh_topics()

    def _apply_next_subscription(self) -> bool:
        topics, self._next_subscription = self._next_subscription, None
        if topics is None:
            return False
        if topics:
            self.subscribe(topics)
        else:
            self.unsubscribe()
        return True

    def _refresh_topics(self) -> None:
        self._topics.refresh_at = self.cluster.world.now + self.settings.refresh_seconds
        self.cluster.refresh(self.subscription, self._refreshed)

    def _refreshed(self, error: KafkaError | None) -> None:
        if error is None and self.subscription:
            self._check_topics(joins=True)
        elif self.rebalance.join_state == "wait-metadata" and not self._waits_for_response:
            self.rebalance.join_state = "init"
        self.serve()

    def _check_topics(self, *, joins: bool) -> None:
        """Compare the topics with those of the last join, and join again if something has changed."""
        is_changed = self._topics.check()
        if not joins or (not is_changed and self.rebalance.join_state != "wait-metadata"):
            return
        if self.protocol == "cooperative":
            gone = [one for one in self.rebalance.owned or () if one[1] >= self._topics.counts.get(one[0], 0)]
            if gone:
                self.rebalance.is_lost |= all(one[0] in self.subscription for one in gone)
                self.hand_over("revoke", gone, rejoin=True)
            else:
                self.rejoin()
        else:
            self.revoke_all(lost=False)

    # Joining ---------------------------------------------------------------------------------------------------------

    def join_at_once(self) -> None:
        self._join_not_before = 0.0

    def serve_join(self) -> None:
        now = self.cluster.world.now
        if self.subscription and now >= self._topics.refresh_at:
            self._refresh_topics()
        if self.rebalance.join_state == "init":
            if self._waits_for_response or self._apply_next_subscription() or not self.subscription:
                return
            if now >= self._join_not_before:
                self._join_not_before = now + _JOIN_PAUSE_SECONDS
                self._join()
        elif self._beats and self.subscription and now >= self._session.beat_at and not self._session.is_beating:
            self._heartbeat()

    def _join(self) -> None:
        if self.coordinator.broker is None or self.rebalance.join_state != "init" or self._waits_for_response:
            return
        if self.rebalance.poll_was_exceeded and self.host.poll_exceeded():
            return
        self.rebalance.poll_was_exceeded = False
        if self._topics.must_refresh():
            self.rebalance.join_state = "wait-metadata"
            self._refresh_topics()
            self.join_at_once()
            return
        if not self._topics.counts:
            self._check_topics(joins=False)
            if not self._topics.counts:
                return
        self.rebalance.join_state = "wait-join"
        self._waits_for_response = True
        own = MemberTopics(tuple(self._topics.counts), frozenset(self.rebalance.owned or ()), self.generation)
        plain = MemberTopics(tuple(self._topics.counts))
        request = JoinRequest(
            self.member_id,
            self.settings.client_id,
            self.settings.session_seconds,
            self.settings.poll_seconds,
            tuple((name, own if name == assignors.COOPERATIVE else plain) for name in self.settings.assignors),
            self.settings.instance_id,
        )
        group = self.settings.group
        seconds = self.settings.poll_seconds + 3  # as librdkafka waits for this response
        self.coordinator.send(
            lambda broker: self.coordinator.groups.join(broker, group, request), self._joined, seconds
        )

    def _joined(self, response: Any) -> None:
        self._waits_for_response = False
        if self.rebalance.join_state != "wait-join":
            return  # outdated
        error = response.code() if isinstance(response, KafkaError) else response.error
        if error:
            self._join_failed(error, response)
            return
        joined: JoinResponse = response
        self.member_id = joined.member_id
        self.generation = joined.generation
        self.assignor = joined.protocol
        if joined.leader == joined.member_id:
            self.rebalance.join_state = "wait-metadata"
            self._waits_for_response = True
            members = joined.members or {}
            topics = sorted({topic for own in members.values() for topic in own.topics})
            generation = joined.generation

            def known(_error: KafkaError | None) -> None:
                self._waits_for_response = False
                if self.rebalance.join_state == "wait-metadata" and self.generation == generation:
                    counts = {topic: self.cluster.count(topic) for topic in topics}
                    self._sync(assignors.assign(joined.protocol, members, counts))

            self.cluster.refresh(topics, known)
        else:
            self._sync({})

    def _join_failed(self, error: int, response: Any) -> None:
        now = self.cluster.world.now
        self._join_not_before = now + 2 * _JOIN_PAUSE_SECONDS
        if error == KafkaError.FENCED_INSTANCE_ID:
            self._fail(error)
        elif error == KafkaError.UNKNOWN_MEMBER_ID:
            self.member_id = ""
        elif error == KafkaError.ILLEGAL_GENERATION:
            self.generation = -1
        elif error == KafkaError.MEMBER_ID_REQUIRED:
            self.member_id = response.member_id
            self.join_at_once()
        if self.protocol == "cooperative" and error in (KafkaError.ILLEGAL_GENERATION, KafkaError.MEMBER_ID_REQUIRED):
            self.revoke_all(lost=True)
        else:
            self.rejoin()

    def _sync(self, assignments: Mapping[str, frozenset[Partition]]) -> None:
        self.rebalance.join_state = "wait-sync"
        self._waits_for_response = True
        group, identity = self.settings.group, self.identity
        if not self.coordinator.send(
            lambda broker: self.coordinator.groups.sync(broker, group, identity, assignments), self._synced
        ):
            self._waits_for_response = False
            self.rejoin()

    def _synced(self, response: Any) -> None:
        self._waits_for_response = False
        if self.rebalance.join_state != "wait-sync":
            return  # outdated
        error = response.code() if isinstance(response, KafkaError) else response.error
        if not error and self.rebalance.is_terminating:
            error = KafkaError._DESTROY
        if not error:
            self._session.ends_at = self.cluster.world.now + self.settings.session_seconds
            self._session.beat_at = self.cluster.world.now + self.settings.heartbeat_seconds
            self.new_assignment(response.assignment or ())
            return
        if error == KafkaError.FENCED_INSTANCE_ID:
            self._fail(error)
        elif error == KafkaError.ILLEGAL_GENERATION:
            self.generation = -1
        elif error == KafkaError.UNKNOWN_MEMBER_ID:
            self.member_id = ""
        if self.protocol == "cooperative" and error in (KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID):
            self.revoke_all(lost=True)
        else:
            self.rejoin()

    # Being a member --------------------------------------------------------------------------------------------------

    def _heartbeat(self) -> None:
        if self.rebalance.poll_was_exceeded:
            return
        self._session.is_beating = True
        self._session.beat_at = self.cluster.world.now + self.settings.heartbeat_seconds
        group, identity = self.settings.group, self.identity
        if not self.coordinator.send(
            lambda broker: self.coordinator.groups.heartbeat(broker, group, identity), self._beaten
        ):
            self._session.is_beating = False

    def _beaten(self, response: KafkaError | None) -> None:
        self._session.is_beating = False
        error = response.code() if response else 0
        if error and self.rebalance.join_state in ("init", "wait-join", "wait-metadata", "wait-sync"):
            return  # outdated
        if error in (0, KafkaError.REBALANCE_IN_PROGRESS) and self._session.ends_at:
            self._session.ends_at = self.cluster.world.now + self.settings.session_seconds
        if error == KafkaError.REBALANCE_IN_PROGRESS and not self.rebalance.waits_for_call:
            if self.protocol == "eager":
                self.revoke_all_maybe(lost=False)
            elif not self.is_rebalancing:
                self.rejoin()
        elif error == KafkaError.UNKNOWN_MEMBER_ID:
            self.member_id = ""
            self.revoke_all_maybe(lost=True)
        elif error == KafkaError.ILLEGAL_GENERATION:
            self.generation = -1
            self.revoke_all_maybe(lost=True)
        elif error == KafkaError.FENCED_INSTANCE_ID:
            self._fail(error)
            self.revoke_all_maybe(lost=True)

    def check_session(self) -> None:
        if self.rebalance.join_state == "steady" and 0 < self._session.ends_at <= self.cluster.world.now:
            self._session.ends_at = 0.0
            self.member_id = ""
            self.revoke_all_maybe(lost=True)

    def commit_refused(self, error: int) -> None:
        if error == KafkaError.UNKNOWN_MEMBER_ID:
            self.member_id = ""
            self.revoke_all_maybe(lost=True)
        elif error == KafkaError.ILLEGAL_GENERATION and not self.is_rebalancing:
            self.generation = -1
            self.revoke_all_maybe(lost=True)
        elif error == KafkaError.FENCED_INSTANCE_ID:
            self._fail(error)

    def exceeded(self) -> None:
        if self.settings.instance_id is None:
            self.leave()
        self.member_id = ""
        self.revoke_all_maybe(lost=True)

    def leave(self) -> None:
        member_id, self.member_id = self.member_id, ""
        if self.rebalance.is_leaving or (self.settings.instance_id is not None and self.rebalance.is_terminating):
            return
        self.rebalance.is_leaving = True
        group = self.settings.group
        if not self.coordinator.send(
            lambda broker: self.coordinator.groups.leave(broker, group, member_id), self.left, 5.0
        ):
            self.left()

    def _fail(self, error: int) -> None:
        self.fatal = KafkaError(error, f"Fatal consumer error: {KafkaError(error).str()}", fatal=True)
        self.host.problem(KafkaError(KafkaError._FATAL, self.fatal.str()))

    def assignment_done(self) -> None:
        if self.rebalance.join_state == "wait-unassign":
            self.unassign_done()
        elif self.rebalance.join_state == "wait-incr-unassign":
            self._incremental_unassign_done()
        elif self.rebalance.join_state == "steady":
            if self._apply_next_subscription():
                return
            if self.rebalance.rejoins:
                self.rebalance.rejoins = False
                self.join_at_once()
                self.rejoin()
            else:
                self.try_terminate()
        elif self.rebalance.join_state == "init":
            self.try_terminate()

    def _incremental_unassign_done(self) -> None:
        if self.rebalance.is_terminating:
            self.unassign()
            self.leave_maybe()
            self.rebalance.join_state = "init"
        elif self.rebalance.added_next is not None:
            added, self.rebalance.added_next = self.rebalance.added_next, None
            self.hand_over("assign", added, rejoin=True)
        elif self.rebalance.rejoins:
            self.rebalance.rejoins = False
            self.join_at_once()
            self.rejoin()
        elif not self._apply_next_subscription():
            self.rebalance.join_state = "steady"
