"""Leases on a real broker: one holder at a time, also when a holder is killed or sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.kafka import Admin, Lease
from headrace.runtime import SystemClock
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.secured import kafka_section, kafka_settings
from yaml_table import table

pytestmark = pytest.mark.secured
_PATIENCE_SECONDS = 150.0
_HOLDER = table(__file__, "holder")


@pytest.fixture
def settings(kafka: Cluster) -> KafkaConfig:
    return kafka_settings(kafka.bootstrap_servers, request_timeout_seconds=60)


@pytest.fixture
def holders(kafka: Cluster, topic: MakeTopic, tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two processes that hold a lease each, by the name of the lease."""
    names = topic(), topic()
    file = tmp_path / "headrace.yaml"
    file.write_text(json.dumps({"kafka": kafka_section(kafka.bootstrap_servers)}))
    start = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, text=True)
    started = {name: start([sys.executable, "-c", _HOLDER, str(file), name]) for name in names}
    with contextlib.ExitStack() as stack:
        for process in started.values():
            stack.enter_context(process)
            stack.callback(process.kill)
        assert [process.stdout.readline() for process in started.values() if process.stdout] == ["held\n", "held\n"]
        yield started


def lease_of(settings: KafkaConfig, name: str) -> Lease:
    return Lease(settings, Admin(settings), name, SystemClock())


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work(), _PATIENCE_SECONDS)

    asyncio.run(limited())


def test_one_holds_and_the_next_has_it_when_it_lets_go(settings: KafkaConfig, topic: MakeTopic) -> None:
    """A second one is refused and told who holds it; after the release it gets it, and other names are free."""
    name = topic()

    async def work() -> None:
        first, second, other = (lease_of(settings, n) for n in (name, name, f"{name}.other"))
        assert await first.acquire()
        await first.check()
        assert not await second.acquire()
        assert f"(pid {os.getpid()} on " in second.holder
        assert await other.acquire()
        await first.release()
        assert await second.acquire(_PATIENCE_SECONDS)
        await second.check()
        for lease in (second, other):
            await lease.release()

    run(work)


def test_holders_that_are_killed_or_sleep_lose_it_with_their_session(
    settings: KafkaConfig, holders: dict[str, subprocess.Popen[str]]
) -> None:
    """Who waits gets it then; and the one that slept finds out when it wakes, before it does more."""
    (killed, first), (sleeping, second) = holders.items()
    first.kill()
    second.send_signal(signal.SIGSTOP)

    async def work() -> None:
        leases = [lease_of(settings, name) for name in (killed, sleeping)]
        assert await asyncio.gather(*(lease.acquire(_PATIENCE_SECONDS) for lease in leases)) == [True, True]
        second.send_signal(signal.SIGCONT)
        assert second.stdout.readline() == "lost\n"
        for lease in leases:
            await lease.check()
            await lease.release()

    run(work)
