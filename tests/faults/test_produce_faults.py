"""Brokers and connections break while 48 clients produce: what each was told of each record is true."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace_devkit.testing import Cluster, Fault, StartHeadrace
from headrace_devkit.testing.proxy import FaultProxy
from tests.faults.ledger import Ledger, Poster

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]

CLIENTS, RECORDS, PARTITIONS = 48, 5, 3


class ProduceScenario(Ledger):
    """A topic, a Headrace, many clients, and the fault that hits them."""

    def __init__(
        self, cluster: Any, headrace: Any, folder: Path, delivery_seconds: float, kafka: dict[str, Any] | None = None
    ) -> None:
        super().__init__(cluster, folder)
        self.topic, self.delivery_seconds = self.new_topic(PARTITIONS), delivery_seconds
        producer = {"properties": {"delivery.timeout.ms": 1000 * delivery_seconds}}
        self.process = headrace({"kafka": kafka or self.config["kafka"], "producer": producer})
        self.clients = Poster(self.process.url, self.topic, RECORDS, clients=CLIENTS)

    @contextmanager
    def checked_fault(self) -> Iterator[None]:
        """Produce before, during and after a fault, and check what the clients were told.

        The fault may make outcomes unknown, up to the delivery timeout after its end.
        """
        with self.clients:
            self.clients.wait_for_more(500)
            begin = time.monotonic()
            yield
            end = time.monotonic()
            self.clients.wait_for_more(500)
        # A client waits for each request, so it has one in flight, and in a fault one more per delivery timeout.
        requests = CLIENTS * (1 + int((end - begin) / self.delivery_seconds + 1))
        fault = Fault(begin, end + self.delivery_seconds, requests * RECORDS)
        self.check_acknowledged(self.topic, self.clients, [fault])
        assert self.process.terminate() == 0


@pytest.fixture
def produce(kafka_three: Cluster, headrace: StartHeadrace, tmp_path: Path) -> Callable[..., ProduceScenario]:
    """Make a topic and a Headrace with this delivery timeout."""
    return functools.partial(ProduceScenario, kafka_three, headrace, tmp_path)


def test_the_leader_is_killed(produce: Callable[..., ProduceScenario]) -> None:
    """Another one takes over within the delivery timeout; nothing is lost, moved, doubled or denied."""
    scenario = produce(delivery_seconds=15)
    with scenario.checked_fault(), scenario.killed(scenario.leader_of(scenario.topic)):
        scenario.clients.wait_for_more(1000)


def test_all_brokers_are_paused_for_longer_than_the_delivery_timeout(produce: Callable[..., ProduceScenario]) -> None:
    """What was in flight is unknown, and some of it is written later; nothing of that was called a fail."""
    scenario = produce(delivery_seconds=6)
    with scenario.checked_fault(), scenario.paused(1, 2, 3):
        time.sleep(8)  # how long the fault lasts
    assert scenario.clients.with_outcome("unknown")


@pytest.mark.long
def test_connections_to_the_brokers_are_cut(produce: Callable[..., ProduceScenario], kafka_network: FaultProxy) -> None:
    """Requests and responses on their way are lost; what was sent again is there once, where its response says."""
    scenario = produce(delivery_seconds=15, kafka={"bootstrap_servers": kafka_network.bootstrap_servers})
    cut = 0
    with scenario.checked_fault():
        for _ in range(10):
            cut += kafka_network.cut()
            scenario.clients.wait_for_more(200)
    assert cut >= 10
