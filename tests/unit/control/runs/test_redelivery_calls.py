"""Calls for dead letters: what is read, when it is marked, and how long a topic is kept; without Kafka."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import pytest

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.kafka import KafkaConfig
from headrace.control.dead_letters import completed_offsets, pages
from headrace.control.running_consumer import RunningConsumer
from headrace.control.runs import redelivery as module
from headrace.control.runs.redelivery import Redelivery, RedeliveryRequest, RedeliveryResponse
from headrace.delivery.dead_letter import headers_of
from headrace.delivery.outcomes import ACK, DeadLetter, Delivery, Reply
from headrace.errors import (
    DeadLetterFailed,
    DestinationUnavailable,
    InvalidRequest,
    KafkaUnavailable,
    LeaseLost,
    ReadFailed,
)
from headrace.records import Header, Record, TopicPartition
from headrace.testing import ManualClock
from headrace.testing.memory_cluster import MemoryCluster
from tests.control_world import running

FAILED = Reply("ValueError", "no")


def letter_at(offset: int, group: str = "g", size: int = 1, redrives: int = 0, topic: str = "t") -> Record:
    own: list[Header] = [("headrace.redrive.count", b"%d" % redrives)]
    failed = DeadLetter(Record(topic, 0, 1000 + offset, 5, None, b"v", own.copy), group, 3, FAILED, 1.0, 2.0)
    headers = headers_of(failed) if group else []
    return Record("t.dlq", offset % 2, offset // 2, 9, None, b"v", lambda: headers, size)


class World(MemoryCluster):
    """A dead letter topic of two partitions, marks, leases and a backend; what happens is written down in order."""

    config = KafkaConfig()

    def __init__(self, letters: Sequence[Record]) -> None:
        super().__init__({"t.dlq": 2})
        for letter in letters:
            self.append(letter)
        self.ended: set[tuple[int, int]] = set()
        self.log: list[str] = []
        self.taken = self.silent = self.save_fails = False
        self.refusal: Exception | None = None
        self.clock = ManualClock()
        self.lost = asyncio.Event()
        self.holder = "somebody"
        self.reads = self.read_records = 0
        self.seconds_per_read = 0.0
        self.epochs: list[tuple[str, int]] = []
        """Group and epoch of each delivery."""

    @property
    def topic_id(self) -> str:
        return self.ids["t.dlq"]

    async def read(self, kafka: KafkaConfig, starts: Any, ends: Any) -> AsyncGenerator[list[Record], None]:
        self.reads += 1
        if self.silent:
            await asyncio.Event().wait()
        await self.clock.advance(self.seconds_per_read)
        async for batch in super().read(kafka, starts, ends):
            self.read_records += len(batch)
            yield batch

    def lease(self, kafka: Any, admin: Any, name: str, clock: Any, *, source: str) -> Any:
        assert (name, source) == ("redrive.t.dlq", "t.dlq")  # the one that redrives and replays take
        self.log.append("lease")
        self.lost = asyncio.Event()
        return self

    async def acquire(self, limit_seconds: float) -> bool:
        return not self.taken

    async def check(self) -> None:
        if self.lost.is_set():
            raise LeaseLost("another may have it")

    async def release(self) -> None:
        self.log.append("release")

    async def prepare(self, produce: Any) -> None:
        """Is there."""

    async def load(self, *, settled: bool = False) -> None:
        self.log.append("load")

    def is_completed(self, partition: int, offset: int) -> bool:
        return (partition, offset) in self.ended

    def first_left(self, partition: int, start: int, end: int) -> int:
        return next((o for o in range(start, end) if not self.is_completed(partition, o)), end)

    async def save(self, produce: Any, ended: Mapping[int, Iterable[int]]) -> None:
        if self.save_fails:
            raise DeadLetterFailed("completed dead letters are not written")
        found = {(partition, offset) for partition, offsets in ended.items() for offset in offsets}
        self.ended |= found
        self.log.append(f"save {len(found)}")

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        if self.refusal:
            raise self.refusal
        self.log.append(f"deliver {len(delivery.records)}")
        self.epochs.append((delivery.group, delivery.epoch))
        return [ACK] * len(delivery.records)


Play = Callable[[World], Any]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Give the service in a world, and what asks it once."""

    @contextlib.asynccontextmanager
    async def run(world: World) -> AsyncIterator[tuple[Redelivery, Callable[..., Any]]]:
        monkeypatch.setattr(completed_offsets, "Lease", world.lease)
        monkeypatch.setattr(module, "CompletedOffsets", lambda *_: world)
        monkeypatch.setattr(pages, "read_window", world.read)
        consumers = {name: consumer(world, group=name) for name in ("g", "other")}
        keeping = {"url": "http://127.0.0.1:1", "mode": "single", "offsets_path": "/offsets"}
        consumers["keeps"] = consumer(world, group="keeps", backend=keeping, batch={})
        anything = cast(Any, world)
        redelivery = Redelivery(anything, consumers, anything, world.clock, "h")

        async def ask(**asked: Any) -> RedeliveryResponse:
            return await redelivery.run(RedeliveryRequest(**{"group": "g", **asked}))

        yield redelivery, ask

    return run


