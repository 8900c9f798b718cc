"""Brokers: what a request meets on its way."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError

from headrace_devkit.simulation.brokers import Brokers, Later
from headrace_devkit.simulation.world import World


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
