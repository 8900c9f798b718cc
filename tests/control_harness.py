"""The processes of one deployment on a cluster in memory, for tests of live control."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.commands import consumer_control
from headrace.commands.consumer_control import ConsumerControl
from headrace.config.consumers import DeliveryConfig, ReactiveConsumerConfig
from headrace.config.kafka import KafkaConfig
from headrace.config.section import fits_any
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.pump import Pump
from headrace.delivery.status import SettingsInForce
from headrace.errors import OffsetsKeptElsewhere
from headrace.kafka import JSON_OBJECTS, Admin
from headrace.records import OutgoingRecord, Record, TopicPartition
from headrace.runtime import SystemClock
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster

CONFIG = ReactiveConsumerConfig.model_validate({"topics": ["t"], "group": "g", "backend": {"url": "http://b"}})
P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
LIMIT_SECONDS = 60.0


class FakePump:
    """A pump with partitions that records the calls it gets."""

    def __init__(self, *partitions: TopicPartition) -> None:
        self.group, self.member, self.retries = "g", None, None
        self.seeks = self
        self.lanes: dict[TopicPartition, Any] = {}
        self.assign(*partitions)
        self.whole = ""
        self.holds: dict[TopicPartition, str] = {}
        self.settings: SettingsInForce | None = None
        self.sought: list[tuple[TopicPartition, int]] = []
        self.skipped: list[tuple[TopicPartition, int]] = []
        self.elsewhere = False
        self.last_offset = 100
        self.idle = asyncio.Event()
        self.idle.set()

    def assign(self, *partitions: TopicPartition) -> None:
        self.lanes = {p: SimpleNamespace(tracker=SimpleNamespace(frontier=7)) for p in partitions}

    def pause(self, partitions: Collection[TopicPartition] | None, why: str) -> None:
        if partitions is None:
            self.whole = why
        else:
            self.holds |= dict.fromkeys(partitions, why)

    def resume(self, partitions: Collection[TopicPartition] | None) -> None:
        if partitions is None:
            self.whole = ""
        for partition in partitions or ():
            self.holds.pop(partition, None)

    def change(self, settings: SettingsInForce) -> None:
        self.settings = settings

    async def seek(self, partition: TopicPartition, offset: int) -> bool:
        if self.elsewhere:
            raise OffsetsKeptElsewhere()
        await asyncio.sleep(0)
        await self.idle.wait()
        self.sought.append((partition, offset))
        return True

    async def skip(self, partition: TopicPartition, offset: int, reason: str) -> str:
        if offset > self.last_offset:
            return "will be skipped"
        if (partition, offset) in self.skipped:
            return "already completed"
        self.skipped.append((partition, offset))
        return "skipped"


class ControlHarness:
    """ControlHarness of one deployment, whose control table is the topic `c`."""

    def __init__(self) -> None:
        self.cluster, self.clock = MemoryCluster({"c": 1}), SystemClock()
        self.started: list[ConsumerControl] = []

    @property
    def log(self) -> list[Record]:
        """The records of the table."""
        return self.cluster.records("c")

    def put(self, key: str, entry: Mapping[str, Any] | None) -> None:
        """Write an entry as somebody else."""
        value = None if entry is None else msgspec.json.encode(entry)
        self.cluster.write(OutgoingRecord("c", key.encode(), value))

    async def start(self, pump: FakePump, *, loaded: bool = True) -> ConsumerControl:
        """Start a process."""
        table = self.cluster.table("c", JSON_OBJECTS, self.clock, "control")
        made = ConsumerControl(table, {}, f"m{len(self.started)}", lambda group: [], self.clock)
        made.add(running(CONFIG, pump, name="orders/a b", pump=pump, admin=Admin(KafkaConfig())))  # not contacted
        await made.start()
        self.started.append(made)
        if loaded:
            await self.load(made)
        return made

    async def start_with(self, *partitions: TopicPartition, last_offset: int = 100) -> tuple[ConsumerControl, FakePump]:
        """Start a process whose pump has these partitions."""
        pump = FakePump(*partitions)
        pump.last_offset = last_offset
        return await self.start(pump), pump

    async def load(self, process: ConsumerControl) -> None:
        """Make a process read the table to its end."""
        self.cluster.follow(process.table)
        await asyncio.sleep(0)

    async def stop(self, process: ConsumerControl) -> None:
        """Stop a process without a last word, as a crash does."""
        self.started.remove(process)
        self.cluster.tables.remove(process.table)
        await process.stop()


def running(config: DeliveryConfig, destination: Any = None, *, admin: Any = None, **more: Any) -> RunningConsumer:
    """Return a consumer of topic `t`, or of the topics of its settings, with a new pump."""
    group, patterns = getattr(config, "group", "mine"), getattr(config, "topic_patterns", ())
    facts = {
        "name": group,
        "kind": "reactive",
        "topics": getattr(config, "topics", ["t"]),
        "matches": fits_any(patterns) if patterns else None,
    }
    if "pump" not in more:
        more["pump"] = Pump("live", group, destination, None, delivery=config, clock=ManualClock())
    return RunningConsumer(delivery=config, destination=destination, admin=admin, **{**facts, **more})


def live(test: Callable[[ControlHarness], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a harness, and stop its processes at the end."""

    async def main() -> None:
        harness = ControlHarness()
        try:
            await asyncio.wait_for(test(harness), LIMIT_SECONDS)
        finally:
            for process in harness.started:
                assert process.death is None
                await process.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consumer_control, "_AGAIN_SECONDS", 0.001)  # no test waits
        asyncio.run(main())


async def ask(
    process: ConsumerControl, action: str, offsets: dict[TopicPartition, int], wait_seconds: float = 60
) -> Any:
    [consumer] = process.consumers.values()
    facts = {"by": "ann", "at": 0.0, "reason": "so"}
    response = await process.command(consumer, action, offsets, facts, wait_seconds)
    return response.id, response.results
