"""`confluent_kafka.admin.AdminClient` of a run: the same calls and results, as futures, with the same errors.

A request waits until its broker answers, or its time is over. Source: librdkafka, `rdkafka_admin.c`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import (
    OFFSET_INVALID,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Node,
    TopicPartition,
    TopicPartitionInfo,
)
from confluent_kafka.admin import (
    ConsumerGroupDescription,
    ConsumerGroupListing,
    DeletedRecords,
    DescribeClusterResult,
    ListConsumerGroupsResult,
    ListOffsetsResultInfo,
    MemberAssignment,
    MemberDescription,
    TopicDescription,
)

from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.client_requests import PartitionResult, describe_cluster
from headrace_devkit.simulation.consumer_group import ConsumerGroup
from headrace_devkit.simulation.greenlet_threads import Future, current_machine
from headrace_devkit.simulation.group_coordinator import Group, GroupCoordinators
from headrace_devkit.simulation.offsets import CommittedOffset
from headrace_devkit.simulation.partition_log import PartitionLog
from headrace_devkit.simulation.simulated_controller import SimulatedController, offset_at

_LIMIT_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 0.1
_STATES: Final = {
    "empty": ConsumerGroupState.EMPTY,
    "preparing": ConsumerGroupState.PREPARING_REBALANCING,
    "completing": ConsumerGroupState.COMPLETING_REBALANCING,
    "stable": ConsumerGroupState.STABLE,
}
_MOVED: Final = (KafkaError._TRANSPORT, KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE)


class AdministrationClient:
    """An administrator of the cluster, of the machine whose code makes it."""

    def __init__(self, brokers: Brokers, groups: GroupCoordinators, properties: Mapping[str, Any]) -> None:
        """Open it; `properties` are librdkafka's."""
        self._brokers = brokers
        self._groups = groups
        self._world = brokers.world
        self._topics = SimulatedController(brokers, groups.offsets)
        self._events: list[Callable[[], object]] = []
        self._has_missed_coordinator = False
        """A client whose request to a coordinator was late does not reach one again: only another client does."""
        self._error_cb = properties.get("error_cb")
        self._cluster = ClientCluster(brokers, current_machine(), self._connection_failed)

    def __len__(self) -> int:
        return 0

    def poll(self, timeout: float = 0.0) -> int:
        """Serve `error_cb`."""
        events, self._events = self._events, []
        for event in events:
            event()
        return len(events)

    def _connection_failed(self, error: KafkaError) -> None:
        if call := self._error_cb:
            self._events.append(lambda: call(error))

    # Topics ----------------------------------------------------------------------------------------------------------

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return brokers and topics.

        Raises:
            KafkaException: No broker answers in time.
        """
        describe = lambda: describe_cluster(self._brokers, self._brokers.ids[0], topic)  # noqa: E731
        return self._future(None, describe, timeout, no_broker=_NO_METADATA).result()

    def create_topics(self, new_topics: Sequence[Any], **options: Any) -> dict[str, Future]:
        return {one.topic: self._change(options, self._topics.create, one) for one in new_topics}

    def create_partitions(self, new_partitions: Sequence[Any], **options: Any) -> dict[str, Future]:
        return {one.topic: self._change(options, self._topics.add_partitions, one) for one in new_partitions}

    def delete_topics(self, topics: Sequence[str], **options: Any) -> dict[str, Future]:
        return {name: self._change(options, self._topics.delete, name) for name in topics}

    def describe_configs(self, resources: Sequence[Any], **options: Any) -> dict[Any, Future]:
        return {one: self._change(options, self._topics.configs, one) for one in resources}

    def incremental_alter_configs(self, resources: Sequence[Any], **options: Any) -> dict[Any, Future]:
        return {one: self._change(options, self._topics.alter, one) for one in resources}

    def describe_topics(self, topics: Any, **options: Any) -> dict[str, Future]:
        names = topics.topic_names
        return {name: self._future(None, functools.partial(self._describe, name), _limit(options)) for name in names}

    def _describe(self, name: str) -> TopicDescription:
        found = self._brokers.topics.get(name)
        if found is None:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        infos = [
            TopicPartitionInfo(
                log.partition,
                self._node(log.leader),
                [self._node(one) for one in log.replicas],
                [self._node(one) for one in log.replicas if self._brokers.is_up(one)],
            )
            for log in found.partitions
        ]
        return TopicDescription(name, found.id, name.startswith("__"), infos)  # type: ignore[arg-type]

    def _change(self, options: Mapping[str, Any], call: Callable[[Any, bool], Any], what: Any) -> Future:
        """Have the controller change or describe something."""
        change = functools.partial(call, what, bool(options.get("validate_only")))
        return self._future(self._controller, change, _limit(options))

    def describe_cluster(self, **options: Any) -> Future:
        def describe() -> DescribeClusterResult:
            controller = self._controller()
            nodes = [self._node(broker) for broker in self._brokers.ids if self._brokers.is_up(broker)]
            return DescribeClusterResult(self._node(controller), nodes, "simulated")

        return self._future(None, describe, _limit(options))

    def _controller(self) -> int | None:
        return next((broker for broker in self._brokers.ids if self._brokers.is_up(broker)), None)

    @staticmethod
    def _node(broker: int | None) -> Any:
        return Node(broker, f"broker-{broker}", 9092) if broker is not None else None

    # Records ---------------------------------------------------------------------------------------------------------

    def list_offsets(self, topic_partition_offsets: Mapping[Any, Any], **options: Any) -> dict[Any, Future]:
        committed_only = options.get("isolation_level") == IsolationLevel.READ_COMMITTED
        limit = _limit(options)
        return {
            partition: self._of_leader(partition, functools.partial(_listed, spec._value, committed_only), limit)
            for partition, spec in topic_partition_offsets.items()
        }

    def delete_records(self, topic_partition_offsets: Sequence[Any], **options: Any) -> dict[Any, Future]:
        limit = _limit(options)
        return {
            one: self._of_leader(one, functools.partial(_cut, one.offset), limit) for one in topic_partition_offsets
        }

    def _of_leader(self, partition: Any, call: Callable[[Any], Any], limit_seconds: float) -> Future:
        """Send a request to the leader; without one, or without the partition, librdkafka itself answers `_NOENT`."""
        future = Future()
        key = partition.topic, partition.partition

        def run() -> Any:
            log = self._brokers.log(*key)
            if log is None:
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
            return call(log)

        def known(error: KafkaError | None) -> None:
            leader = self._cluster.leader(*key)
            if error is None and leader is not None:
                self._cluster.send(leader, run, functools.partial(_settle, future), seconds=limit_seconds)
            elif error is None and key[1] >= self._cluster.count(key[0]):
                _settle(future, KafkaError(KafkaError._NOENT, "Failed to query partition leaders: No leaders found"))
            elif self._world.now >= end:
                _settle(future, KafkaError(KafkaError._TIMED_OUT))
            else:
                self._cluster.after(_RETRY_SECONDS, look)

        def look() -> None:
            self._cluster.refresh([key[0]], known)

        end = self._world.now + limit_seconds
        look()
        return future

    # Groups ----------------------------------------------------------------------------------------------------------

    def list_consumer_groups(self, **options: Any) -> Future:
        def listed() -> ListConsumerGroupsResult:
            groups = self._groups.groups
            names = sorted({*groups, *self._groups.offsets.groups()})
            return ListConsumerGroupsResult(
                [ConsumerGroupListing(name, name not in groups, _state(groups.get(name))) for name in names], []
            )

        late = ListConsumerGroupsResult([], [KafkaError(KafkaError._TIMED_OUT)])  # type: ignore[list-item]
        return self._future(None, listed, _limit(options), no_broker=late)

    def describe_consumer_groups(self, group_ids: Sequence[str], **options: Any) -> dict[str, Future]:
        limit = _limit(options)
        return {name: self._of_group(name, functools.partial(self._described, name), limit) for name in group_ids}

    def _described(self, name: str, _broker: int) -> ConsumerGroupDescription:
        group = self._groups.groups.get(name)
        coordinator = self._node(self._brokers.coordinator_of(name))
        is_known = group is not None or name in self._groups.offsets.groups()
        members = [_member(one) for one in group.members.values()] if group else []
        kind = ConsumerGroupType.CONSUMER if isinstance(group, ConsumerGroup) else ConsumerGroupType.CLASSIC
        protocol = getattr(group, "protocol", "")
        state = _state(group) if is_known else ConsumerGroupState.DEAD  # so older requests say it, as the client's
        return ConsumerGroupDescription(name, not protocol, members, protocol, state, coordinator, type=kind)

    def alter_consumer_group_offsets(self, requests: Sequence[Any], **options: Any) -> dict[str, Future]:
        limit = _limit(options)
        return {
            one.group_id: self._of_group(one.group_id, functools.partial(self._altered, one), limit) for one in requests
        }

    def _altered(self, request: Any, broker: int) -> Any:
        offsets = {
            (p.topic, p.partition): CommittedOffset(p.offset, p.metadata or "") for p in request.topic_partitions
        }
        errors = self._groups.commit(broker, request.group_id, ("", -1, None), offsets)
        if isinstance(errors, KafkaError):
            return errors
        results: list[Any] = [
            PartitionResult(*key, at.offset, error=KafkaError(errors[key]) if errors[key] else None)
            for key, at in offsets.items()
        ]
        return ConsumerGroupTopicPartitions(request.group_id, results)

    def list_consumer_group_offsets(self, requests: Sequence[Any], **options: Any) -> dict[str, Future]:
        limit, stable = _limit(options), bool(options.get("require_stable"))
        return {
            one.group_id: self._of_group(one.group_id, functools.partial(self._committed, one, stable), limit)
            for one in requests
        }

    def _committed(self, request: Any, stable: bool, _broker: int) -> ConsumerGroupTopicPartitions:
        found = self._groups.offsets.committed(request.group_id)
        requested = request.topic_partitions
        keys = list(found) if requested is None else [(one.topic, one.partition) for one in requested]
        is_pending = functools.partial(self._groups.offsets.is_pending, request.group_id)
        unstable = {key for key in keys if stable and is_pending(key)}
        results: list[Any] = [
            PartitionResult(topic, number, error=KafkaError(KafkaError.UNSTABLE_OFFSET_COMMIT))
            if (topic, number) in unstable
            else PartitionResult(
                topic, number, found[topic, number].offset if (topic, number) in found else OFFSET_INVALID
            )
            for topic, number in keys
        ]
        return ConsumerGroupTopicPartitions(request.group_id, results)

    def delete_consumer_groups(self, group_ids: Sequence[str], **options: Any) -> dict[str, Future]:
        limit = _limit(options)
        return {name: self._of_group(name, functools.partial(self._deleted, name), limit) for name in group_ids}

    def _deleted(self, name: str, _broker: int) -> None:
        group = self._groups.groups.get(name)
        if group is None and name not in self._groups.offsets.groups():
            raise KafkaException(KafkaError(KafkaError.GROUP_ID_NOT_FOUND))
        if group is not None and group.members:
            raise KafkaException(KafkaError(KafkaError.NON_EMPTY_GROUP))
        self._groups.groups.pop(name, None)
        self._groups.offsets.delete(name)

    def _of_group(self, group: str, call: Callable[[int], Any], limit_seconds: float) -> Future:
        """Send a request to a group's coordinator, and again to the next one when it has moved."""
        future = Future()
        end = self._world.now + limit_seconds

        def answered(response: Any) -> None:
            is_moved = isinstance(response, KafkaError) and response.code() in _MOVED
            if is_moved and self._world.now < end:
                self._cluster.after(_RETRY_SECONDS, find)
            elif is_moved:
                self._has_missed_coordinator = True
                _settle(future, KafkaError(KafkaError._TIMED_OUT))
            else:
                _settle(future, response)

        def found(response: Any) -> None:
            if isinstance(response, KafkaError):
                answered(response)
                return
            run = functools.partial(self._at_coordinator, group, response, call)
            self._cluster.send(response, run, answered, "coordinator", max(0.001, end - self._world.now))

        def find() -> None:
            self._cluster.send_to_any(lambda _broker: self._groups.find(group), found)

        if self._has_missed_coordinator:
            self._cluster.after(limit_seconds, lambda: _settle(future, KafkaError(KafkaError._TIMED_OUT)))
        else:
            find()
        return future

    def _at_coordinator(self, group: str, broker: int, call: Callable[[int], Any]) -> Any:
        if self._brokers.coordinator_of(group) != broker:
            return KafkaError(KafkaError.NOT_COORDINATOR)
        return call(broker)

    # Requests --------------------------------------------------------------------------------------------------------

    def _future(
        self,
        choose: Callable[[], int | None] | None,
        call: Callable[[], Any],
        limit_seconds: float,
        no_broker: Any = None,
    ) -> Future:
        """Send a request to the broker that `choose` returns, or to any; wait for one while there is none.

        `no_broker` is the result, or the error, if none comes in time.
        """
        future = Future()
        end = self._world.now + (_LIMIT_SECONDS if limit_seconds < 0 else limit_seconds)

        def send() -> None:
            broker = choose() if choose else self._brokers.any_up()
            rest = end - self._world.now
            if broker is not None and rest > 0:
                self._cluster.send(broker, call, functools.partial(_settle, future), seconds=rest)
            elif rest <= 0:
                _settle(future, no_broker or KafkaError(KafkaError._TIMED_OUT, "Failed while waiting for controller"))
            else:
                self._cluster.send_to_any(lambda _broker: None, lambda _response: None)  # reports the connections
                self._cluster.after(min(_RETRY_SECONDS, rest), send)

        send()
        return future


