"""The model of Kafka keeps the contract of a real cluster: its clients on virtual time, and its front at once."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.kafka.reader import read_records
from headrace.records import TopicPartition
from headrace_devkit.simulation.consumer_client import SimulatedConsumer
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.world import World
from headrace_devkit.testing.memory_cluster import MemoryCluster
from tests.kafka_contract import PROMISES, PROMISES_OF_GROUPS, Clients


def clients_of(cluster: MemoryCluster, reader: Any) -> Clients:
    async def cut(partition: TopicPartition, before: int) -> None:
        cluster.log(*partition).delete_before(before)

    return Clients("t", cluster, cluster, cluster.producer, cluster.producer, reader, cut)


@pytest.mark.parametrize("check", PROMISES, ids=lambda check: check.__name__)
async def test_the_cluster_in_memory_keeps(check: Any) -> None:
    cluster = MemoryCluster({"t": 2})
    await check(clients_of(cluster, cluster.read_records))


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("check", [*PROMISES, *PROMISES_OF_GROUPS], ids=lambda check: check.__name__)
def test_the_model_keeps(check: Any, protocol: str) -> None:
    world = World(1)
    kafka = SimulatedKafka(world)
    kafka.brokers.configs["group.initial.rebalance.delay.ms"] = 0
    cluster = MemoryCluster({"t": 2}, brokers=kafka.brokers, offsets=kafka.groups.offsets)
    ended: list[Any] = []

    def make(config: dict[str, Any]) -> SimulatedConsumer:
        without = {name: value for name, value in config.items() if name != "partition.assignment.strategy"}
        chosen = {**(without if protocol == "consumer" else config), "group.protocol": protocol}
        return SimulatedConsumer(kafka.brokers, kafka.groups, chosen)

    kafka.clients.consumer = make
    with kafka.installed():
        kafka.machine("m").loop.start(check(clients_of(cluster, read_records)), ended.append)
        assert world.run_until(lambda: ended, 120)
    ended[0].result()
    assert not world.problems