def consumer(world: World, **settings: Any) -> RunningConsumer:
    base = {"topics": ["t", "missing"], "backend": {"url": "http://127.0.0.1:1"}}
    batch = {"max_records": 3, "max_bytes": 100}
    config = ReactiveConsumerConfig.model_validate({**base, "batch": batch, **settings})
    no_replay = "its backend keeps offsets" if config.backend.offsets_path else ""
    found = running(config, world, admin=world, no_replay=no_replay)
    found.pump.on_assigned({TopicPartition("t", 0): 7}, {})
    return found


async def test_a_batch_is_delivered_and_then_marked(play: Play) -> None:
    """Never the other way round; and each call takes the lease and releases it."""
    world = World([letter_at(n) for n in range(5)])
    async with play(world) as (_, ask):
        assert [(await ask()).records for _ in range(3)] == [3, 2, 0]
        one, two = ("deliver 3", "save 3"), ("deliver 2", "save 2")
        assert world.log == [*around(*one), *around(*two), *around()]
        last = await ask()
        assert world.epochs == [("g", 7)] * 2, "the live one of the partition they came from"
        assert (last.status, last.topics, last.instance) == ("empty", ["t.dlq", "missing.dlq"], "Reactive-Replay-h")


def around(*steps: str) -> list[str]:
    """Return what a call does that takes the lease."""
    return ["lease", "load", *steps, "release"]


async def test_letters_of_an_origin_that_the_consumer_does_not_read_stay(play: Play) -> None:
    """Who wrote them may not write there; they are counted, and who loops comes to an end."""
    forged = [letter_at(0, topic="p1"), letter_at(1, "gone", topic="p1")]
    world = World([*forged, letter_at(2), letter_at(3, topic="missing")])
    async with play(world) as (_, ask):
        first, last = await ask(), await ask()
        assert (first.records, last.records, last.status) == (2, 0, "empty")
        said = "2 of t.dlq left: they name an origin that the consumer does not read"
        assert said in first.description and said in last.description


