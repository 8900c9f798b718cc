"""Partitions are paused and sought on the real broker and under load; the ledger judges."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.consumers import BatchConfig, DeliveryConfig, FlowControl, Ordering
from headrace.config.membership import ConsumerConfig
from headrace.config.producer_config import ProducerConfig
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.kafka import Admin, Consumer, Producer, ReadPolicy
from headrace.records import OutgoingRecord, TopicPartition
from headrace.runtime import Deadline, SystemClock
from headrace_devkit.testing import (
    Cluster,
    MakeTopic,
    Operation,
    PauseSpan,
    RecordingBackend,
    Seek,
    StartHeadrace,
    check_pushed,
)
from headrace_devkit.testing.recording import gather
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import kafka_settings
from tests.raw_server import until

CLOCK = SystemClock()
RECORDS = 400
"""In each partition."""
QUICK = {"heartbeat.interval.ms": 300}
"""So that a member hears at once that others come and go."""
PROTOCOLS = [
    QUICK,
    pytest.param({**QUICK, "partition.assignment.strategy": "range"}, marks=pytest.mark.long),
    pytest.param({"group.protocol": "consumer"}, marks=pytest.mark.long),
]


class Handler:
    """A slow destination that writes a journal of its deliveries."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal.open("a")
        self._requests = itertools.count()
        self.handled = 0

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        number, records = next(self._requests), delivery.records
        named = [
            (f"g:{r.topic}:{r.partition}:{r.offset}", (r.key or b"").decode(), (r.value or b"").decode())
            for r in records
        ]
        self._write({"request": number, "at": time.time(), "records": named})
        await asyncio.sleep(0.02)
        self._write({"request": number, "at": time.time(), "ended": list(range(len(records)))})
        self.handled += len(records)
        return [ACK] * len(records)

    def _write(self, entry: dict[str, Any]) -> None:
        self.journal.write(json.dumps(entry) + "\n")
        self.journal.flush()


class Member:
    """A pump and its consumer, as a process has them."""

    def __init__(self, scenario: LiveScenario, **policy: Any) -> None:
        config = DeliveryConfig(ordering=scenario.ordering, batch=BatchConfig(max_records=5), max_in_flight=8)
        self.pump = Pump("member", scenario.group, scenario.handler, None, delivery=config, clock=CLOCK)
        self.consumer = Consumer(
            scenario.admin,
            name="member",
            group=scenario.group,
            topics=[scenario.topic],
            listener=self.pump,
            flow=FlowControl(),
            clock=CLOCK,
            policy=ReadPolicy(member=ConsumerConfig(properties=scenario.membership), **policy),
        )
        self.pump.connect(self.consumer, self.consumer)

    async def __aenter__(self) -> Member:
        await self.pump.start()
        await self.consumer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.consumer.drain(Deadline(CLOCK, 20))
        await self.consumer.stop()
        await self.pump.stop()
        assert (self.consumer.death, self.pump.death) == (None, None)


class LiveScenario:
    """A topic with records, a group, and the operations on its partitions."""

    def __init__(self, kafka: Any, topic: str, folder: Path) -> None:
        self.kafka = kafka_settings(kafka.bootstrap_servers, request_timeout_seconds=60)
        self.admin = Admin(self.kafka)
        self.topic, self.group = topic, f"{topic}-group"
        kafka.create_topic(f"{topic}.dlq", 1, {})
        self.journal = folder / "journal"
        self.handler = Handler(self.journal)
        self.ordering: Ordering = "partition"
        self.membership: dict[str, Any] = QUICK
        self.places = [TopicPartition(topic, number) for number in range(3)]
        self.operations: dict[TopicPartition, list[Operation]] = {place: [] for place in self.places}
        self.written = 0

    async def write(self, records: int) -> None:
        """Write records of a few keys to each partition."""
        producer = Producer(self.kafka, ProducerConfig())
        await producer.start()
        numbers = range(self.written, self.written + records)
        self.written += records
        batch = [
            OutgoingRecord(self.topic, b"k%d" % (n % 7), b"%d" % n, None, place.partition)
            for n in numbers
            for place in self.places
        ]
        assert not [result for result in await producer.produce(batch) if isinstance(result, Exception)]
        await producer.stop()

    async def seek(self, members: Sequence[Member], place: TopicPartition, offset: int) -> None:
        """Seek wherever the partition is, until that is acknowledged."""
        begin, deadline = time.time(), Deadline(CLOCK, 120)
        while not any(
            [await member.pump.seeks.seek(place, offset) for member in members if place in member.pump.lanes]
        ):
            assert not deadline.passed, "nobody could seek"
            await asyncio.sleep(0.05)
        self.operations[place].append(Seek(begin, time.time(), offset))

    async def done(self) -> None:
        """Wait until the group has committed the end of every partition."""
        deadline = Deadline(CLOCK, 120)
        while (at := await self.admin.committed(self.group)) != dict.fromkeys(self.places, self.written):
            assert not deadline.passed, f"the group has committed {at}"
            await asyncio.sleep(0.1)

    async def check(self) -> None:
        """Ask the ledger."""
        for run in await gather(self.kafka, self.admin, self.group, self.topic, self.journal):
            place = run.log[0].topic_partition
            assert check_pushed(run, self.ordering, (), self.operations[place]) == [], place


