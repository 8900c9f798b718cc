"""Instances of active consumers on a group in memory: the real instance and consumer, without a broker or a thread.

The client's thread takes a turn when a test says so. Time passes only when nothing else can happen.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import confluent_kafka
import pytest

from headrace.config.active import ActiveConsumersConfig
from headrace.config.kafka import KafkaConfig
from headrace.errors import CommitRefused, InstanceState, KafkaUnavailable
from headrace.formats.choice import Codecs
from headrace.kafka.positions import ReadPolicy
from headrace.records import Committed, TopicPartition
from headrace.sidecar.active.instance import ActiveInstance
from headrace.sidecar.active.instances import ActiveInstances
from headrace.sidecar.active.partition_positions import Processed
from headrace.sidecar.active.spec import InstanceSpec, Topics
from headrace_devkit.testing import ManualClock
from tests.group_client import ConsumerClient, Message, plain, where

T = TypeVar("T")

P0, P1, P2 = (TopicPartition("t", n) for n in range(3))
GROUP = "g"


class ActiveHarness:
    """The log, the commits and the topics of a cluster, which is also the `Admin` of its instances."""

    config = KafkaConfig()
    reachability = SimpleNamespace(outage=None, failed=lambda error: None, answered=lambda: None, check=lambda *_: None)

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.logs: dict[TopicPartition, list[Message]] = {p: [] for p in (P0, P1, P2)}
        self.committed: dict[TopicPartition, Committed] = {}
        self.on_commit: Callable[[TopicPartition, Committed], None] = lambda partition, at: None
        self.clients: list[Client] = []
        """Clients that are not closed, the newest last."""
        self.responses = asyncio.Event()
        """Set while the admin answers."""
        self.responses.set()
        self.failure: confluent_kafka.KafkaException | None = None
        """Raised by requests to the coordinator while it is set."""
        self.instances = self.process()
        self.instance: ActiveInstance
        """One of them, which the test makes."""
        patch.setattr(confluent_kafka, "Consumer", lambda settings: Client(self, settings))
        patch.setattr("headrace.kafka.loop_proxy.CommandQueue.wait", lambda queue, seconds: None)
        patch.setattr("headrace.kafka.consumer.OwnedThread", Steps)
        patch.setattr("headrace.kafka.consumer.LoopProxy", Proxy)

    def append(self, partition: TopicPartition, *sizes: int) -> None:
        """Append records: JSON strings of these sizes in bytes."""
        log = self.logs[partition]
        for size in sizes:
            log.append(Message(partition, len(log), key=None, value=b'"%s"' % (b"x" * max(0, size - 2))))

    def process(self, **settings: Any) -> ActiveInstances:
        """Return the instances of a process, not started."""
        codecs: Any = Codecs(None)  # type: ignore[arg-type]
        return ActiveInstances(ActiveConsumersConfig(**settings), self, codecs, self.clock)  # type: ignore[arg-type]

    async def list_topics(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in {p.topic for p in self.logs}]

    async def group_members(self, group: str, right: str = "") -> list[Any]:
        return []

    async def topic_ids(self, names: Sequence[str], right: str = "") -> dict[str, str]:
        return {name: name for name in names}

    async def known_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        await self.responses.wait()
        if self.failure:
            raise KafkaUnavailable()
        return {p: len(self.logs[p]) for p in partitions}

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
        for client in list(self.clients):
            client.steps.turn()

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
            if not any(client.rebalances for client in self.clients):
                break
        else:
            raise AssertionError("the client is never polled")
        await self.turns()


class Client(ConsumerClient):
    """The client of one consumer. Rebalances happen in its next poll."""

    newest: Client

    def __init__(self, harness: ActiveHarness, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.harness = harness
        self.steps: Steps
        self.loses_commits = False
        """Whether commits fail."""
        self._events: deque[tuple[str, list[TopicPartition]]] = deque()
        self._reports: deque[tuple[confluent_kafka.KafkaError | None, list[Any]]] = deque()
        self._on_commit = settings["on_commit"]
        harness.clients.append(self)
        Client.newest = self

    def rebalance(self, event: str, *partitions: TopicPartition) -> None:
        """Let partitions be assigned (`on_assign`), revoked (`on_revoke`) or lost (`on_lost`) in the next poll."""
        self._events.append((event, list(partitions)))

    @property
    def rebalances(self) -> bool:
        """Whether an event waits for the next poll."""
        return bool(self._events)

    def unsubscribe(self) -> None:
        self.topics = []
        self.rebalance("on_revoke", *self.assigned)

    def poll(self, seconds: float) -> Any:
        while self._reports:
            self._on_commit(*self._reports.popleft())
        if self._events:
            event, partitions = self._events.popleft()
            self._callbacks[event](self, [plain(p) for p in partitions])
            return None
        return next(iter(self.consume(1, 0)), None)

    def consume(self, most: int, seconds: float) -> list[Any]:
        found: list[Any] = []
        for partition, position in self.assigned.items():
            if partition not in self.paused:
                records = self.harness.logs[partition][position : position + most - len(found)]
                found += records
                self.assigned[partition] += len(records)
        return found

    def incremental_assign(self, items: Sequence[Any]) -> None:
        for item in items:
            if item.offset < 0 and item.offset not in (confluent_kafka.OFFSET_BEGINNING, confluent_kafka.OFFSET_END):
                raise confluent_kafka.KafkaException(
                    confluent_kafka.KafkaError(confluent_kafka.KafkaError._INVALID_ARG)
                )
            end = len(self.harness.logs[where(item)])
            marks = {confluent_kafka.OFFSET_BEGINNING: 0, confluent_kafka.OFFSET_END: end}
            self.assigned[where(item)] = marks.get(item.offset, item.offset)

    def partitions(self) -> Iterable[TopicPartition]:
        return self.harness.logs

    def stored(self, partition: TopicPartition) -> tuple[Committed | None, Any]:
        if self.harness.failure:
            raise self.harness.failure
        return self.harness.committed.get(partition), None

    def get_watermark_offsets(self, item: Any, timeout: float) -> tuple[int, int]:
        return 0, len(self.harness.logs[where(item)])

    def commit(self, offsets: Sequence[Any], asynchronous: bool) -> None:
        if self.harness.failure:
            raise self.harness.failure
        for item in [] if self.loses_commits else offsets:
            assert where(item) in self.assigned, f"a commit of {where(item)}, which is not assigned"
            at = Committed(item.offset, item.metadata or "")
            self.harness.on_commit(where(item), at)
            self.harness.committed[where(item)] = at
        if asynchronous:
            failure = (
                confluent_kafka.KafkaError(confluent_kafka.KafkaError.NOT_COORDINATOR) if self.loses_commits else None
            )
            self._reports.append((failure, [plain(where(item), item.offset) for item in offsets]))

    def close(self) -> None:
        super().close()
        self.harness.clients.remove(self)


class Steps:
    """In place of the thread of a consumer: it runs when a test calls `turn`."""

    def __init__(self, name: str, run: Callable[[Any], None], on_death: Callable[[BaseException], None]) -> None:
        self.poll: Any = run.__self__  # type: ignore[attr-defined]
        self.alive = False
        self.stop_requested = threading.Event()
        self._on_death = on_death
        self._ended = asyncio.Event()

    def start(self) -> None:
        self.alive = True
        Client.newest.steps = self

    def turn(self) -> None:
        """Take one turn; an error ends the consumer."""
        try:
            self.poll.turn()
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
        try:
            self.poll.run(SimpleNamespace(is_set=lambda: True))
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


class Compared(TopicPartition):
    """A partition that counts comparisons."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return super().__eq__(other)

    __hash__ = TopicPartition.__hash__


async def work_of(harness: ActiveHarness, count: int) -> int:
    """Return the comparisons of requests that name this many partitions, of which the first instance has two."""
    many: list[TopicPartition] = [Compared("t", n) for n in range(count)]
    first = [Processed(partition, Committed(1)) for partition in many]
    harness.logs |= {partition: [] for partition in many if partition not in harness.logs}
    Compared.count = 0
    with pytest.raises(CommitRefused, match=f"t-11 and {count - 12} more;"):
        await harness.run(harness.instance.commit(first))
    with pytest.raises(InstanceState, match=f"t-11 and {count - 12} more;"):
        await harness.run(harness.instance.seek(dict.fromkeys(many, 1)))
    assigned = await harness.instances.create(spec_of("assigned"))
    for partitions in (many, many[1:]):
        await assigned.membership.subscribe(Topics(partitions=partitions))
        await harness.turns()
    await assigned.wait_assigned(many)
    assert assigned.assigned == many[1:]
    await harness.run(assigned.commit(first[1:]))
    await harness.instances.delete(assigned)
    return Compared.count
