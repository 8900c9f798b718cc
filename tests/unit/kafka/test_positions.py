"""Where a group begins, and what is missing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import confluent_kafka
import pytest

from headrace.kafka.loop_proxy import ConsumerProblems
from headrace.kafka.positions import PositionResolver, ReadPolicy, StartPosition, has_committed
from headrace.records import Committed, TopicPartition
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.world import World
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster
from tests.assigned_consumer import AssignedConsumer, on_thread, refuse

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


def client(committed: Mapping[int, int], error: int = 0) -> AssignedConsumer:
    """Return the client of a group, of a topic whose logs go from 40 to 100."""
    world = World(1)
    kafka = SimulatedKafka(world)
    cluster = MemoryCluster({"t": 3, "u": 3}, brokers=kafka.brokers, offsets=kafka.groups.offsets)
    for topic, number in itertools.product("tu", range(3)):
        log = cluster.log(topic, number)
        log.start, log.end = 40, 100
    cluster.commit("g", {TopicPartition("t", number): Committed(at, "note") for number, at in committed.items()})
    made = on_thread(world.machine("m"), lambda: AssignedConsumer(kafka, [], {"group.id": "g"}))
    if error:
        for number in range(3):
            refuse(made, TopicPartition("t", number), error)
    return made


def resolver(policy: ReadPolicy, *, subscribed: Sequence[str] = ()) -> PositionResolver:
    made = PositionResolver(policy, ManualClock(), ConsumerProblems("g"))
    made.subscribed = subscribed
    return made


def ask(resolver: PositionResolver, client: AssignedConsumer, partitions: Sequence[TopicPartition]) -> Any:
    """Return where partitions start, as the thread of the client finds it."""
    return on_thread(client.cluster.machine, lambda: resolver.starts(client, partitions))


def starts(client: AssignedConsumer, partitions: list[TopicPartition], policy: ReadPolicy, **more: Any) -> Any:
    """Return where partitions start, without their epochs."""
    found = ask(resolver(policy, **more), client, partitions)
    return {partition: start._replace(epoch=0) for partition, start in found.items()}


def test_latest_is_a_number_that_is_to_be_committed_now() -> None:
    """So that a restart before the first record does not choose a later one. One request asks for all partitions, and
    what has no number in the response is not known."""
    one = client({})
    times = Mock(return_value=[confluent_kafka.TopicPartition(*P0, 100), confluent_kafka.TopicPartition(*P1, -1)])
    one.offsets_for_times = times  # type: ignore[method-assign]
    found = starts(one, [P0, P1], ReadPolicy("latest"))
    assert [item.offset for item in times.call_args.args[0]] == [confluent_kafka.OFFSET_END] * 2
    assert found == {P0: StartPosition(100, Committed(100), is_new=True)}


def test_what_was_added_begins_at_its_start() -> None:
    """A partition, and a topic that this process has read before or that a pattern adds; else "latest" is the end."""
    latest, as_one, begin = ReadPolicy("latest"), ReadPolicy("latest", as_one=True), confluent_kafka.OFFSET_BEGINNING
    assert {at.offset for at in starts(client({2: 7}), [P0, P1], latest).values()} == {begin}
    added = TopicPartition("u", 0)
    reads = resolver(latest)
    ask(reads, client({0: 50}), [P0])
    assert ask(reads, client({}), [P0])[P0].offset == begin
    assert starts(client({0: 50}), [added], as_one, subscribed=["t", "u"])[added].offset == begin
    assert starts(client({0: 50}), [added], latest, subscribed=["t", "u"])[added].offset == 100
    assert starts(client({}), [added], as_one, subscribed=["t", "u"])[added].offset == 100


def test_what_cannot_be_read_is_not_guessed() -> None:
    """An error about one partition is an error, not "nothing committed"; nor is it when another topic is looked at."""
    error = confluent_kafka.KafkaError.COORDINATOR_LOAD_IN_PROGRESS
    for policy in (ReadPolicy("earliest"), ReadPolicy("latest")):
        made = resolver(policy)
        assert (ask(made, client({}, error=error), [P0]), made.is_open(P0)) == ({}, True)
    with pytest.raises(confluent_kafka.KafkaException):
        one = client({}, error=error)
        on_thread(one.cluster.machine, lambda: has_committed(one, ["t"]))
