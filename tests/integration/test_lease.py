"""Leases on a real broker: one holder at a time, also when a holder is killed or sleeps."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.kafka import Admin, Lease
from headrace.lifecycle import SystemClock

_PATIENCE_SECONDS = 150.0
_HOLDER = """
import asyncio, sys
from headrace.config.kafka import KafkaConfig
from headrace.errors import LeaseLost
from headrace.kafka import Admin, Lease
from headrace.lifecycle import SystemClock

async def main():
    kafka = KafkaConfig(bootstrap_servers=sys.argv[1])
    lease = Lease(kafka, Admin(kafka), sys.argv[2], SystemClock())
    assert await lease.acquire(100)
    print("held", flush=True)
    while True:
        await asyncio.sleep(0.05)
        try:
            await lease.check()
        except LeaseLost:
            print("lost", flush=True)
            return await lease.release()

asyncio.run(main())
"""


@pytest.fixture
def settings(kafka: Any) -> KafkaConfig:
    return KafkaConfig(bootstrap_servers=kafka.bootstrap_servers, request_timeout_seconds=60)


@pytest.fixture
def holder(settings: KafkaConfig, topic: Callable[..., str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds a lease, and the lease's name."""
    name = topic()
    words = [sys.executable, "-c", _HOLDER, settings.bootstrap_servers, name]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process, name
        process.kill()


def lease_of(settings: KafkaConfig, name: str) -> Lease:
    return Lease(settings, Admin(settings), name, SystemClock())


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work(), _PATIENCE_SECONDS)

    asyncio.run(limited())


def test_one_holds_and_the_next_has_it_when_it_lets_go(settings: KafkaConfig, topic: Callable[..., str]) -> None:
    """A second one is refused and told who holds it; after the release it gets it, and other names are free."""
    name = topic()

    async def work() -> None:
        first, second, other = (lease_of(settings, n) for n in (name, name, f"{name}.other"))
        assert await first.acquire()
        await first.check()
        assert not await second.acquire()
        assert f"process-{os.getpid()}-since-20" in second.holder
        assert await other.acquire()
        await first.release()
        assert await second.acquire(_PATIENCE_SECONDS)
        await second.check()
        for lease in (second, other):
            await lease.release()

    run(work)


def test_of_many_that_come_at_once_one_has_it_at_a_time(settings: KafkaConfig, topic: Callable[..., str]) -> None:
    """Four that want it at the same moment have it one after the other."""
    name = topic()
    holding = 0

    async def one() -> None:
        nonlocal holding
        lease = lease_of(settings, name)
        assert await lease.acquire(_PATIENCE_SECONDS)
        holding += 1
        assert holding == 1
        await asyncio.sleep(0)
        await lease.check()
        assert holding == 1
        holding -= 1
        await lease.release()

    async def work() -> None:
        await asyncio.gather(*(one() for _ in range(4)))

    run(work)


def test_a_killed_holder_loses_it_with_its_session(settings: KafkaConfig, holder: Any) -> None:
    """Nobody gets it while the dead one is still counted in, and then the one that waits does."""
    process, name = holder
    process.kill()
    process.wait()

    async def work() -> None:
        lease = lease_of(settings, name)
        assert await lease.acquire(_PATIENCE_SECONDS)
        await lease.release()

    run(work)


def test_a_holder_that_slept_finds_out_before_it_does_more(settings: KafkaConfig, holder: Any) -> None:
    """A process that was stopped while another took over has lost it when it wakes."""
    process, name = holder
    os.kill(process.pid, signal.SIGSTOP)

    async def work() -> None:
        lease = lease_of(settings, name)
        assert await lease.acquire(_PATIENCE_SECONDS)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout
        assert process.stdout.readline() == "lost\n"
        await lease.check()
        await lease.release()

    run(work)
