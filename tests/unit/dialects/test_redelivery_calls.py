"""Calls for dead letters: each is judged as its consumer's own record, delivered once, marked after that, none lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.delivery.outcomes import ACK, Reply
from headrace.errors import (
    DeadLetterFailed,
    DestinationRefused,
    InvalidRequest,
    InvalidTopicName,
    KafkaUnavailable,
    LeaseTaken,
    ReadFailed,
)
from headrace.records import Header
from headrace_dialects.light4j.redelivery import Redelivery, RedeliveryRequest
from redrive_kafka import DLQ, RedeliveryHarness, install
from tests.control_harness import running
from tests.raw_server import until

FAILED = Reply("ValueError", "no")
Make = Callable[..., RedeliveryHarness]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a harness with dead letters of the records at these offsets, all in partition 0."""

    def made(*offsets: int, respond: Any = None, **settings: Any) -> RedeliveryHarness:
        harness = RedeliveryHarness(respond, **settings)
        install(harness, monkeypatch)
        for offset in offsets:
            harness.letter(offset)
        return harness

    return made


def redriven(times: int) -> list[Header]:
    return [("headrace.redrive.count", b"%d" % times)]


def fails(*bad: int, outcome: Reply = FAILED) -> Callable[[Sequence[int]], Sequence[Reply]]:
    return lambda offsets: [outcome if offset in bad else ACK for offset in offsets]


def raises(error: Exception) -> Callable[[Sequence[int]], Sequence[Reply]]:
    def respond(offsets: Sequence[int]) -> Sequence[Reply]:
        raise error

    return respond


async def test_a_batch_is_delivered_and_then_marked(make: Make) -> None:
    """Never the other way round, also while a mark is being written; and each call takes the lease and releases it."""
    harness = make(*range(30))
    harness.respond = lambda offsets: [FAILED if harness.is_marked(offset) else ACK for offset in offsets]
    counts = [(await harness.call()).records for _ in range(12)]
    assert (sum(counts), max(counts) <= 12) == (30, True), "four batches of three"
    assert (await harness.completed(), harness.written_again) == (set(range(30)), [])
    assert re.fullmatch("(lease ((deliver )+save )*release )+", " ".join([*harness.events, ""])), harness.events
    last = await harness.call()
    assert {(one.group, one.epoch) for one in harness.deliveries} == {("billing", 7)}, "the epoch of their partition"
    assert (last.status, last.topics, last.instance) == ("empty", [DLQ, "missing.dlq"], "Reactive-Replay-h")


@pytest.mark.parametrize("writes", [True, False])
async def test_a_dead_letter_that_cannot_be_written_again_is_left(make: Make, writes: bool) -> None:
    """The dead letter topic is away, or dead letters are off."""
    harness = make(1, 2, respond=fails(2), dead_letters=writes)
    harness.writer.write.side_effect = DeadLetterFailed("the topic is away")
    assert (await harness.call()).records == 1
    with pytest.raises(ReadFailed, match="call again" if writes else "dead letters are off"):
        await harness.call(timeout=100)
    assert await harness.completed() == {0}


async def test_letters_of_an_origin_that_the_consumer_does_not_read_stay(make: Make) -> None:
    """Who wrote them may not write there; they are counted, and who loops comes to an end."""
    harness = make()
    harness.letter(0, topic="p1")
    harness.letter(1, topic="p1", group="gone")
    harness.letter(2)
    harness.letter(3, topic="missing")
    first, last = await harness.call(), await harness.call()
    assert (first.records, last.records, last.status) == (1, 0, "empty")
    assert f"2 of {DLQ} left: the consumer does not read their origin, or it is not requested" in last.description


