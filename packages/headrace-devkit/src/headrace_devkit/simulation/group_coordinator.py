"""The coordinators of all groups: requests of members, committed offsets, and what ends by time.

The state of a group is stored in Kafka, so another broker continues it when the coordinator moves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError

from headrace_devkit.simulation.brokers import OFFSETS_TOPIC, Brokers, Later, java_hash
from headrace_devkit.simulation.classic_group import ClassicGroup, JoinRequest
from headrace_devkit.simulation.consumer_group import ConsumerGroup, Heartbeat
from headrace_devkit.simulation.offsets import CommittedOffset, OffsetsOfGroups, Partition

Group = ClassicGroup | ConsumerGroup


class GroupCoordinators:
    """What the brokers do for groups. Each call runs on the broker that a client has taken for the coordinator."""

    def __init__(self, brokers: Brokers) -> None:
        self.brokers = brokers
        self.offsets = OffsetsOfGroups()
        self.groups: dict[str, Group] = {}
        self._world = brokers.world
        self._timers: dict[str, Any] = {}
        self._ids = 0
        brokers.on_moved.append(self._moved)

    # Requests --------------------------------------------------------------------------------------------------------

    def join(self, broker: int, group: str, request: JoinRequest) -> Any:
        return self._later(broker, group, lambda found, respond: found.join(request, respond, self._world.now))

    def sync(self, broker: int, group: str, member: tuple[str, int, str | None], assignments: Mapping[str, Any]) -> Any:
        member_id, generation, instance_id = member
        return self._later(
            broker,
            group,
            lambda found, respond: found.sync(
                member_id, generation, assignments, respond, self._world.now, instance_id
            ),
        )

    def heartbeat(self, broker: int, group: str, member: tuple[str, int, str | None]) -> Any:
        """Return None or the error of a classic member's heartbeat."""
        member_id, generation, instance_id = member
        return self._call(
            broker, group, lambda: self._classic(group).heartbeat(member_id, generation, self._world.now, instance_id)
        )

    def leave(self, broker: int, group: str, member_id: str) -> Any:
        return self._call(broker, group, lambda: self._classic(group).leave(member_id, self._world.now))

    def consumer_heartbeat(self, broker: int, group: str, request: Heartbeat) -> Any:
        """Return the response to a heartbeat of the consumer protocol, or an error."""
        if refusal := self._refusal(broker, group):
            return refusal
        found = self.groups.get(group)
        if not isinstance(found, ConsumerGroup):
            if found is not None and found.members:
                return KafkaError(KafkaError.GROUP_ID_NOT_FOUND)
            settings = self.brokers.configs
            found = self.groups[group] = ConsumerGroup(
                self._partitions_of,
                session_seconds=settings.get("group.consumer.session.timeout.ms", 45_000) / 1000,
                interval_seconds=settings.get("group.consumer.heartbeat.interval.ms", 5000) / 1000,
            )
        response = found.heartbeat(request, self._world.now)
        self._schedule(group)
        return KafkaError(response.error) if response.error else response

    def commit(
        self, broker: int, group: str, member: tuple[str, int, str | None], offsets: Mapping[Partition, CommittedOffset]
    ) -> Any:
        """Commit offsets; return an error by partition, 0 for none."""
        if refusal := self._refusal(broker, group):
            return refusal
        error = self.check_commit(group, *member, offsets)
        self._schedule(group)
        errors = {p: error or self._refusal_of(p, at) for p, at in offsets.items()}
        self.offsets.commit(group, {p: at for p, at in offsets.items() if not errors[p]})
        for (topic, partition), at in offsets.items():
            self._world.note("commit", group, topic, partition, at.offset, member[0], errors[topic, partition])
        return errors

    def _refusal_of(self, partition: Partition, at: CommittedOffset) -> int:
        if self.brokers.log(*partition) is None:
            return int(KafkaError.UNKNOWN_TOPIC_OR_PART)
        return int(KafkaError.OFFSET_METADATA_TOO_LARGE) if at.is_too_large else 0

    def check_commit(
        self, group: str, member_id: str, generation: int, instance_id: str | None, partitions: Iterable[Partition] = ()
    ) -> int:
        """Return why a commit of these partitions is refused, or 0."""
        found = self.groups.get(group)
        if isinstance(found, ConsumerGroup):
            return found.check_commit(member_id, generation, partitions)
        if found is None:
            return 0 if generation < 0 else int(KafkaError.ILLEGAL_GENERATION)
        return found.check_commit(member_id, generation, self._world.now, instance_id)

    def check_transaction(
        self, group: str, member_id: str, generation: int, instance_id: str | None, partitions: Iterable[Partition]
    ) -> int:
        """Return why the offsets of a transaction are refused, or 0: without a member, anyone may commit them.

        Between two generations a transaction may commit, and another commit may not. The client's request knows no
        epochs, so a stale one is another generation.
        Source: Apache Kafka, `ClassicGroup.validateOffsetCommit`, `validateTransactionalOffsetCommit`.
        """
        if generation < 0 and not member_id and instance_id is None:
            return 0
        error = self.check_commit(group, member_id, generation, instance_id, partitions)
        if error == KafkaError.STALE_MEMBER_EPOCH:
            return int(KafkaError.ILLEGAL_GENERATION)
        return 0 if error == KafkaError.REBALANCE_IN_PROGRESS else error

    def fetch(self, broker: int, group: str, partitions: Sequence[Partition], *, stable: bool) -> Any:
        """Return the committed offset by partition; the error if one of them waits for a transaction."""
        if refusal := self._refusal(broker, group):
            return refusal
        if stable and any(self.offsets.is_pending(group, partition) for partition in partitions):
            return KafkaError(KafkaError.UNSTABLE_OFFSET_COMMIT)
        committed = self.offsets.committed(group)
        return {partition: committed.get(partition) for partition in partitions}

    def find(self, group: str) -> int | KafkaError:
        """Return the coordinator of a group, as any broker knows it."""
        found = self.brokers.coordinator_of(group)
        return KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE) if found is None else found

    # Groups ----------------------------------------------------------------------------------------------------------

    def _classic(self, group: str) -> ClassicGroup:
        found = self.groups.get(group)
        if isinstance(found, ClassicGroup):
            return found
        delay = self.brokers.configs.get("group.initial.rebalance.delay.ms", 3000) / 1000
        made = self.groups[group] = ClassicGroup(self._new_id, delay)
        return made

    def _new_id(self, name: str) -> str:
        self._ids += 1
        return f"{name}-{self._ids:08d}"

    def _partitions_of(self, topic: str) -> int:
        found = self.brokers.topics.get(topic)
        return len(found.partitions) if found else 0

    def _refusal(self, broker: int, group: str) -> KafkaError | None:
        if self.brokers.coordinator_of(group) != broker:
            return KafkaError(KafkaError.NOT_COORDINATOR)
        return None

    def _call(self, broker: int, group: str, call: Callable[[], int]) -> KafkaError | None:
        if refusal := self._refusal(broker, group):
            return refusal
        error = call()
        self._schedule(group)
        return KafkaError(error) if error else None

    def _later(self, broker: int, group: str, call: Callable[[ClassicGroup, Callable[[Any], object]], None]) -> Any:
        if refusal := self._refusal(broker, group):
            return refusal
        if isinstance(found := self.groups.get(group), ConsumerGroup) and found.members:
            return KafkaError(KafkaError.INCONSISTENT_GROUP_PROTOCOL)
        later = Later()
        call(self._classic(group), later.respond)
        self._schedule(group)
        return later

    # Time ------------------------------------------------------------------------------------------------------------

    def _schedule(self, group: str) -> None:
        found = self.groups.get(group)
        due = found.next_deadline if found else None
        timer = self._timers.get(group)
        if timer is not None:
            if due is not None and timer.call is not None and timer.at <= due and timer.machine.alive:
                return  # it looks again then: most deadlines only move further away
            timer.cancel()
        broker = self.brokers.coordinator_of(group)
        self._timers.pop(group, None)
        if due is not None and broker is not None:
            call = lambda: self._expire(group)  # noqa: E731
            self._timers[group] = self._world.call_at(due, call, self.brokers.machine(broker))

    def _expire(self, group: str) -> None:
        self._timers.pop(group, None)
        if found := self.groups.get(group):
            found.expire(self._world.now)
            self._schedule(group)

    def _moved(self, topic: str, partition: int) -> None:
        if topic != OFFSETS_TOPIC:
            return
        count = len(self.brokers.topics[OFFSETS_TOPIC].partitions)
        for name, group in self.groups.items():
            if java_hash(name) % count == partition:
                group.moved(self._world.now)
                self._schedule(name)