async def test_many_dead_letters_of_a_forged_origin_do_not_hide_those_behind_them(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that reads nothing else in its time says so, and the next one resumes behind them."""
    world = World([*(letter_at(n, topic="p1") for n in range(5)), letter_at(5, redrives=9), letter_at(7)])
    monkeypatch.setattr(pages, "_FIRST_ROUND", 1)
    world.seconds_per_read = 2.0
    async with play(world) as (_, ask):
        for count in (2, 4, 5):
            with pytest.raises(
                ReadFailed, match=rf"{count} of t\.dlq left: they name an origin .* call again to resume"
            ):
                await ask(timeout=1)
        response = await ask(timeout=1)
        assert (response.records, response.status) == (1, "processed")
        assert "5 of t.dlq left" in response.description
        world.seconds_per_read = 0.0
        assert (await ask()).status == "empty"
        assert (await ask(lastretry=True)).records == 1, "the one that came back too often was not passed over for good"


async def test_dead_letters_that_were_passed_over_are_delivered_when_the_consumer_reads_their_origin(
    play: Play,
) -> None:
    """The consumer was registered anew with one more topic; those of a consumer that is gone are delivered too."""
    world = World([letter_at(0, topic="p1"), letter_at(2, "other"), letter_at(4)])
    async with play(world) as (redelivery, ask):
        assert [(await ask()).records for _ in range(2)] == [1, 0]
        consumers = cast(dict[str, RunningConsumer], redelivery._consumers)
        consumers["g"] = consumer(world, group="g", topics=["t", "p1"])
        assert (await ask(topic="t")).records == 1
        del consumers["other"]
        assert (await ask(topic="t")).records == 1


async def test_dead_letters_of_a_topic_that_was_created_again_are_delivered(play: Play) -> None:
    """How far calls came in the one before counts no more."""
    world = World([*(letter_at(n, topic="p1") for n in range(6)), letter_at(8)])
    async with play(world) as (_, ask):
        assert (await ask()).records == 1
        world.logs, world.ids = {TopicPartition("t.dlq", 0): [letter_at(0)]}, {"t.dlq": "another"}
        world.ended.clear()
        assert (await ask()).records == 1


async def test_who_loops_until_nothing_is_left_comes_to_an_end(play: Play) -> None:
    """A letter whose record came back too often is kept back, and it is said; the last retry takes it."""
    world = World([letter_at(0, redrives=4), letter_at(2, redrives=5), letter_at(4, redrives=9)])
    async with play(world) as (_, ask):
        assert (await ask()).records == 1
        kept = await ask()
        assert (kept.status, kept.records) == ("empty", 0)
        assert "redriven 5 times" in kept.description
        assert (await ask(lastretry=True)).records == 2


async def test_a_batch_ends_at_its_bytes(play: Play) -> None:
    """One letter always fits."""
    world = World([letter_at(n, size=60) for n in range(3)] + [letter_at(4, size=1000)])
    async with play(world) as (_, ask):
        assert [(await ask()).records for _ in range(5)] == [1, 1, 1, 1, 0]


async def test_marks_that_are_not_written_leave_the_letters(play: Play) -> None:
    """The call fails, its marks are forgotten, and the letters come again: twice rather than never."""
    world = World([letter_at(n) for n in range(2)])
    world.save_fails = True
    async with play(world) as (_, ask):
        with pytest.raises(DeadLetterFailed, match="are not written"):
            await ask()
        world.save_fails = False
        assert (await ask()).records == 2
        assert world.log == [*around("deliver 2"), *around("deliver 2", "save 2")]


async def test_a_lease_that_is_lost_stops_the_call(play: Play) -> None:
    """Somebody else may mark by now, so nothing is delivered; the next call takes it anew."""
    world = World([letter_at(0)])
    async with play(world) as (_, ask):
        check, world.check = world.check, lose(world)  # type: ignore[method-assign]
        with pytest.raises(LeaseLost):
            await ask()
        world.check = check  # type: ignore[method-assign]
        assert (await ask()).records == 1
        assert world.log == [*around(), *around("deliver 1", "save 1")]


def lose(world: World) -> Any:
    async def check() -> None:
        world.lost.set()
        raise LeaseLost("another may have it")

    return check


async def test_who_is_away_is_said_with_one_code(play: Play) -> None:
    """ERR12205 for Kafka and for the backend; nothing has ended by it."""
    world = World([letter_at(0)])
    async with play(world) as (_, ask):
        world.refusal = DestinationUnavailable("waiting for the backend")
        with pytest.raises(ReadFailed, match="none is lost: waiting for the backend"):
            await ask()
        world.refusal, world.silent = None, True
        with pytest.raises(ReadFailed, match=r"no dead letter of t\.dlq arrived within 0.001 s"):
            await ask(timeout=1)
        world.silent, world.failure = False, KafkaUnavailable("no broker answers")
        with pytest.raises(ReadFailed, match="no broker answers"):
            await ask()
        world.failure = None
        assert (await ask()).records == 1


async def test_a_backend_that_keeps_offsets_is_left_alone(play: Play) -> None:
    """A letter is an earlier record, and would move what it has stored."""
    world = World([letter_at(0, "keeps")])
    async with play(world) as (_, ask):
        with pytest.raises(InvalidRequest, match="keeps the group's offsets"):
            await ask(group="keeps")
        assert (await ask(timeout=0)).status == "empty"
        assert "deliver 1" not in world.log


async def test_a_topic_without_letters_costs_no_lease(play: Play) -> None:
    """Whoever asks for all topics does not join a group for each."""
    world = World([])
    async with play(world) as (_, ask):
        assert (await ask()).status == "empty"
    assert world.log == []


async def test_what_has_ended_is_gone_past(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """A letter that stays at the start does not let every call read all that ended behind it."""
    monkeypatch.setattr(pages, "_FIRST_ROUND", 10)
    world = World([letter_at(0, "other"), *(letter_at(n) for n in range(2, 400, 2))])
    world.ended = {(0, offset) for offset in range(1, 198)}
    async with play(world) as (_, ask):
        response = await ask()
        assert response.records == 2
        assert (world.reads, world.read_records) == (2, 12)