async def test_dead_letters_of_a_forged_origin_do_not_hide_those_behind_them(make: Make) -> None:
    """A call that has no time for more says so, and the next one resumes after them."""
    harness = make()
    for number in range(40):
        harness.letter(number, topic="p1")
    harness.letter(40, headers=redriven(9))
    harness.letter(41)
    assert (await harness.call()).records == 1
    read = harness.records_read
    last = await harness.call()
    assert (last.status, f"40 of {DLQ} left" in last.description) == ("empty", True)
    assert harness.records_read == read, "what was passed is not read again"
    assert (await harness.call(lastretry=True)).records == 1, "the one redriven too often was not skipped for good"
    harness.silent = True
    harness.letter(42)
    with pytest.raises(ReadFailed, match=r"0\.001 s were not enough: call again to continue"):
        await harness.call(timeout=1)


async def test_dead_letters_of_a_topic_that_was_created_again_are_delivered(make: Make) -> None:
    """The position that calls reached in the old topic does not count."""
    harness = make()
    for number in range(6):
        harness.letter(number, topic="p1")
    harness.letter(8)
    assert (await harness.call()).records == 1
    harness.brokers.delete_topic(DLQ)
    harness.brokers.create_topic(DLQ, 2)
    harness.letter(0)
    assert (await harness.call()).records == 1


async def test_two_calls_at_a_time_share_nothing(make: Make) -> None:
    """One delivers, the other is refused."""
    harness = make(0, 1)
    harness.free.clear()
    first = asyncio.ensure_future(harness.call())
    await until(lambda: harness.deliveries)
    with pytest.raises(LeaseTaken, match="another call is delivering dead letters"):
        await harness.call(lastretry=True)
    harness.free.set()
    assert ((await first).records, len(harness.deliveries)) == (2, 1)


async def test_an_outage_is_told_with_one_code(make: Make) -> None:
    """ERR12205 for Kafka and for the backend; nothing is completed."""
    harness = make(0, respond=raises(DestinationRefused("2 results for 1 record")))
    with pytest.raises(ReadFailed, match="none is lost: 2 results for 1 record"):
        await harness.call()
    harness.failure = KafkaUnavailable("no broker answers")
    with pytest.raises(ReadFailed, match="no broker answers"):
        await harness.call()
    harness.failure = None
    assert await harness.completed() == set()


async def test_a_backend_that_keeps_offsets_gets_no_dead_letter(make: Make) -> None:
    """A dead letter is an earlier record, and would reset the stored offset."""
    harness = make(0, backend={"url": "http://127.0.0.1:1", "mode": "single", "offsets_path": "/offsets"}, batch={})
    with pytest.raises(InvalidRequest, match="keeps the group's offsets"):
        await harness.call()
    assert harness.deliveries == []


def test_which_consumers_are_meant() -> None:
    """By group if it is one here, else by topic; all topics when none is named."""

    def one(group: str, **settings: Any) -> Any:
        base = {"topics": ["t"], "group": group, "backend": {"url": "http://127.0.0.1:1"}}
        return running(ReactiveConsumerConfig.model_validate({**base, **settings}))

    consumers = {
        "a": one("a", topics=["orders", "refunds"]),
        "b": one("b", topics=["orders"]),
        "c": one("c", topics=[], topic_patterns=[r"metrics\..*"]),
    }
    nothing = cast(Any, None)
    redelivery = Redelivery(nothing, consumers, "h")

    def chosen(**request: Any) -> list[tuple[str, str]]:
        return [(topic, c.group) for topic, c in redelivery.chosen(RedeliveryRequest(**request))]

    assert chosen(group="b") == [("orders", "b")]
    assert chosen(topic="orders") == [("orders", "a"), ("orders", "b")]
    assert chosen(topic=" refunds , metrics.1,", group="elsewhere") == [("refunds", "a"), ("metrics.1", "c")]
    assert chosen() == [("orders", "a"), ("orders", "b"), ("refunds", "a")]
    for wrong in ({"topic": "refunds", "group": "b"}, {"topic": "orders.dlq"}):
        with pytest.raises(InvalidTopicName):
            chosen(**wrong)
