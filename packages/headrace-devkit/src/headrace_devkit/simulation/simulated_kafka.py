"""One simulated Kafka: brokers, groups, transactions, and the clients that processes get instead of the real ones."""

import contextlib
import functools
from collections.abc import Iterator

from headrace_devkit.simulation.administration_client import AdministrationClient
from headrace_devkit.simulation.broker_transactions import BrokerTransactions
from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.consumer_client import SimulatedConsumer
from headrace_devkit.simulation.group_coordinator import GroupCoordinators
from headrace_devkit.simulation.points import counted_in
from headrace_devkit.simulation.seams import Clients, installed
from headrace_devkit.simulation.simulated_producer import SimulatedProducer
from headrace_devkit.simulation.world import Machine, World


class SimulatedKafka:
    """A cluster, and the network of its clients."""

    def __init__(self, world: World, brokers: int = 1) -> None:
        self.brokers = Brokers(world, brokers)
        self.groups = GroupCoordinators(self.brokers)
        self.transactions = BrokerTransactions(self.brokers, self.groups.offsets, self.groups.check_transaction)
        self.network = world.network
        self.clients = Clients(
            functools.partial(SimulatedConsumer, self.brokers, self.groups),
            functools.partial(SimulatedProducer, self.brokers, self.transactions),
            functools.partial(AdministrationClient, self.brokers, self.groups),
        )
        self._world = world

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let processes use this cluster; count each failpoint that they reach, and the rebalances of all groups."""

        def reached(point: str) -> None:
            self._world.counts[f"reach {point}"] += 1

        with installed(self.network, self.clients, reached), counted_in(self._world.counts):
            yield
        for group in self.groups.groups.values():
            self._world.counts["rebalance"] += getattr(group, "generation", 0) or getattr(group, "epoch", 0)

    def machine(self, name: str) -> Machine:
        """Return a new machine that is part of the network."""
        machine = self._world.machine(name)
        self.network.join(machine)
        return machine

    def restart_broker(self, broker: int, seconds: float) -> None:
        """Kill a broker that is up, and start it again after some time."""
        if self.brokers.is_up(broker):
            self._world.note("broker", broker)
            self.brokers.kill(broker)
            self._world.call_later(seconds, lambda: self.brokers.start(broker))
