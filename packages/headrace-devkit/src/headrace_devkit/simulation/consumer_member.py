"""A client's membership under the consumer protocol (KIP-848): heartbeats that bring the target and take the owned.

Source: librdkafka, `rdkafka_cgrp.c`: `rd_kafka_cgrp_handle_ConsumerGroupHeartbeat`, `rd_kafka_cgrp_consumer_serve`.
"""

from typing import Any

from confluent_kafka import KafkaError

from headrace_devkit.simulation.consumer_group import LEAVE, LEAVE_FOR_A_MOMENT, Heartbeat, HeartbeatResponse
from headrace_devkit.simulation.group_member import GroupMembership, Protocol
from headrace_devkit.simulation.offsets import Partition

_RETRY_SECONDS = 0.1
_FATAL = (
    KafkaError.INVALID_REQUEST,
    KafkaError.GROUP_MAX_SIZE_REACHED,
    KafkaError.UNSUPPORTED_ASSIGNOR,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError.UNRELEASED_INSTANCE_ID,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.GROUP_ID_NOT_FOUND,
)


class _Reconciliation:
    """What a member owns, and what it should own."""

    def __init__(self) -> None:
        self.current: frozenset[Partition] = frozenset()
        """What the coordinator knows that it owns."""
        self.target: frozenset[Partition] | None = None
        """What it is taking over now."""
        self.next_target: frozenset[Partition] | None = None
        self.waits_for_ack = False

    @property
    def known(self) -> frozenset[Partition]:
        """What it owns when all is done that was begun."""
        return self.current if self.target is None else self.target


class _Heartbeats:
    """When a heartbeat is due, and what it must say."""

    def __init__(self) -> None:
        self.interval_seconds = 0.0
        """0 before the first response."""
        self.due_at = 0.0
        self.is_open = False
        self.says_all = False
        self.says_topics = False