_NO_METADATA: Final = KafkaError(KafkaError._TRANSPORT, "Failed to get metadata: Local: Broker transport failure")


def _settle(future: Future, response: Any) -> None:
    if future.done():
        return
    if isinstance(response, KafkaError):
        future.set_exception(KafkaException(response))
    else:
        future.set_result(response)


def _limit(options: Mapping[str, Any]) -> float:
    return float(options.get("request_timeout", _LIMIT_SECONDS))


def _listed(spec: int, committed_only: bool, log: PartitionLog) -> ListOffsetsResultInfo:
    offset, timestamp = offset_at(log, spec, committed_only=committed_only)
    return ListOffsetsResultInfo(offset, timestamp, log.leader_epoch)


def _cut(offset: int, log: PartitionLog) -> DeletedRecords:
    if offset > log.end:
        raise KafkaException(KafkaError(KafkaError.OFFSET_OUT_OF_RANGE))
    log.delete_before(log.end if offset < 0 else offset)
    return DeletedRecords(log.start)


def _state(group: Group | None) -> ConsumerGroupState:
    if group is None or not group.members:
        return ConsumerGroupState.EMPTY
    if isinstance(group, ConsumerGroup):
        return ConsumerGroupState.STABLE
    return _STATES[group.state]


def _member(member: Any) -> MemberDescription:
    """Describe a member, of either protocol."""
    request = getattr(member, "request", member)
    keys: Iterable[Any] = getattr(member, "assigned", None) or getattr(member, "assignment", None) or ()
    assignment = MemberAssignment([TopicPartition(*key) for key in sorted(keys)])
    client_id = getattr(request, "client_id", "")
    return MemberDescription(member.member_id, client_id, "/10.0.0.1", assignment, request.instance_id)
