"""Brokers and logs: what a request meets on its way, and what a reader may see."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError

from headrace_devkit.simulation.brokers import Brokers, Later
from headrace_devkit.simulation.partition_log import PartitionLog, UnwrittenRecord
from headrace_devkit.simulation.world import World


def records(count: int) -> list[UnwrittenRecord]:
    return [UnwrittenRecord(b"k", b"v")] * count


def read(log: PartitionLog, offset: int, *, committed_only: bool = True) -> tuple[list[int], int] | None:
    found = log.fetch(offset, 100, committed_only=committed_only)
    return ([record.offset for record in found.records], found.next_offset) if found else None


def test_a_reader_stops_at_an_open_transaction_and_skips_an_aborted_one() -> None:
    log = PartitionLog("t", 0, [1])
    log.append(records(2))
    log.append(records(2), producer_id=7)
    log.append(records(1))
    assert (read(log, 0), read(log, 0, committed_only=False)) == (([0, 1], 2), ([0, 1, 2, 3, 4], 5))
    log.end_transaction(7, committed=False)
    assert read(log, 0) == ([0, 1, 4], 6)


def test_what_is_deleted_is_out_of_range_and_what_is_compacted_is_a_gap() -> None:
    log = PartitionLog("t", 0, [1])
    log.append(records(3))
    log.compact()
    assert read(log, 0) == ([2], 3)
    log.delete_before(2)
    assert (read(log, 1), read(log, 4), read(log, 3)) == (None, None, ([], 3))


def test_a_connection_serves_one_request_after_the_other() -> None:
    world = World(1)
    brokers = Brokers(world)
    connection, waits, heard = brokers.connect(world.machine("m"), 1), Later(), list[Any]()
    connection.send(lambda: waits, heard.append)
    connection.send(lambda: "second", heard.append)
    world.run(5)
    assert heard == []
    waits.respond("first")
    world.run(5)
    assert heard == ["first", "second"]


def test_a_cut_delays_and_a_dead_broker_fails_a_request() -> None:
    world = World(1)
    brokers, heard, machine = Brokers(world, 3), list[Any](), world.machine("m")
    brokers.create_topic("t", 1)
    machine.cut(3)
    brokers.request(machine, 2, lambda: world.now, heard.append)
    brokers.request(machine, 1, Later, heard.append)
    world.run(8)
    assert heard[0] >= 3
    brokers.kill(1)
    world.run(8)
    assert (heard[1].code(), brokers.leader_of("t", 0)) == (KafkaError._TRANSPORT, 1)
    world.run(2)
    assert brokers.leader_of("t", 0) == 2
