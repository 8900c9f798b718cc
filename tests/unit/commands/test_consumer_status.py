"""The status of a consumer, and the commands that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from headrace.commands.commands import Commands, PartitionsRequest, SeekRequest
from headrace.commands.consumer_control import CommandResponse
from headrace.commands.consumer_status import ConsumerStatuses
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.consumers.lag import PartitionLag
from headrace.consumers.running_consumer import RunningConsumer
from headrace.delivery.breaker import BreakerStatus
from headrace.delivery.status import HeadRecord, PartitionStatus, PumpStatus, SettingsInForce
from headrace.errors import HeadraceError, KafkaUnavailable, OffsetsKeptElsewhere
from headrace.kafka.client.reachability import Outage
from headrace.kafka.cluster_info import GroupMember
from headrace.records import TopicPartition
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster
from tests.control_harness import running

CONFIG = ReactiveConsumerConfig.model_validate(
    {"topics": ["t"], "group": "g", "backend": {"url": "http://b"}, "retry": {"topics": [60]}}
)
TIER = CONFIG.retry.topic_names("g")[0]
P0, P1, P2, T0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("t", 2), TopicPartition(TIER, 0)
HERE = {
    P0: PartitionStatus(1, 10, 7, 3, 2, HeadRecord(7, 500, 2, 999_990.0), "waits for the backend", 0.4),
    P1: PartitionStatus(1, 5, 5, 0, 0, None, ""),
}
LAGS = {
    P0: PartitionLag(P0, 6, 12, 6, 12),
    P1: PartitionLag(P1, 5, 5, 0, 9),
    P2: PartitionLag(P2, 1, 4, 3, 4),
    TopicPartition("of another consumer", 0): PartitionLag(TopicPartition("of another consumer", 0), 0, 9, 9, 9),
}


PAUSE: Mapping[str, Any] = {"by": "ann", "since": 0.0, "reason": "so"}


class Cluster(MemoryCluster):
    """Three partitions with offsets 2 to 9, of which the last two belong to an open transaction."""

    def __init__(self) -> None:
        super().__init__({"t": 3, TIER: 1})
        for partition in (P0, P1, P2, T0):
            log = self.log(*partition)
            log.start, log.end = 2, 8
            log.append([UnwrittenRecord()] * 2, producer_id=1)
        self.fails = False
        self.requests = 0
        self.reachability = SimpleNamespace(outage=None)

    async def group_members(self, group: str, right: str = "") -> list[GroupMember]:
        self.requests += 1
        if self.fails:
            raise KafkaUnavailable("no broker answers")
        return [GroupMember("headrace-x", [P2], "10.0.0.7")] if group == "g" else []

    async def offsets_since(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        if timestamp_ms < 0:
            return {}  # Kafka's latest and earliest are -1 and -2
        return {P0: 4 if timestamp_ms else 1} if timestamp_ms <= 1000 else {}


def pump(group: str, partitions: dict[TopicPartition, PartitionStatus]) -> Any:
    counts = SimpleNamespace(read=lambda: {"discarded": 1, "delivered": 2})
    status = PumpStatus(partitions, BreakerStatus("open", 1_000_060.0, "it answers 503"))
    settings = SettingsInForce(None, 100, 102_400, 0.0, 64)
    seeks = SimpleNamespace(member=None)
    return SimpleNamespace(group=group, counts=counts, status=lambda: status, settings=settings, lanes={}, seeks=seeks)


def made() -> tuple[RunningConsumer, Any, Cluster, ConsumerStatuses]:
    """Return a consumer with a paused partition, a mock of its `ConsumerControl`, its cluster and statuses."""
    control: Any = Mock(member="me:1", command=AsyncMock(return_value=CommandResponse("i", False, [])))
    control.table.catch_up = AsyncMock()
    control.hold_of.return_value = None
    control.holds_of.return_value = {P1: PAUSE}
    control.of.return_value = {}
    control.commands_of.return_value = []
    control.topics_of.side_effect = lambda consumer: [*consumer.topics]
    cluster = Cluster()
    pumps = {"pump": pump("g", HERE), "retry_pump": pump("g.retry", {T0: HERE[P1]})}
    consumer = running(CONFIG, cluster, name="orders", destination_name="http://b", admin=cluster, **pumps)
    statuses = ConsumerStatuses(control, lambda group: LAGS if group == "g" else {}, ManualClock())
    return consumer, control, cluster, statuses


def test_each_partition_shows_its_position_and_why() -> None:
    """Those here from the pump, those elsewhere from the group; another consumer's of the same group are not shown."""
    consumer, _, _, statuses = made()
    shown = {(one.topic, one.partition): one for one in asyncio.run(statuses.details(consumer)).partitions}
    assert set(shown) == {P0, P1, P2, T0}
    first, second, third, retry_topic = (shown[place] for place in (P0, P1, P2, T0))
    assert (first.member, first.position, first.committed, first.end, first.lag) == ("me:1", 10, 7, 12, 5)
    assert (first.why, first.in_flight, first.records_in_flight) == ("waits for the backend", 2, 3)
    assert (first.key_share, second.key_share, third.key_share) == (0.4, None, None)
    assert first.head
    assert (first.head.offset, first.head.age_seconds, first.head.attempts) == (7, 10.0, 2)
    assert second.why.startswith("a transaction is open at offset 5; later records cannot be read")
    assert second.paused
    assert (second.paused.by, second.paused.since) == ("ann", "1970-01-01T00:00:00Z")
    assert (third.assigned, third.member, third.lag) == (False, "headrace-x at 10.0.0.7", 3)
    assert third.why == "another process has it, see the status there: headrace-x at 10.0.0.7"
    assert (retry_topic.assigned, retry_topic.lag) == (True, None)


