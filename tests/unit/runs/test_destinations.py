"""What a replay delivers to, and which offsets are meant; without Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import AsyncMock

import msgspec
import pytest

from headrace.config.model import HeadraceConfig
from headrace.delivery.dead_letter import headers_of
from headrace.delivery.offset_map import encode
from headrace.delivery.outcomes import ACK, HANDED_OFF, NOT_BEGUN, DeadLetter, Delivery, Reply
from headrace.errors import DestinationUnavailable, InvalidRequest, KafkaUnavailable, LeaseLost, RecordTooLarge
from headrace.kafka.internal_topics import InternalTopics
from headrace.kafka.timestamps import moment
from headrace.records import Committed, OutgoingRecord, Produced, Record, TopicPartition
from headrace.runs.destinations import CopyToTopic, RestoredDelivery
from headrace.runs.jobs import Job
from headrace.runs.replay import ReplayJob, ReplaySpec, RunContext
from headrace.runs.replay_requests import DryRun, ReplayRequest, Replays, ReplayTarget
from headrace.runs.selection import Window
from headrace.runs.window_run import Progress
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster
from headrace_devkit.testing.pump_harness import kind_of

P0, P1, DLQ = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("t.dlq", 0)
FAILED = Reply("E", "why")


def record(topic: str, partition: int, offset: int, headers: Any = None) -> Record:
    return Record(topic, partition, offset, 42, b"k", b"v", lambda: headers)


def letter(offset: int, of: Record) -> Record:
    return record("t.dlq", 0, offset, headers_of(DeadLetter(of, "g", 3, FAILED, 1.0, 2.0)))


def everywhere(topic: str) -> bool:
    return True


class Backend:
    """A backend that records what it gets, and fails some offsets."""

    def __init__(self) -> None:
        self.got: list[tuple[TopicPartition, list[int]]] = []
        self.epochs: list[int] = []
        self.fails: set[int] = set()

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.got.append((delivery.partition, [one.offset for one in delivery.records]))
        self.epochs.append(delivery.epoch)
        return [FAILED if one.offset in self.fails else ACK for one in delivery.records]


def test_a_redelivery_that_lost_its_lease_saves_nothing() -> None:
    """Another run has the topic by then, and knows of other dead letters that have ended."""
    spec = ReplaySpec(window=Window("t.dlq", "id", {0: (0, 9)}), to={}, repeats_at_most=1)
    one = ReplayJob(Job("replay-1", "replay", {}, "me", ""), spec, AsyncMock(), lambda to: None)
    one._restored = RestoredDelivery(Backend(), everywhere, everywhere)  # type: ignore[arg-type]
    one._completed, one._lease = AsyncMock(), AsyncMock(**{"check.side_effect": LeaseLost("another may have it")})
    with pytest.raises(LeaseLost):
        asyncio.run(one._save_ended(Progress({DLQ: Committed(9)}, 9, {})))


def test_letters_are_delivered_as_the_records_they_were() -> None:
    """Those of one partition together, one that is there twice apart; what is not wanted ends without a delivery."""
    backend = Backend()
    backend.fails = {6}
    first, other = record("t", 0, 5), record("t", 1, 6)
    letters = [letter(10, first), letter(11, other), letter(12, first), letter(13, record("t", 0, 8)), record(*DLQ, 14)]
    to = RestoredDelivery(backend, lambda one: one.offset < 14, everywhere, {P0: 7, P1: 0}.__getitem__)
    outcomes = asyncio.run(to.deliver(Delivery("g", DLQ, 1, letters, 1, "job")))
    assert backend.got == [(P0, [5]), (P1, [6]), (P0, [5, 8])]
    assert backend.epochs == [7, 0, 7], "those of their original partitions, not of the dead letter topic"
    assert outcomes == [ACK, FAILED, ACK, ACK, HANDED_OFF]
    assert to.passed == 1
    above = encode(11, 14, [11])
    assert to.completed({DLQ: Committed(11, above)}) == {0: [10, 12, 13]}
    assert to.completed({DLQ: Committed(14)}) == {0: [10, 11, 12, 13]}, "they are not saved yet"
    to.forget({0: [10, 12, 13]})
    assert to.completed({DLQ: Committed(14)}) == {0: [11]}


class Busy(Backend):
    """Refuses one delivery, by its number, and takes every other."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.requests, self._refused = 0, refused

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.requests += 1
        if self.requests == self._refused:
            raise DestinationUnavailable("busy")
        return await super().deliver(delivery)


