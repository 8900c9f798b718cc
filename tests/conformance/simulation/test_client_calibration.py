"""The models of producer, transactions and administration against the real ones: each script notes the same on both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import confluent_kafka
import pytest

from headrace_devkit.devcluster import Cluster
from headrace_devkit.simulation.calibration.client_scripts import CLIENT_SCRIPTS, DELAYING
from headrace_devkit.simulation.calibration.client_stages import ModelClients, RealClients
from headrace_devkit.testing.proxy import FaultProxy

LIMIT = pytest.mark.timeout(150, method="thread")
"""A call that never returns waits in C, so no signal ends it: this ends its worker, and pytest names the script."""
pytestmark = [pytest.mark.long, LIMIT]
SEEDS = 20
"""Runs of the model, whose timing differs: a trace of the real ones is one of theirs."""


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A broker for scripts that stop it, or reach it through a proxy; without TLS in any case."""
    cluster = Cluster(tmp_path_factory.mktemp("calibration"), 1, proxied=True)
    cluster.start()
    # The first request for a group creates the topic of offsets. Until a partition of it is loaded, requests for its
    # groups get NOT_COORDINATOR, so ask for groups of each.
    for number in range(16):
        settings = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": f"first-{number}"}
        client = confluent_kafka.Consumer(settings)
        client.committed([confluent_kafka.TopicPartition("any", 0)], timeout=30)
        client.close()
    yield cluster
    cluster.remove()


@pytest.mark.parametrize("name", CLIENT_SCRIPTS)
def test_the_clients_of_a_run_do_what_the_library_does(name: str, own_broker: Cluster) -> None:
    script = CLIENT_SCRIPTS[name]
    with contextlib.ExitStack() as stack:
        proxy = None
        if name in DELAYING:
            proxy = FaultProxy(own_broker.routes)
            proxy.start()
            stack.callback(proxy.stop)
        found = RealClients(own_broker, proxy).run(script)
    modelled = [ModelClients(seed).run(script) for seed in range(1, SEEDS + 1)]
    assert found in modelled
