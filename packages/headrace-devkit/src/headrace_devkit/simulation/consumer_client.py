"""The client of a consumer: the methods of `confluent_kafka.Consumer` that Headrace uses, on simulated brokers.

Errors are raised, returned and reported where the real client does. Source: confluent-kafka-python, `Consumer.c`, and
librdkafka; what they do together is compared with this by `tests/conformance/simulation`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.classic_member import ClassicMember
from headrace_devkit.simulation.client_assignment import ClientAssignment
from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.client_queue import ClientQueue, problem
from headrace_devkit.simulation.client_requests import BlockingRequests, commit_results
from headrace_devkit.simulation.client_settings import fetch_settings, group_settings
from headrace_devkit.simulation.consumer_member import ConsumerMember
from headrace_devkit.simulation.fetcher import FetchedPartition, Fetcher
from headrace_devkit.simulation.greenlet_threads import Waiter, current_machine
from headrace_devkit.simulation.group_coordinator import GroupCoordinators
from headrace_devkit.simulation.group_member import GroupMembership, MemberHost
from headrace_devkit.simulation.offsets import CommittedOffset, Partition

_FOREVER_SECONDS = 1e9
_CLOSED = "Consumer closed"


class SimulatedConsumer(MemberHost):
    """A consumer of simulated brokers, made and used by a thread of a machine."""

    def __init__(
        self,
        brokers: Brokers,
        groups: GroupCoordinators,
        config: Mapping[str, Any],
        member: type[GroupMembership] | None = None,
    ) -> None:
        """Open it; `config` has librdkafka's properties. Without a `member` they say which protocol it is of."""
        self.config = dict(config)
        if not self.config.get("group.id"):
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "Configuration property group.id is required"))
        self.world = brokers.world
        self.cluster = ClientCluster(brokers, current_machine(), self._connection_failed)
        self._queue = ClientQueue()
        self.fetcher = Fetcher(self.cluster, fetch_settings(self.config), self._deliver)
        is_new = self.config.get("group.protocol", "classic") == "consumer"
        member = member or (ConsumerMember if is_new else ClassicMember)
        self.member: GroupMembership = member(self, self.cluster, groups, group_settings(self.config))
        self._requests = BlockingRequests(self.cluster, self.fetcher, self.member)
        self._assignment = ClientAssignment(self.fetcher, self.member, self._requests)
        # The application
        self._callbacks: dict[str, Callable[[Any, list[Any]], object]] = {}
        self._has_called = False
        """Whether the callback of a rebalance has called assign or unassign."""
        self._polled_at: float | None = self.world.now
        """When it has polled last; None while it does."""
        self._is_closed = False
        self.member.serve()  # the client looks for its coordinator, even if it never joins

    # Subscription and assignment -------------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: Sequence[str],
        on_assign: Callable[[Any, list[Any]], object] | None = None,
        on_revoke: Callable[[Any, list[Any]], object] | None = None,
        on_lost: Callable[[Any, list[Any]], object] | None = None,
    ) -> None:
        self._check_open()
        named = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        self._callbacks = {name: call for name, call in named.items() if call}
        if self.member.fatal is not None:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        self._polled_at = self.world.now
        self.member.subscribe(list(topics))

    def unsubscribe(self) -> None:
        self._check_open()
        self.member.unsubscribe()

    def assignment(self) -> list[Any]:
        self._check_open()
        return [TopicPartition(*partition, offset) for partition, offset in sorted(self._assignment.partitions.items())]

    def assign(self, partitions: Sequence[Any]) -> None:
        self._check_assign(is_incremental=False)
        self._has_called = True
        if self.member.rebalance.is_terminating or self.member.fatal is not None:
            self._unassign()
            return
        self._assignment.check(partitions)
        self.clear_assignment()
        self._assignment.add(partitions)
        self.member.assigned()
        self.serve_assignment()

    def unassign(self) -> None:
        self._check_assign(is_incremental=False)
        self._has_called = True
        self._unassign()

    def incremental_assign(self, partitions: Sequence[Any]) -> None:
        self._check_assign(is_incremental=True)
        self._has_called = True
        if self.member.rebalance.is_terminating or self.member.fatal is not None:
            if self.member.rebalance.join_state == "wait-assign-call":
                self.member.rebalance.join_state = "wait-unassign-call"
            self._unassign()
            return
        self._assignment.check(partitions)
        for item in partitions:
            if (item.topic, item.partition) in self._assignment.partitions:
                text = f"{item.topic} [{item.partition}] is already part of the current assignment"
                raise KafkaException(KafkaError(KafkaError._CONFLICT, text))
        self._assignment.add(partitions)
        self.member.assigned()
        self.serve_assignment()

    def incremental_unassign(self, partitions: Sequence[Any]) -> None:
        self._check_assign(is_incremental=True)
        self._has_called = True
        if self.member.rebalance.is_terminating or self.member.fatal is not None:
            self._unassign()
            return
        for item in partitions:
            if (item.topic, item.partition) not in self._assignment.partitions:
                text = f"{item.topic} [{item.partition}] can't be unassigned since it is not in the current assignment"
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text))
        for item in partitions:
            self._assignment.remove((item.topic, item.partition))
        self.member.unassigned()
        self.serve_assignment()

    def _check_assign(self, *, is_incremental: bool) -> None:
        self._check_open()
        if self.member.rebalance.is_terminating or self.member.fatal is not None:
            return
        protocol = self.member.protocol
        if (protocol == "cooperative" and not is_incremental) or (protocol == "eager" and is_incremental):
            names = "incremental_assign() or incremental_unassign()" if protocol == "cooperative" else "assign()"
            text = f"Changes to the current assignment must be made using {names} when rebalance protocol type is "
            raise KafkaException(KafkaError(KafkaError._STATE, text + protocol.upper()))

    def _unassign(self) -> None:
        self.member.unassign()
        self.serve_assignment()

    # The host of its member ------------------------------------------------------------------------------------------

    def clear_assignment(self) -> None:
        self._assignment.clear()

    def hold_fetching(self, *, held: bool) -> None:
        self._assignment.hold(held=held)

    def serve_assignment(self) -> None:
        if not self._is_over:
            self._assignment.serve()

    @property
    def _is_over(self) -> bool:
        return self.member.rebalance.is_terminated

    def poll_exceeded(self) -> bool:
        at = self._polled_at
        return at is not None and self.world.now - at > self.member.settings.poll_seconds

    def problem(self, error: KafkaError, topic: str = "") -> None:
        self._queue.push(problem(error, topic))

    def rebalance(self, event: Literal["assign", "revoke"], partitions: list[Partition]) -> None:
        is_lost = event == "revoke" and self.member.rebalance.is_lost
        self._queue.push(lambda: self._call_rebalance("lost" if is_lost else event, partitions))

    def _call_rebalance(self, event: str, partitions: list[Partition]) -> None:
        name = "revoke" if event == "lost" and "lost" not in self._callbacks else event
        items = [TopicPartition(*partition) for partition in partitions]
        self._has_called = False
        self.world.note(f"on_{event}", self.member.settings.group, *(f"{t}-{p}" for t, p in partitions))
        if call := self._callbacks.get(name):
            call(self, items)
        if self._has_called or self._is_over:
            return
        if self.member.protocol == "cooperative":
            (self.incremental_assign if event == "assign" else self.incremental_unassign)(items)
        elif event == "assign":
            self.assign(items)
        else:
            self.unassign()

    def closed(self) -> None:
        self._queue.wake()

    def _connection_failed(self, error: KafkaError) -> None:
        if call := self.config.get("error_cb"):
            self._queue.report(lambda: call(error))

    def _deliver(self, state: FetchedPartition, item: Any) -> None:
        self._queue.push(item, state)

    # Records ---------------------------------------------------------------------------------------------------------

    def poll(self, timeout: float = -1) -> Any:
        self._check_open()
        found = self._take(1, timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Any]:
        self._check_open()
        return self._take(num_messages, timeout)

    def _take(self, most: int, timeout: float) -> list[Any]:
        end = self._end_of(timeout)
        if timeout:
            self._polled_at = None
        found: list[Any] = []
        try:
            while len(found) < most:
                if (message := self._queue.take(self.fetcher)) is not None:
                    found.append(message)
                elif self.world.now >= end or self._is_over or not self._queue.wait(end - self.world.now):
                    break
        finally:
            self._polled_at = self.world.now
            if self.member.rebalance.poll_was_exceeded:
                self.cluster.after(0, self.member.serve)
        return found

    def pause(self, partitions: Sequence[Any]) -> None:
        self._check_open()
        for item in partitions:
            self.fetcher.hold(self.fetcher.of(item.topic, item.partition), by_application=True)

    def resume(self, partitions: Sequence[Any]) -> None:
        self._check_open()
        for item in partitions:
            self.fetcher.release(self.fetcher.of(item.topic, item.partition), by_application=True)

    def seek(self, partition: Any) -> None:
        self._check_open()
        state = self.fetcher.of(partition.topic, partition.partition)
        if not state.is_started:
            is_known = partition.topic in self.cluster.topics
            raise KafkaException(KafkaError(KafkaError._STATE if is_known else KafkaError._UNKNOWN_PARTITION))
        self.fetcher.seek(state, partition.offset)

    def position(self, partitions: Sequence[Any]) -> list[Any]:
        self._check_open()
        return [
            TopicPartition(item.topic, item.partition, self.fetcher.of(item.topic, item.partition).taken_to)
            for item in partitions
        ]

    # Requests --------------------------------------------------------------------------------------------------------

    def commit(self, message: Any = None, offsets: Sequence[Any] | None = None, asynchronous: bool = True) -> Any:
        self._check_open()
        if message is not None:
            offsets = [TopicPartition(message.topic(), message.partition(), message.offset() + 1)]
        sent = {
            (item.topic, item.partition): CommittedOffset(item.offset, item.metadata or "") for item in offsets or ()
        }
        if not any(at.offset >= 0 for at in sent.values()):
            if asynchronous:
                return None
            raise KafkaException(KafkaError(KafkaError._NO_OFFSET))
        responses: list[Any] = []

        def answered(response: Any) -> None:
            responses.append(response)
            call = self.config.get("on_commit")
            if call and asynchronous:
                error, results = commit_results(response, sent)
                self._queue.report(lambda: call(error, results))
            if waiter:
                waiter.wake()

        waiter = None if asynchronous else Waiter()
        self.member.commits.send(sent, answered)
        if waiter is None:
            return None
        while not responses:
            waiter.wait()
        error, results = commit_results(responses[0], sent)
        if error:
            raise KafkaException(error)
        return results

    def committed(self, partitions: Sequence[Any], timeout: float = -1) -> list[Any]:
        self._check_open()
        return self._requests.committed([(item.topic, item.partition) for item in partitions], self._end_of(timeout))

    def get_watermark_offsets(self, partition: Any, timeout: float = -1, cached: bool = False) -> tuple[int, int]:
        self._check_open()
        return self._requests.watermarks((partition.topic, partition.partition), self._end_of(timeout))

    def offsets_for_times(self, partitions: Sequence[Any], timeout: float = -1) -> list[Any]:
        self._check_open()
        times = {(item.topic, item.partition): item.offset for item in partitions}
        return self._requests.offsets_for_times(times, self._end_of(timeout))

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self._check_open()
        return self._requests.list_topics(topic, self._end_of(timeout))

    def _end_of(self, timeout: float) -> float:
        return self.world.now + (timeout if timeout >= 0 else _FOREVER_SECONDS)

    # The member ------------------------------------------------------------------------------------------------------

    def memberid(self) -> str | None:
        self._check_open()
        return self.member.member_id or None

    def consumer_group_metadata(self) -> bytes:
        """Return who this member is, as bytes. Source: librdkafka, `rd_kafka_consumer_group_metadata_write`."""
        self._check_open()
        member_id, generation, instance_id = self.member.identity
        number = generation.to_bytes(4, sys.byteorder, signed=True)
        names = f"{self.member.settings.group}\0{member_id}\0".encode()
        instance = b"\1" if instance_id is None else b"\0" + instance_id.encode() + b"\0"
        return b"CGMDv2:" + number + names + instance

    def set_sasl_credentials(self, username: str, password: str) -> None:
        self._check_open()

    def store_offsets(self, *_arguments: Any, **_named: Any) -> None:
        raise NotImplementedError("the simulated client does not store offsets: commit them")

    def close(self) -> None:
        """Leave the group, running the callbacks of the last revoke."""
        if self._is_closed:
            return
        self.member.terminate()
        while not self._is_over:
            if not self._queue:
                self._queue.wait(_FOREVER_SECONDS)
            while self._queue and not self._is_over:
                self._queue.take(self.fetcher)
        self._is_closed = True
        self.cluster.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(_CLOSED)
