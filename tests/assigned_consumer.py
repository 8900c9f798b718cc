"""A client of the simulated Kafka whose test says which partitions it has, and what else happens in its polls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import confluent_kafka
import greenlet
from confluent_kafka import KafkaError

from headrace.records import TopicPartition
from headrace_devkit.simulation.consumer_client import SimulatedConsumer
from headrace_devkit.simulation.group_member import GroupMembership, Protocol
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.world import Machine

T = TypeVar("T")
_LIMIT_SECONDS = 600.0


class AssignedMember(GroupMembership):
    """A member that joins no group. So it commits as an administrator does, and no generation is checked."""

    has_joined = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.member_id = "member-1"

    @property
    def protocol(self) -> Protocol:
        return "cooperative" if "cooperative-sticky" in self.settings.assignors else "eager"

    @property
    def identity(self) -> tuple[str, int, str | None]:
        return "", -1, None

    def subscribe(self, topics: list[str]) -> None:
        self.subscription = topics

    def unsubscribe(self) -> None:
        self.subscription = []
        if self.rebalance.owned:
            self.revoke_all_maybe(lost=False)

    def assignment_done(self) -> None:
        if self.rebalance.join_state in ("wait-unassign", "wait-incr-unassign"):
            self.rebalance.join_state = "steady"
        self.try_terminate()

    def serve_join(self) -> None:
        """Nothing to join."""

    def leave(self) -> None:
        self.left()

    def exceeded(self) -> None:
        """Nothing to leave."""

    def commit_refused(self, error: int) -> None:
        """Nothing to join again."""


class AssignedConsumer(SimulatedConsumer):
    """Reads the logs of a cluster, and commits."""

    def __init__(self, kafka: SimulatedKafka, clients: list[AssignedConsumer], config: Mapping[str, Any]) -> None:
        """Open it; `clients` has those that are open, the newest last. A fetch waits for 0.1 s only."""
        super().__init__(kafka.brokers, kafka.groups, {**config, "fetch.wait.max.ms": 100}, AssignedMember)
        self.cluster.refresh(None, lambda _error: None)
        self.generation = 1
        """Of the group; -1 when Kafka does not know the member any more."""
        self.commits: list[tuple[TopicPartition, int]] = []
        self.async_commits: Literal["acknowledged", "lost", "unanswered"] = "acknowledged"
        """How they end."""
        self._clients = clients
        self._due = 0
        clients.append(self)

    def move(self, event: Literal["assign", "revoke", "lost"], *partitions: TopicPartition) -> None:
        """Let partitions be assigned, revoked or lost in the next poll."""

        def hand_over() -> None:
            self.member.rebalance.is_lost |= event == "lost"
            self.member.hand_over("assign" if event == "assign" else "revoke", partitions, rejoin=False)

        self.do(hand_over)

    def do(self, work: Callable[[], object]) -> None:
        """Do something in the next poll."""

        def run() -> None:
            self._due -= 1
            work()

        self._due += 1
        self._queue.report(run)

    @property
    def is_moving(self) -> bool:
        """Whether something that the test has said waits for the next poll."""
        return self._due > 0 or self.member.rebalance.waits_for_call

    @property
    def positions(self) -> dict[TopicPartition, int | None]:
        """What it fetches next, of each partition that it has."""
        return {TopicPartition(*one): self.fetcher.of(*one).position for one in self._assignment.partitions}

    @property
    def paused(self) -> set[TopicPartition]:
        return {partition for partition in self.positions if self.fetcher.of(*partition).is_paused}

    def commit(self, message: Any = None, offsets: Any = None, asynchronous: bool = True) -> Any:
        for item in offsets:
            assert where(item) in self.positions, f"a commit of {where(item)}, which is not assigned"
            self.commits.append((where(item), item.offset))
        if not asynchronous or self.async_commits == "acknowledged":
            return super().commit(message, offsets, asynchronous)
        if self.async_commits == "lost":
            self.do(lambda: self.config["on_commit"](KafkaError(KafkaError.NOT_COORDINATOR), offsets))
        return None

    def consumer_group_metadata(self) -> bytes:
        """Return who this member is to a transaction: here it has a generation."""
        found = super().consumer_group_metadata()
        return found[:7] + self.generation.to_bytes(4, sys.byteorder, signed=True) + found[11:]

    def close(self) -> None:
        super().close()
        self._clients.remove(self)


def on_thread(machine: Machine, call: Callable[[], T]) -> T:
    """Return the result of a call on a thread of a machine, and let its time go by until then."""
    if greenlet.getcurrent() is not machine.world.hub:  # on a thread already
        return call()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as cause:  # noqa: BLE001 boundary of the thread: the caller gets it
            future.set_exception(cause)

    machine.start_thread(run, "test")
    assert machine.world.run_until(future.done, _LIMIT_SECONDS), "a thread waits for ever"
    return future.result()


def refuse(client: AssignedConsumer, refused: TopicPartition, code: int) -> None:
    """Have a client's requests of committed offsets fail for one partition."""
    request = client.committed

    def committed(partitions: Any, timeout: float = -1) -> list[Any]:
        found = request(partitions, timeout)
        for item in found:
            if where(item) == refused:
                item.error = KafkaError(code)
        return found

    client.committed = committed  # type: ignore[method-assign]


def where(item: Any) -> TopicPartition:
    """Return the partition of the client's object."""
    return TopicPartition(item.topic, item.partition)


def message(partition: TopicPartition, offset: int, error: int | None = None) -> Any:
    """Return what the client returns for a record, or an error about a partition."""
    place: dict[str, Any] = {"topic": partition.topic, "partition": partition.partition, "offset": offset}
    if error is not None:
        return confluent_kafka.Message(**place, error=KafkaError(error))
    return confluent_kafka.Message(**place, key=b"k", value=b"v", timestamp=(1, 1000))
