"""Requests of a client that a thread waits for: committed offsets, ends of logs, topics. And what they return."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException

from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.fetcher import Fetcher
from headrace_devkit.simulation.greenlet_threads import Waiter
from headrace_devkit.simulation.group_member import GroupMembership
from headrace_devkit.simulation.offsets import CommittedOffset, Partition

_RETRY_SECONDS = 0.1
_RAISED = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._UNKNOWN_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)


class BlockingRequests:
    """The requests of one client. Each `end` is a time of the world; after it the error is `_TIMED_OUT`."""

    def __init__(self, cluster: ClientCluster, fetcher: Fetcher, member: GroupMembership) -> None:
        self._cluster = cluster
        self._fetcher = fetcher
        self._member = member

    def committed(self, keys: Sequence[Partition], end: float) -> list[Any]:
        """Return the committed offsets, asking again while there is no coordinator, or a transaction is open."""
        while True:
            response = self._answer_of(lambda answered: self.fetch_committed(keys, answered), end)
            if not isinstance(response, KafkaError):
                break
            if response.code() == KafkaError.GROUP_AUTHORIZATION_FAILED or self._cluster.world.now >= end:
                raise KafkaException(response)
            self._pause(end)
        return [
            PartitionResult(*key, at.offset, at.metadata) if (at := response[key]) else PartitionResult(*key)
            for key in keys
        ]

    def fetch_committed(self, keys: Sequence[Partition], answered: Callable[[Any], object]) -> None:
        """Ask the coordinator once."""
        group, stable = self._member.settings.group, self._fetcher.committed_only
        link = self._member.coordinator
        groups = link.groups
        if not link.send(lambda broker: groups.fetch(broker, group, keys, stable=stable), answered):
            link.find()
            self._cluster.after(_RETRY_SECONDS, lambda: answered(KafkaError(KafkaError._WAIT_COORD)))

    def watermarks(self, key: Partition, end: float) -> tuple[int, int]:
        """Return the beginning and the end of a log."""
        self._know([key[0]], end)
        found = [self._list_offset(key, offset, end) for offset in (OFFSET_BEGINNING, OFFSET_END)]
        for offset in found:
            if isinstance(offset, KafkaError):
                raise KafkaException(offset)
        return found[0], found[1]

    def offsets_for_times(self, times: Mapping[Partition, int], end: float) -> list[Any]:
        """Return the offset at each time."""
        self._know(dict.fromkeys(topic for topic, _ in times), end)
        found = []
        for key, at in times.items():
            offset = self._list_offset(key, at, end)
            if not isinstance(offset, KafkaError):
                found.append(PartitionResult(*key, offset))
            elif offset.code() in _RAISED:
                raise KafkaException(offset)
            else:
                found.append(PartitionResult(*key, OFFSET_INVALID, "", offset))
        return found

    def list_topics(self, topic: str | None, end: float) -> Any:
        """Return the metadata of the cluster, or of one topic."""
        brokers = self._cluster.brokers

        def request(answered: Callable[[Any], object]) -> None:
            self._cluster.send_to_any(lambda broker: describe_cluster(brokers, broker, topic), answered)

        while True:
            response = self._answer_of(request, end)
            if not isinstance(response, KafkaError):
                return response
            if self._cluster.world.now >= end:
                raise KafkaException(KafkaError(KafkaError._TRANSPORT, "Failed to get metadata"))
            self._pause(end)

    def _list_offset(self, key: Partition, offset: int, end: float) -> Any:
        if not 0 <= key[1] < self._cluster.count(key[0]):
            return KafkaError(KafkaError._UNKNOWN_PARTITION)
        return self._answer_of(lambda answered: self._fetcher.list_offset(key, offset, answered), end)

    def _know(self, topics: Iterable[str], end: float) -> None:
        missing = [topic for topic in topics if topic not in self._cluster.topics]
        if missing:
            error = self._answer_of(lambda answered: self._cluster.refresh(missing, answered), end)
            if isinstance(error, KafkaError):
                raise KafkaException(error)

    def _answer_of(self, request: Callable[[Callable[[Any], object]], object], end: float) -> Any:
        waiter, responses = Waiter(), list[Any]()

        def answered(response: Any) -> None:
            responses.append(response)
            waiter.wake()

        request(answered)
        if not responses:
            waiter.wait(max(0.0, end - self._cluster.world.now))
        return responses[0] if responses else KafkaError(KafkaError._TIMED_OUT)

    def _pause(self, end: float) -> None:
        Waiter().wait(max(0.0, min(_RETRY_SECONDS, end - self._cluster.world.now)))


class PartitionResult(SimpleNamespace):
    """A partition with an offset, and an error, which nothing can set in the real client's object."""

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int = OFFSET_INVALID,
        metadata: str = "",
        error: KafkaError | None = None,
    ) -> None:
        super().__init__(
            topic=topic, partition=partition, offset=offset, metadata=metadata, error=error, leader_epoch=None
        )


def commit_results(
    response: Any, sent: Mapping[Partition, CommittedOffset]
) -> tuple[KafkaError | None, list[PartitionResult]]:
    """Return the error of a commit, which is that of the last partition that failed, and its partitions with errors."""
    errors: Mapping[Partition, int] = {} if isinstance(response, KafkaError) else response
    results = [
        PartitionResult(*key, at.offset, at.metadata, KafkaError(errors[key]) if errors.get(key) else None)
        for key, at in sent.items()
    ]
    if isinstance(response, KafkaError):
        return response, results
    return next((one.error for one in reversed(results) if one.error), None), results


def describe_cluster(brokers: Brokers, broker: int, topic: str | None = None) -> Any:
    """Return what a broker says of the cluster and its topics, as `ClusterMetadata` of the real client."""
    known = brokers.topics
    topics = {}
    for name in known if topic is None else [topic]:
        found = known.get(name)
        partitions = {
            log.partition: SimpleNamespace(
                id=log.partition,
                leader=-1 if log.leader is None else log.leader,
                replicas=list(log.replicas),
                isrs=[one for one in log.replicas if brokers.is_up(one)],
                error=None,
            )
            for log in (found.partitions if found else ())
        }
        error = None if found else KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        topics[name] = SimpleNamespace(topic=name, partitions=partitions, error=error)
    nodes = {one: SimpleNamespace(id=one, host=f"broker-{one}", port=9092) for one in brokers.ids if brokers.is_up(one)}
    return SimpleNamespace(
        cluster_id="simulated",
        controller_id=broker,
        brokers=nodes,
        topics=topics,
        orig_broker_id=broker,
        orig_broker_name=f"broker-{broker}:9092/{broker}",
    )
