"""Brokers and connections break while sixteen clients produce: what each was told of each record is true."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import Fault
from tests.faults.ledger import Ledger, Poster

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]

CLIENTS, RECORDS, PARTITIONS = 16, 5, 3
PIDFD_GETFD = 438  # the same number on every Linux architecture


class Produce(Ledger):
    """A topic, a Headrace, a crowd of clients, and how to break what is below them."""

    def __init__(self, cluster: Any, headrace: Any, folder: Path, delivery_seconds: float) -> None:
        super().__init__(cluster, folder)
        self.topic, self.delivery_seconds = self.new_topic(PARTITIONS), delivery_seconds
        self.faults: list[Fault] = []
        self.process = headrace(
            {**self.config, "producer": {"properties": {"delivery.timeout.ms": 1000 * delivery_seconds}}}
        )
        self.crowd = Poster(self.process.url, self.topic, RECORDS, clients=CLIENTS)

    @contextmanager
    def fault(self) -> Iterator[None]:
        """Everything within may make outcomes unknown, up to the produce deadline after its end."""
        begin = time.monotonic()
        yield
        end = time.monotonic()
        # A client waits for each request, so it has one in flight, and in a fault one more per delivery timeout.
        requests = CLIENTS * (1 + int((end - begin) / self.delivery_seconds + 1))
        self.faults.append(Fault(begin, end + self.delivery_seconds, requests * RECORDS))

    def paused(self, seconds: float) -> None:
        """Pause every broker for a time."""
        for broker in (1, 2, 3):
            self.cluster.pause(broker)
        try:
            time.sleep(seconds)  # how long the fault lasts
        finally:
            for broker in (1, 2, 3):
                self.cluster.resume(broker)
        self.cluster.wait_in_sync()

    def end(self) -> None:
        """Check what clients were told, and end the process."""
        self.check_acknowledged(self.topic, self.crowd, self.faults)
        assert self.process.terminate() == 0


def cut_connections(pid: int, ports: list[int]) -> int:
    """Reset every connection of a process to these loopback ports, as a dying network would. Returns how many.

    A socket that is taken over from a child and connected to nowhere sends its peer a reset, whatever is on its way
    in either direction is lost, and the owner finds its connection broken. Source: pidfd_getfd(2), connect(2).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    process, cut = os.pidfd_open(pid), 0
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            taken = libc.syscall(PIDFD_GETFD, process, int(link.name), 0)
            if taken < 0 and ctypes.get_errno() == errno.EPERM:
                pytest.skip("this machine lets nobody take over a child's sockets (pidfd_getfd)")
            if taken >= 0 and not stat.S_ISSOCK(os.fstat(taken).st_mode):
                os.close(taken)
            elif taken >= 0:  # else it was closed in the meantime
                with socket.socket(fileno=taken) as connection, suppress(OSError):
                    if connection.family == socket.AF_INET and connection.getpeername()[1] in ports:
                        cut += libc.connect(taken, bytes(16), 16) == 0  # to AF_UNSPEC
    finally:
        os.close(process)
    return cut


@pytest.fixture
def produce(kafka_three: Any, headrace: Any, tmp_path: Path) -> Callable[..., Produce]:
    """Make a topic and a Headrace with so long a delivery timeout."""
    return functools.partial(Produce, kafka_three, headrace, tmp_path)


def test_the_leader_is_killed(produce: Callable[..., Produce]) -> None:
    """Another one takes over within the delivery timeout; nothing is lost, moved, doubled or denied."""
    scenario = produce(delivery_seconds=15)
    with scenario.crowd:
        scenario.crowd.wait_for_more(500)
        with scenario.fault():
            victim = scenario.leader_of(scenario.topic)
            scenario.cluster.kill(victim)
            scenario.crowd.wait_for_more(1000)
            scenario.cluster.restart(victim)
            scenario.cluster.wait_in_sync()
        scenario.crowd.wait_for_more(500)
    scenario.end()


@pytest.mark.long
def test_the_leader_is_paused(produce: Callable[..., Produce]) -> None:
    """What it had taken is sent again to the next one; when it goes on it finds itself deposed."""
    scenario = produce(delivery_seconds=12)
    with scenario.crowd:
        scenario.crowd.wait_for_more(500)
        with scenario.fault():
            victim = scenario.leader_of(scenario.topic)
            scenario.cluster.pause(victim)
            try:
                scenario.crowd.wait_for_more(1000)
            finally:
                scenario.cluster.resume(victim)
            scenario.cluster.wait_in_sync()
        scenario.crowd.wait_for_more(500)
    scenario.end()


def test_all_brokers_are_paused_for_longer_than_the_delivery_timeout(produce: Callable[..., Produce]) -> None:
    """What was in flight is unknown, and some of it is written later; nothing of that was called a fail."""
    scenario = produce(delivery_seconds=6)
    with scenario.crowd:
        scenario.crowd.wait_for_more(500)
        with scenario.fault():
            scenario.paused(seconds=8)
        scenario.crowd.wait_for_more(500)
    assert scenario.crowd.told("unknown")
    scenario.end()


@pytest.mark.long
def test_connections_to_the_brokers_are_cut(produce: Callable[..., Produce]) -> None:
    """Requests and answers on their way are lost; what was sent again is there once, at the place that was told."""
    scenario = produce(delivery_seconds=15)
    cut = 0
    with scenario.crowd:
        scenario.crowd.wait_for_more(500)
        with scenario.fault():
            for _ in range(10):
                cut += cut_connections(scenario.process.server.id.pid, scenario.cluster.ports)
                scenario.crowd.wait_for_more(200)
        scenario.crowd.wait_for_more(500)
    assert cut >= 10
    scenario.end()