def test_an_attempt_ends_at_the_first_refused_delivery() -> None:
    """No later record of that partition is delivered, though one record is there twice, and none of another one."""
    places = [(1, 1), (0, 1), (0, 2), (0, 1), (0, 3), (2, 1), (3, 1)]
    letters = [letter(10 + n, record("t", partition, offset)) for n, (partition, offset) in enumerate(places)]
    backend = Busy(2)
    to = RestoredDelivery(backend, lambda one: True, everywhere)
    replies = asyncio.run(to.deliver(Delivery("g", DLQ, 1, letters, 1, "job")))
    assert [kind_of(reply) for reply in replies] == ["success", *["not taken"] * 6]
    assert (backend.got, backend.requests) == ([(P1, [1])], 2)


def test_a_topic_takes_all_or_says_why() -> None:
    """A record it does not take fails alone; a topic that does not acknowledge is waited for."""
    responses: list[Any] = [Produced(0, 1), RecordTooLarge("too large")]
    sent: list[OutgoingRecord] = []

    async def produce(records: Sequence[OutgoingRecord]) -> list[Any]:
        sent.extend(records)
        return responses

    to = CopyToTopic("copy", 1, produce, "job-2")
    earlier = [("headrace.replay", b"job-1"), ("h", None)]
    delivery = Delivery("g", P1, 1, [record("t", 1, 5, earlier), record("t", 1, 6)], 1)
    outcomes = asyncio.run(to.deliver(delivery))
    assert [kind_of(reply) for reply in outcomes] == ["success", "permanent"]
    assert sent[0].headers == [("h", None), ("headrace.replay", b"job-2"), ("headrace.replay.of", b"t:1:5")]
    assert (sent[0].partition, sent[0].timestamp_ms) == (None, 42)
    responses[1] = KafkaUnavailable("no broker")
    longer = delivery._replace(records=[*delivery.records, record("t", 1, 7)])
    responses.append(Produced(0, 5))
    assert asyncio.run(to.deliver(longer)) == [
        ACK,
        Reply("copy did not acknowledge: no broker", reached=False),
        NOT_BEGUN,
    ]
    responses[:] = responses[1:2] * 3
    with pytest.raises(DestinationUnavailable, match="did not acknowledge: no broker"):
        asyncio.run(to.deliver(longer))


def window(offsets: tuple[int, int] | None = None, partition: int | None = None, **times: int) -> Window:
    """Return the window of a replay; partition 0 holds 5 to 9, a record a second from 1,000 s on, and 1 is empty."""
    nothing, cluster = cast(Any, None), MemoryCluster({"t": 2, "other": 1})
    cluster.log(*P0).start = 5
    for offset in range(5, 10):
        cluster.append(Record(*P0, offset, (offset + 995) * 1000, None, None))
    context = RunContext(cast(Any, cluster), nothing, nothing, ManualClock(2000.0))
    replays = Replays(context, {}, InternalTopics(HeadraceConfig()))
    request = ReplayRequest(
        topic="t",
        partition=partition,
        first=offsets[0] if offsets else None,
        last=offsets[1] - 1 if offsets else None,
        **{name: moment(at) for name, at in times.items()},
        to=ReplayTarget(topic="other"),
        dry_run=True,
    )
    found = asyncio.run(replays.begin(nothing, request, "ann"))
    assert isinstance(found, DryRun)
    return msgspec.convert(found.spec["window"], Window, str_keys=True)


def test_a_window_is_offsets_that_hold_something() -> None:
    """Of the whole, a partition, offsets of it though some are gone, or a time."""
    assert window().ranges == {0: (5, 10)}
    assert window(partition=0).total == 5
    assert window((1, 7), partition=0).ranges == {0: (1, 7)}
    assert window(since=1_002_000).ranges == {0: (7, 10)}
    assert window(since=1_001_000, until=1_003_000).ranges == {0: (6, 8)}
    assert window((5, 7), partition=0).overlaps(window((6, 8), partition=0))
    assert not window((5, 7), partition=0).overlaps(window((7, 8), partition=0))


@pytest.mark.parametrize(
    ("requested", "error", "said"),
    [
        ({"partition": 1}, InvalidRequest, "has no records"),
        ({"partition": 0, "offsets": (0, 5)}, InvalidRequest, "is not in the log"),
        ({"until": 1000}, InvalidRequest, "has no records"),
        ({"since": 1_500_000}, InvalidRequest, "has no records since"),
        ({"since": 1_003_000, "until": 1_003_000}, InvalidRequest, "later than since"),
    ],
)
def test_a_window_that_makes_no_sense_is_refused(requested: dict[str, Any], error: type[Exception], said: str) -> None:
    """With a sentence that says what is there; `test_replays.yaml` has the other cases."""
    with pytest.raises(error, match=said):
        window(**requested)
