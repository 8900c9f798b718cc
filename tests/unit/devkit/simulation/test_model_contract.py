"""The model of Kafka keeps the contract of a real cluster, as far as it concerns consumers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.kafka.reader import read_records
from headrace.records import OutgoingRecord, Produced, TopicPartition
from headrace_devkit.simulation import seams
from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.consumer_client import SimulatedConsumer
from headrace_devkit.simulation.group_coordinator import GroupCoordinators
from headrace_devkit.simulation.network import Network
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.world import World
from tests import kafka_contract
from tests.kafka_contract import Clients

PROMISES = (
    kafka_contract.what_is_read_is_what_was_written,
    kafka_contract.reading_follows_a_partition,
    kafka_contract.what_was_deleted_is_out_of_range,
    kafka_contract.a_group_continues_behind_what_it_has_committed,
    kafka_contract.a_seek_commits_and_reads_again_in_a_new_epoch,
    kafka_contract.the_end_of_a_log_is_where_latest_begins,
    kafka_contract.records_that_are_gone_are_a_gap,
)


class ModelClients:
    """What a consumer's promises need of an `Admin` and a producer."""

    config = KafkaConfig()
    reachability = SimpleNamespace(outage=None, failed=bool, answered=lambda: None, check=lambda *_: None)

    def __init__(self, brokers: Brokers, groups: GroupCoordinators) -> None:
        self._brokers = brokers
        self._groups = groups

    async def produce(self, records: Iterable[OutgoingRecord]) -> list[Produced]:
        found = []
        for one in records:
            log = self._brokers.log(one.topic, one.partition)
            row = UnwrittenRecord(one.key, one.value, list(one.headers or ()), one.timestamp_ms or 0)
            found.append(Produced(one.partition, log.append([row])))
        return found

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        return {TopicPartition(*key): at.offset for key, at in self._groups.offsets.committed(group).items()}

    async def start_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {partition: self._brokers.log(*partition).start for partition in partitions}

    async def cut(self, partition: TopicPartition, before: int) -> None:
        self._brokers.log(*partition).delete_before(before)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("check", PROMISES, ids=lambda check: check.__name__)
def test_the_model_keeps(check: Any, protocol: str) -> None:
    """A member joins by itself, so nothing is done for it."""
    world = World(1)
    brokers = Brokers(world, 1, configs={"group.initial.rebalance.delay.ms": 0})
    groups = GroupCoordinators(brokers)
    brokers.create_topic("t", 2)
    network, model, ended = Network(world), ModelClients(brokers, groups), list[Any]()
    machine = world.machine("m")
    network.join(machine)

    async def join() -> None: ...

    def make(config: dict[str, Any]) -> SimulatedConsumer:
        without = {name: value for name, value in config.items() if name != "partition.assignment.strategy"}
        return SimulatedConsumer(brokers, groups, {**(without if protocol == "consumer" else config), **extra})

    extra = {"group.protocol": protocol}
    clients = Clients("t", model, model, model, model, read_records, model.cut, join)
    with seams.installed(network, seams.Clients(consumer=functools.partial(make)), lambda _name: None):
        machine.loop.start(check(clients), ended.append)
        assert world.run_until(lambda: ended, 120)
        ended[0].result()
    assert not world.problems
