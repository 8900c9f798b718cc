"""Instances of active consumers on a cluster in memory: the real instance and consumer, without a thread.

The client's thread takes a turn when a test says so. Time passes only when nothing else can happen.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from headrace.config.active import ActiveConsumersConfig
from headrace.formats.choice import Codecs
from headrace.kafka.client import library
from headrace.kafka.positions import ReadPolicy
from headrace.records import Committed, OutgoingRecord, TopicPartition
from headrace.sidecar.active.instance import ActiveInstance
from headrace.sidecar.active.instances import ActiveInstances
from headrace.sidecar.active.spec import InstanceSpec
from headrace_devkit.simulation.fetcher import FetchedPartition
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.world import Machine, World
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster
from tests.assigned_consumer import AssignedConsumer, on_thread

T = TypeVar("T")

P0, P1, P2 = (TopicPartition("t", n) for n in range(3))
GROUP = "g"


class ActiveHarness:
    """The instances of a process on a cluster in memory, and the threads of their consumers."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int = 1) -> None:
        """Prepare; `seed` decides how long requests take."""
        world = World(seed)
        self.clock, self.kafka = ManualClock(), SimulatedKafka(world)
        self.cluster = MemoryCluster({"t": 3}, brokers=self.kafka.brokers, offsets=self.kafka.groups.offsets)
        self.clients: list[AssignedConsumer] = []
        """Clients that are not closed, the newest last."""
        self.threads: list[Steps] = []
        self.instances = self.process()
        self.instance: ActiveInstance
        """One of them, which the test makes."""
        machine = world.machine("m")
        make = functools.partial(TurnedConsumer, self.kafka, self.clients)
        patch.setattr(library, "Consumer", lambda config: on_thread(machine, lambda: make(config)))
        patch.setattr("headrace.kafka.loop_proxy.CommandQueue.wait", lambda queue, seconds: None)
        patch.setattr("headrace.kafka.consumer.OwnedThread", functools.partial(Steps, machine, self.threads))
        patch.setattr("headrace.kafka.consumer.LoopProxy", Proxy)

    @property
    def committed(self) -> dict[TopicPartition, Committed]:
        return {TopicPartition(*key): Committed(*at[:2]) for key, at in self.cluster.offsets.committed(GROUP).items()}

    def append(self, partition: TopicPartition, *sizes: int) -> None:
        """Append records: JSON strings of these sizes in bytes."""
        for size in sizes:
            value = b'"%s"' % (b"x" * max(0, size - 2))
            self.cluster.write(OutgoingRecord(partition.topic, None, value, None, partition.partition), 1000)

    def process(self, **settings: Any) -> ActiveInstances:
        """Return the instances of a process, not started."""
        codecs: Any = Codecs(None)  # type: ignore[arg-type]
        return ActiveInstances(ActiveConsumersConfig(**settings), self.cluster, codecs, self.clock)  # type: ignore[arg-type]

    async def run(self, work: Awaitable[T], turns: int = 40) -> T:
        """Await a call while the thread takes turns; then only time passes."""
        task = asyncio.ensure_future(work)
        for _ in range(turns):
            await self.clock.settle()
            if task.done():
                break
            self.turn()
            await self.clock.advance(0.05)
        return await task

    def turn(self) -> None:
        """Let the thread of each consumer take one turn, and the loop process its results."""
        for thread in list(self.threads):
            thread.turn()

    async def turns(self, count: int = 3) -> None:
        """Let some turns pass."""
        for _ in range(count):
            self.turn()
            await self.clock.settle()

    async def rebalanced(self) -> None:
        """Let turns and time pass until the clients have made their rebalances: a full buffer is not polled at once."""
        for _ in range(20):
            await self.turns(1)
            await self.clock.advance(0.5)
            if not any(client.is_moving for client in self.clients):
                break
        else:
            raise AssertionError("the client is never polled")
        await self.turns()


class TurnedConsumer(AssignedConsumer):
    """A client that waits in a poll only while something is on its way, so that a turn costs little."""

    def poll(self, timeout: float = -1) -> Any:
        arrives = self.member.commits.open or any(
            state.is_started and not state.is_paused and (state.position is None or self._has_more(state))
            for state in self.fetcher.partitions.values()
        )
        return super().poll(timeout if arrives else 0)

    def _has_more(self, state: FetchedPartition) -> bool:
        log = self.cluster.brokers.log(*state.key)
        return log is not None and log.end != state.position


class Steps:
    """In place of the thread of a consumer: it runs when a test calls `turn`."""

    def __init__(
        self,
        machine: Machine,
        threads: list[Steps],
        name: str,
        run: Callable[[Any], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._machine, self._threads = machine, threads
        self.poll: Any = run.__self__  # type: ignore[attr-defined]
        self.alive = False
        self.stop_requested = threading.Event()
        self._on_death = on_death
        self._ended = asyncio.Event()

    def start(self) -> None:
        self.alive = True
        self._threads.append(self)

    def turn(self) -> None:
        """Take one turn; an error ends the consumer."""
        try:
            on_thread(self._machine, self.poll.turn)
        except Exception as cause:  # noqa: BLE001 as the thread's own boundary
            self._end()
            self._on_death(cause)
        self.poll.loop.flush()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def stop(self, limit_seconds: float) -> bool:
        if self.alive:
            self._end()
        return True

    def _end(self) -> None:
        self.alive = False
        self._threads.remove(self)
        try:
            on_thread(self._machine, lambda: self.poll.run(SimpleNamespace(is_set=lambda: True)))
        finally:
            self.poll.loop.flush()
            self._ended.set()


class Proxy:
    """The loop as the thread sees it: calls wait until the end of a turn."""

    def __init__(self, service: Any, listener: Any, epochs: dict[TopicPartition, int]) -> None:
        self.listener, self.epochs, self._service = listener, epochs, service
        self._calls: deque[Callable[[], None]] = deque()

    @property
    def is_dead(self) -> bool:
        return self._service.death is not None

    def post(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._calls.append(lambda: call(*arguments))

    def flush(self) -> None:
        """Make the calls."""
        while self._calls:
            self._calls.popleft()()

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, T]], name: str, seconds: float) -> T | None:
        self.flush()
        if self.is_dead:
            return None
        try:
            work().send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("the listener of an instance waits for nothing")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes while nothing can run."""

    def __init__(self) -> None:
        super().__init__(_Selector(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits, and nothing will happen"
        self._loop.now += timeout
        return []  # nothing comes from outside


def spec_of(name: str = "one", **given: Any) -> InstanceSpec:
    """Return the settings of an instance that reads JSON from the start."""
    values: dict[str, Any] = {
        "group": GROUP,
        "name": name,
        "owner": "",
        "key_format": "string",
        "value_format": "json",
        "wait_seconds": 1.0,
        "min_bytes": -1,
        "max_read_bytes": 200_000,
        "auto_commit_seconds": None,
        "buffer_bytes": 2_000_000,
        "policy": ReadPolicy("earliest"),
        **given,
    }
    return InstanceSpec(**values)


async def read(harness: ActiveHarness, wait_seconds: float = 0.5, **limits: int) -> Any:
    """Read what is there."""
    given = {"max_bytes": 200_000, "max_records": 10_000, **limits}
    return await harness.run(harness.instance.read(wait_seconds=wait_seconds, **given))


def run_virtual(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a loop with virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)