class ConsumerMember(GroupMembership):
    """A member of a group of the consumer protocol."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.member_id = f"{self.settings.client_id}-{self.cluster.world.random.getrandbits(64):016x}"
        """Made by the client, and the same until it is closed."""
        self.generation = 0
        self._has_subscribed = False
        self._heartbeats = _Heartbeats()
        self._moves = _Reconciliation()
        self._will_rejoin = False
        self._is_rejoining = False

    @property
    def protocol(self) -> Protocol:
        return "cooperative" if self._has_subscribed else "none"

    @property
    def has_joined(self) -> bool:
        return self.generation > 0

    @property
    def _will_leave(self) -> bool:
        return self.rebalance.leaves_on_unassign or self.rebalance.is_leaving

    def subscribe(self, topics: list[str]) -> None:
        if self.fatal is not None:
            return
        self.subscription = topics
        self._has_subscribed = True
        self._heartbeats.says_topics = True
        self.expedite()

    def unsubscribe(self) -> None:
        self.rebalance.checks_poll = False
        self.subscription = []
        if self.has_joined and not self._will_leave and not self._will_rejoin and not self._is_rejoining:
            self.rebalance.leaves_on_unassign = True
            self.revoke_all(lost=False)
        self.serve()

    def rejoin(self) -> None:
        self.leave_maybe()
        self._reset()
        self.rebalance.join_state = "init"
        self.expedite()

    def _reset(self) -> None:
        self.generation = 0
        self._moves = _Reconciliation()
        self._will_rejoin = False

    def expedite(self) -> None:
        """Send the next heartbeat at once."""
        self._heartbeats.due_at = 0.0
        self.cluster.after(0, self.serve)

    # Heartbeats ------------------------------------------------------------------------------------------------------

    @property
    def tick_seconds(self) -> float:
        return min(0.5, self._heartbeats.interval_seconds or 0.5)

    def serve_join(self) -> None:
        if self._will_rejoin:
            if self.is_rebalancing:
                return
            self._will_rejoin, self._is_rejoining = False, True
            self.revoke_all(lost=True)
        if self.rebalance.join_state == "init":
            self._is_rejoining = False
        now = self.cluster.world.now
        if (
            self.subscription
            and not self._heartbeats.is_open
            and not self._is_rejoining
            and not self._will_leave
            and not (self.rebalance.poll_was_exceeded and self.host.poll_exceeded())
            and now >= self._heartbeats.due_at
        ):
            self._beat(sends_all=self._heartbeats.says_all or self.rebalance.join_state == "init")

    def _beat(self, *, sends_all: bool) -> None:
        acknowledges = self.rebalance.join_state == "steady" and self._moves.waits_for_ack
        self.rebalance.poll_was_exceeded = False
        self._heartbeats.is_open = True
        self._heartbeats.due_at = self.cluster.world.now + (self._heartbeats.interval_seconds or _RETRY_SECONDS)
        owned = self._moves.target if acknowledges else self._moves.current if sends_all else None
        sends_topics = sends_all or (self._heartbeats.says_topics and not self.is_rebalancing)
        if sends_topics:
            self._heartbeats.says_topics = False
        request = Heartbeat(
            self.member_id,
            max(self.generation, 0),
            self.settings.instance_id,
            self.settings.poll_seconds if sends_all else None,
            tuple(sorted(self.subscription)) if sends_topics else None,
            owned,
        )
        group = self.settings.group
        if not self.coordinator.send(
            lambda broker: self.coordinator.groups.consumer_heartbeat(broker, group, request),
            lambda response: self._beaten(response, acknowledges=acknowledges, sent_topics=sends_topics),
        ):
            self._heartbeats.is_open = False

    def _beaten(self, response: HeartbeatResponse | KafkaError, *, acknowledges: bool, sent_topics: bool) -> None:
        self._heartbeats.is_open = False
        if isinstance(response, KafkaError):
            self._heartbeats.says_topics |= sent_topics
            self._failed(response.code())
            return
        self.generation = response.epoch
        if self._will_leave:
            return
        self._heartbeats.says_all = False
        self._heartbeats.interval_seconds = response.interval_seconds
        self._heartbeats.due_at = min(
            self._heartbeats.due_at, self.cluster.world.now + self._heartbeats.interval_seconds
        )
        if response.assignment is not None:
            is_new = response.assignment != self._moves.known
            self._moves.next_target = response.assignment if is_new else None
        if self.rebalance.join_state == "steady" and self._moves.waits_for_ack and self._moves.target is not None:
            if acknowledges:
                self._moves.current, self._moves.target = self._moves.target, None
                self._moves.waits_for_ack = False
            elif self.subscription:
                self.expedite()
        if self._moves.next_target is not None and self.subscription:
            topics = {topic for topic, _ in self._moves.next_target}
            if all(topic in self.cluster.topics for topic in topics):
                self._take_next()
            else:
                self.cluster.refresh(sorted(topics), lambda _error: self._take_next())
        if self._heartbeats.says_topics and not self.is_rebalancing:
            self.expedite()

    def _take_next(self) -> None:
        """Begin to take over the next target, unless another one is not acknowledged yet."""
        target = self._moves.next_target
        if target is None or self._moves.waits_for_ack or self.rebalance.join_state not in ("init", "steady"):
            return
        if target == self._moves.known:
            self._moves.next_target = None
            return
        self._moves.waits_for_ack = True
        self._moves.target, self._moves.next_target = target, None
        self.new_assignment(target)

    def _failed(self, error: int) -> None:
        if error in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_MEMBER_EPOCH):
            self._will_rejoin = True
            self.cluster.after(0, self.serve)
        elif error in _FATAL:
            text = f"ConsumerGroupHeartbeat fatal error: {KafkaError(error).str()}"
            self.fatal = KafkaError(error, text, fatal=True)
            self.host.problem(KafkaError(KafkaError._FATAL, text))
            self.revoke_all_maybe(lost=True)
        else:
            self._heartbeats.says_all = True
            self._heartbeats.due_at = self.cluster.world.now + _RETRY_SECONDS

    # What happens to it ----------------------------------------------------------------------------------------------

    def commit_refused(self, error: int) -> None:
        if error in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.STALE_MEMBER_EPOCH):
            self.expedite()

    def exceeded(self) -> None:
        self._will_rejoin = True
        self.rebalance.leaves_on_unassign = True
        self.expedite()

    def leave(self) -> None:
        if self.rebalance.is_leaving:
            return
        self.rebalance.is_leaving = True
        epoch = LEAVE if self.settings.instance_id is None else LEAVE_FOR_A_MOMENT
        request = Heartbeat(self.member_id, epoch, self.settings.instance_id)
        group = self.settings.group
        if not self.coordinator.send(
            lambda broker: self.coordinator.groups.consumer_heartbeat(broker, group, request), self.left, 5.0
        ):
            self.left()

    def left(self, response: Any = None) -> None:
        self._reset()
        super().left(response)

    def assignment_done(self) -> None:
        if self.rebalance.join_state == "wait-unassign":
            self.unassign_done()
        elif self.rebalance.join_state == "wait-incr-unassign":
            self._incremental_unassign_done()
        elif self.rebalance.join_state in ("init", "steady"):
            if self.leave_maybe() or self.try_terminate():
                return
            if self.rebalance.join_state == "init":
                if self.subscription:
                    self.expedite()
            elif self.rebalance.rejoins:
                self.rebalance.rejoins = False
                self.rejoin()
            elif self._moves.waits_for_ack:
                self.expedite()

    def _incremental_unassign_done(self) -> None:
        if self.rebalance.is_terminating:
            self.unassign()
            self.leave_maybe()
            self.rebalance.join_state = "init"
        elif self.rebalance.added_next is not None:
            added, self.rebalance.added_next = self.rebalance.added_next, None
            self.hand_over("assign", added, rejoin=False)
        elif self.rebalance.rejoins:
            self.rebalance.rejoins = False
            self.rejoin()
        else:
            self.rebalance.join_state = "steady"
            self.rebalance.checks_poll = bool(self.subscription)
            if self._moves.waits_for_ack:
                self.expedite()