def test_a_consumer_has_the_sums_of_its_partitions() -> None:
    """Sums, the oldest record, and the first thing that is wrong; a pause of the whole comes before all."""
    consumer, control, cluster, statuses = made()
    shown = statuses.summary(consumer)
    assert (shown.partitions_assigned, shown.lag, shown.in_flight, shown.records_in_flight) == (3, 8, 2, 3)
    assert (shown.oldest_seconds, shown.attempts, shown.why) == (10.0, 2, "waits for the backend")
    assert shown.counts == {"discarded": 2, "delivered": 4}
    assert (shown.breaker.state, shown.breaker.until) == ("open", "1970-01-12T13:47:40Z")
    control.hold_of.return_value = {**PAUSE, "reason": ""}
    assert statuses.summary(consumer).why == "paused by ann since 1970-01-01T00:00:00Z"
    assert cluster.requests == 0


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (SeekRequest(to="earliest"), {P0: 2, P1: 2, P2: 2}),
        (SeekRequest(to="latest"), {P0: 8, P1: 8, P2: 8}),
        (SeekRequest(offset=10, partitions=[1]), {P1: 10}),
        (SeekRequest(time=1000, partitions=[0, 1]), {P0: 4, P1: 8}),
        (SeekRequest(time=0, partitions=[0]), {P0: 1}),
        (SeekRequest(time="1970-01-01T02:00:01.500+02:00", partitions=[0]), {P0: 8}),
    ],
)
def test_a_seek_finds_the_offset_of_each_partition(request_: SeekRequest, wanted: dict[TopicPartition, int]) -> None:
    """A time is the first record of that time or later, or the end where there is none."""
    consumer, control, _, _ = made()
    commands = Commands(control, ManualClock())
    asyncio.run(commands.seek(consumer, request_, "ann", 0))
    assert control.command.await_args.args[2] == wanted


def test_partitions_of_several_topics_need_the_topic() -> None:
    """A number alone would mean several."""
    consumer, control, _, _ = made()
    control.topics_of.side_effect = lambda consumer: ["t", "u"]
    commands = Commands(control, ManualClock())
    with pytest.raises(HeadraceError, match="topic is missing"):
        asyncio.run(commands.pause(consumer, PartitionsRequest(partitions=[0]), "ann"))


def test_offsets_that_the_backend_keeps_are_not_sought_here() -> None:
    """Nobody waits for what cannot be."""
    consumer, control, _, _ = made()
    consumer.pumps[0].seeks.member = SimpleNamespace(keeps_offsets_elsewhere=True)
    commands = Commands(control, ManualClock())
    with pytest.raises(OffsetsKeptElsewhere):
        asyncio.run(commands.seek(consumer, SeekRequest(to="latest"), "ann", 0))
    assert not control.command.called


def test_an_outage_is_the_reason_of_a_consumer_and_of_its_partitions() -> None:
    """Before what else is wrong; a pause by hand comes first."""
    consumer, control, cluster, statuses = made()
    why = "Kafka at k:1 has not answered for 7 s: connection refused by k:1"
    cluster.reachability = SimpleNamespace(outage=Outage(0.0, 7.0, why))
    shown = asyncio.run(statuses.details(consumer))
    assert shown.why == why
    assert shown.kafka
    assert (shown.kafka.since, shown.kafka.why) == ("1970-01-01T00:00:00Z", why)
    assert {one.why for one in shown.partitions if one.assigned} == {why}
    control.hold_of.return_value = {**PAUSE, "reason": ""}
    assert statuses.summary(consumer).why.startswith("paused by ann")
