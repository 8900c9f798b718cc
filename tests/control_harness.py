"""The processes of one deployment in memory, for tests of live control. Their control table is a list of records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.commands import consumer_control
from headrace.commands.consumer_control import ConsumerControl
from headrace.config.consumers import DeliveryConfig, ReactiveConsumerConfig
from headrace.config.kafka import KafkaConfig
from headrace.config.section import fits_any
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.pump import Pump
from headrace.delivery.status import SettingsInForce
from headrace.errors import KafkaUnavailable, OffsetsKeptElsewhere
from headrace.kafka import JSON_OBJECTS, Admin, CompactedTable, InternalTopic
from headrace.records import OutgoingRecord, Produced, Record, TopicPartition
from headrace.runtime import SystemClock
from headrace_devkit.testing import ManualClock

CONFIG = ReactiveConsumerConfig.model_validate({"topics": ["t"], "group": "g", "backend": {"url": "http://b"}})
P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
LIMIT_SECONDS = 60.0


class Log:
    """The control topic of a deployment. Every process reads a record when it is written."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.views: list[CompactedTable[Any]] = []
        self.broken = False

    async def produce(self, outgoing: Sequence[OutgoingRecord]) -> list[Any]:
        if self.broken:
            return [KafkaUnavailable("no broker answers")] * len(outgoing)
        return [self.append(record.key or b"", record.value) for record in outgoing]

    def append(self, key: bytes, value: bytes | None) -> Produced:
        record = Record("c", 0, len(self.records), 0, key, value)
        self.records.append(record)
        for view in self.views:
            view.read([record], len(self.records))
        return Produced(0, record.offset)

    async def has_topic(self, name: str) -> bool:
        raise KafkaUnavailable("this test reads by itself")

    async def written_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, len(self.records))


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
            return "ended already"
        self.skipped.append((partition, offset))
        return "skipped"


class ControlHarness:
    """ControlHarness of one deployment."""

    def __init__(self) -> None:
        self.log, self.clock = Log(), SystemClock()
        self.started: list[ConsumerControl] = []

    async def start(self, pump: FakePump, *, loaded: bool = True) -> ConsumerControl:
        """Start a process."""
        admin: Any = self.log
        table = CompactedTable(
            admin, InternalTopic("c"), JSON_OBJECTS, self.log.produce, self.clock, optional="control"
        )
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
        process.table.read(self.log.records, len(self.log.records))
        process.table.loaded(len(self.log.records))
        self.log.views.append(process.table)
        await asyncio.sleep(0)

    async def stop(self, process: ConsumerControl) -> None:
        """Stop a process without a last word, as a crash does."""
        self.started.remove(process)
        self.log.views.remove(process.table)
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