@pytest.fixture
def scenario(kafka: Cluster, topic: MakeTopic, tmp_path: Path) -> Iterator[LiveScenario]:
    made = LiveScenario(kafka, topic(3), tmp_path)
    yield made
    made.handler.journal.close()


@pytest.mark.parametrize("membership", PROTOCOLS, ids=["cooperative", "eager", "kip-848"])
async def test_seeks_under_load_are_exact(scenario: LiveScenario, membership: dict[str, Any]) -> None:
    """Back, forward and twice, with deliveries in flight: nothing comes twice or too early, and nothing is lost."""
    scenario.membership = membership
    first, second, third = scenario.places
    await scenario.write(RECORDS)
    async with Member(scenario) as member:
        await until(lambda: scenario.handler.handled > 60, "some deliveries")
        await asyncio.gather(
            scenario.seek([member], first, 3),
            scenario.seek([member], second, RECORDS - 20),
            scenario.seek([member], third, 90),
            scenario.seek([member], third, 7),
        )
        committed = await scenario.admin.committed(scenario.group)
        assert committed[second] >= RECORDS - 20
        await scenario.done()
        await scenario.seek([member], first, RECORDS - 5)
        await scenario.write(5)
        await scenario.done()
        assert not [status.why for status in member.pump.status().partitions.values() if status.why]
    await scenario.check()


async def test_a_held_partition_stands_still_through_rebalances(scenario: LiveScenario) -> None:
    """Nothing of it comes while others go on; with its release everything does, and nobody is left paused."""
    scenario.ordering = "key"
    held, *others = scenario.places
    await scenario.write(RECORDS)
    async with Member(scenario) as stays:
        await until(lambda: scenario.handler.handled > 60, "some deliveries")
        members = [stays]
        stays.pump.pause([held], "it is paused")
        await until(lambda: not stays.pump.status().partitions[held].in_flight, "what is in flight to end")
        begin = time.time()
        async with Member(scenario) as comes:
            comes.pump.pause([held], "it is paused")
            members.append(comes)
            await until(lambda: comes.pump.lanes, "a partition of its own")
        await until(lambda: len(stays.pump.lanes) == 3, "all partitions again")
        assert stays.pump.status().partitions[held].why == "it is paused"
        await scenario.write(50)
        await until(
            lambda: all(stays.pump.status().partitions[p].committed == scenario.written for p in others), "the others"
        )
        scenario.operations[held].append(PauseSpan(begin, time.time()))
        stays.pump.resume([held])
        await scenario.done()
    await scenario.check()


def test_changed_settings_of_the_file_restart_their_consumer_only(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """Records are delivered once, the later ones to the new backend; what needs a restart changes nothing."""
    first, other, group = topic(), topic(), f"live-{time.time_ns()}"
    second = RecordingBackend()
    second.start()
    try:
        consumers = {
            name: {"topics": [read], "group": f"{group}-{name}", "backend": {"url": backend.url}}
            for name, read in (("one", first), ("two", other))
        }
        process = headrace({**site.config, "reactive_consumers": consumers})
        file = next(process._folder.glob("headrace.yaml"))

        def reload(change: Callable[[Any], object]) -> Any:
            config = yaml.safe_load(file.read_text())
            change(config["reactive_consumers"]["one"])
            file.write_text(yaml.safe_dump(config))
            return site.ask(f"{process.url}/adm/modules", ["reactive_consumers"]).body

        site.write_json(first, *range(20))
        backend.wait_for(lambda b: b.accepted_records == 20, 20)
        moved = reload(lambda one: one["backend"].update(url=second.url))
        assert moved["reloaded"] == ["reactive_consumers"], moved
        for name in (first, other):
            site.write_json(name, *range(20))
        second.wait_for(lambda b: b.accepted_records == 20, 20)
        backend.wait_for(lambda b: b.accepted_records == 40, 20)
        refused = reload(lambda one: one.update(group="another"))["failed"]["reactive_consumers"]
        assert "reactive_consumers.one: a change of group needs a restart" in refused
        site.wait_committed(f"{group}-one", first, 40)
        assert (backend.accepted_records, second.accepted_records) == (40, 20)
    finally:
        second.stop()
