"""Calls for dead letters: each is judged as its consumer's own record, delivered once, marked after that, none lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from redrive_kafka import DLQ, RedeliveryHarness, install

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.control.dead_letters import pages
from headrace.control.runs.redelivery import Redelivery, RedeliveryRequest
from headrace.delivery.outcomes import ACK, Reply
from headrace.errors import (
    DeadLetterFailed,
    DestinationRefused,
    DestinationUnavailable,
    InvalidRequest,
    InvalidTopicName,
    KafkaUnavailable,
    LeaseLost,
    LeaseTaken,
    ReadFailed,
)
from headrace.records import Header, TopicPartition
from headrace.testing import ManualClock
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
    """Never the other way round; and each call takes the lease and releases it."""
    harness = make(*range(5))
    assert [(await harness.call()).records for _ in range(3)] == [3, 2, 0]
    whole = ["lease", "deliver", "save", "release"]
    assert harness.events == [*whole, *whole, "lease", "release"]
    last = await harness.call()
    assert {(one.group, one.epoch) for one in harness.deliveries} == {("billing", 7)}, "the epoch of their partition"
    assert (last.status, last.topics, last.instance) == ("empty", [DLQ, "missing.dlq"], "Reactive-Replay-h")


async def test_records_come_in_their_order_and_each_once(make: Make) -> None:
    """Two dead letters of one record, as a crash leaves them, are one delivery, and both are completed."""
    harness = make(8, batch={})
    harness.letter(5, attempts=6)
    harness.letter(8)
    assert (await harness.call()).records == 3
    (delivery,) = harness.deliveries
    assert ([record.offset for record in delivery.records], delivery.attempt) == ([5, 8], 7)
    assert await harness.completed() == {0, 1, 2}


@pytest.mark.parametrize("writes", [True, False])
async def test_a_dead_letter_that_cannot_be_written_again_is_left(make: Make, writes: bool) -> None:
    """The dead letter topic is away, or dead letters are off: the description says why."""
    harness = make(1, 2, respond=fails(2), dead_letters=writes)
    harness.writer.write.side_effect = DeadLetterFailed("the topic is away")
    response = await harness.call()
    assert (response.status, await harness.completed()) == ("rolledBack", {0})
    assert ("1 left (the topic is away)" if writes else "dead letters are off") in response.description


async def test_completed_records_do_not_come_again_because_others_are_left(make: Make) -> None:
    """One of two new dead letters is not written; or the backend is away for the second half of a delivery."""
    harness = make(1, 2, 3, respond=fails(2, 3))
    harness.writer.write.side_effect = DeadLetterFailed("no room", missing=[1])
    assert "1 of them as dead letters again, 1 left" in (await harness.call()).description
    assert await harness.completed() == {0, 1}

    def away_after_the_first_half(offsets: Sequence[int]) -> Sequence[Reply]:
        if 2 not in offsets:
            return [ACK] * len(offsets)
        if len(offsets) == 2:
            raise DestinationUnavailable("away")
        return [Reply("HTTP 422", "no", 422)] * len(offsets)

    harness = make(*range(4), respond=away_after_the_first_half, batch={})
    assert "2 left (away)" in (await harness.call()).description
    assert await harness.completed() == {0, 1}


@pytest.mark.parametrize(("bad", "left"), [((1,), 0), ((1, 2), 4), ((1, 2, 3, 4), 4)])
async def test_a_threshold_rolls_the_delivery_back(make: Make, bad: tuple[int, ...], left: int) -> None:
    """As in the consumer: above the percentage nothing is completed; up to it a failed record is a dead letter."""
    harness = make(1, 2, 3, 4, respond=fails(*bad), batch={}, retry={"rollback_threshold_percent": 25})
    response = await harness.call()
    assert (response.status, response.records) == ("rolledBack" if left else "processed", 4)
    assert (len(await harness.completed()), len(harness.written_again)) == (4 - left, 0 if left else 1)
    harness.respond = fails()
    assert (await harness.call()).records == left


async def test_a_response_for_all_is_cut_in_halves(make: Make) -> None:
    """Until the one to blame is found."""
    status = Reply("HTTP 422", "no", 422)
    harness = make(*range(8), respond=lambda offsets: [status if 3 in offsets else ACK] * len(offsets), batch={})
    assert "8 completed, 1 of them as dead letters again;" in (await harness.call()).description
    assert [len(offsets) for offsets in harness.delivered] == [8, 4, 2, 2, 1, 1, 4]
    assert harness.written_again == [3]


async def test_a_policy_may_skip_or_blame_the_backend(make: Make) -> None:
    """A skipped record is completed; one that waits for its backend is not."""
    harness = make(1, respond=fails(1), retry={"errors": {"ValueError": "skip"}})
    assert (await harness.call()).status == "processed"
    harness = make(1, 2, respond=fails(1), retry={"errors": {"ValueError": "unavailable"}})
    assert "1 completed, 1 left (ValueError)" in (await harness.call()).description
    assert await harness.completed() == {1}


async def test_letters_of_an_origin_that_the_consumer_does_not_read_stay(make: Make) -> None:
    """Who wrote them may not write there; they are counted, and who loops comes to an end."""
    harness = make()
    harness.letter(0, topic="p1")
    harness.letter(1, topic="p1", group="gone")
    harness.letter(2)
    harness.letter(3, topic="missing")
    first, last = await harness.call(), await harness.call()
    assert (first.records, last.records, last.status) == (2, 0, "empty")
    expected = f"2 of {DLQ} left: they name an origin that the consumer does not read"
    assert expected in first.description and expected in last.description


async def test_many_dead_letters_of_a_forged_origin_do_not_hide_those_behind_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that reads nothing else in its time says so, and the next one resumes behind them."""
    harness = make()
    for number in range(5):
        harness.letter(number, topic="p1", partition=number % 2)
    harness.letter(5, headers=redriven(9), partition=1)
    harness.letter(7, partition=1)
    monkeypatch.setattr(pages, "_FIRST_ROUND", 1)
    harness.seconds_per_read = 2.0
    for count in (2, 4, 5):
        with pytest.raises(
            ReadFailed, match=rf"{count} of {DLQ} left: they name an origin .* call again to resume after"
        ):
            await harness.call(timeout=1)
    response = await harness.call(timeout=1)
    assert (response.records, response.status) == (1, "processed")
    assert f"5 of {DLQ} left" in response.description
    harness.seconds_per_read = 0.0
    assert (await harness.call()).status == "empty"
    assert (await harness.call(lastretry=True)).records == 1, "the one redriven too often was not skipped for good"


async def test_dead_letters_that_were_passed_over_are_delivered_when_the_consumer_reads_their_origin(
    make: Make,
) -> None:
    """The consumer was registered again with one more topic; those of a consumer that is gone are delivered too."""
    harness = make(4)
    harness.letter(0, topic="p1")
    harness.letter(2, group="other")
    assert [(await harness.call()).records for _ in range(2)] == [1, 0]
    harness.consumers["billing"] = harness.consumer(topics=["orders", "p1"])
    assert (await harness.call(topic="orders")).records == 1
    del harness.consumers["other"]
    assert (await harness.call(topic="orders")).records == 1


async def test_dead_letters_of_a_topic_that_was_created_again_are_delivered(make: Make) -> None:
    """The position that calls reached in the old topic does not count."""
    harness = make()
    for number in range(6):
        harness.letter(number, topic="p1")
    harness.letter(8)
    assert (await harness.call()).records == 1
    del harness.logs[TopicPartition(DLQ, 0)]
    harness.ids = {DLQ: "another"}
    harness.letter(0)
    assert (await harness.call()).records == 1


async def test_a_caller_that_loops_until_nothing_is_left_ends(make: Make) -> None:
    """A dead letter that was redriven too often is left, and the description says so; the last retry takes it."""
    harness = make()
    for number, times in enumerate((4, 5, 9)):
        harness.letter(number, headers=redriven(times))
    assert (await harness.call()).records == 1
    kept = await harness.call()
    assert (kept.status, kept.records) == ("empty", 0)
    assert "redriven 5 times" in kept.description
    assert (await harness.call(lastretry=True)).records == 2


@pytest.mark.parametrize(("limit_bytes", "counts"), [(8, [2, 2, 1, 0]), (3, [1, 1, 1, 1, 1, 0])])
async def test_a_batch_ends_at_its_bytes(make: Make, limit_bytes: int, counts: list[int]) -> None:
    """Each dead letter has 4 bytes; one always fits."""
    harness = make(*range(5), batch={"max_bytes": limit_bytes})
    assert [(await harness.call()).records for _ in counts] == counts


async def test_marks_that_are_not_written_leave_the_letters(make: Make) -> None:
    """The call fails, its marks are forgotten, and the dead letters come again: twice rather than never."""
    harness = make(0, 1)
    harness.fail_at = {1}
    with pytest.raises(DeadLetterFailed, match="no response"):
        await harness.call()
    assert (await harness.call()).records == 2
    assert harness.events == ["lease", "deliver", "release", "lease", "deliver", "save", "release"]


async def test_a_lease_that_is_lost_stops_the_call(make: Make) -> None:
    """Somebody else may mark by now, so nothing is delivered; the next call takes it again."""
    harness = make(0)
    harness.lease_checks = 0
    with pytest.raises(LeaseLost):
        await harness.call()
    assert harness.deliveries == []
    harness.lease_checks = 9
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
    """ERR12205 for Kafka and for the backend; nothing is completed. An invalid response leaves all, too."""
    harness = make(0, respond=raises(DestinationRefused("2 results for 1 record")))
    assert "1 left (2 results for 1 record)" in (await harness.call()).description
    harness.respond = raises(DestinationUnavailable("waiting for the backend"))
    with pytest.raises(ReadFailed, match="none is lost: waiting for the backend"):
        await harness.call()
    harness.respond, harness.silent = fails(), True
    with pytest.raises(ReadFailed, match=rf"no dead letter of {DLQ} arrived within 0.001 s"):
        await harness.call(timeout=1)
    harness.silent, harness.failure = False, KafkaUnavailable("no broker answers")
    with pytest.raises(ReadFailed, match="no broker answers"):
        await harness.call()
    harness.failure = None
    assert (await harness.call()).records == 1


async def test_a_backend_that_keeps_offsets_gets_no_dead_letter(make: Make) -> None:
    """A dead letter is an earlier record, and would reset the stored offset."""
    harness = make(0, backend={"url": "http://127.0.0.1:1", "mode": "single", "offsets_path": "/offsets"}, batch={})
    with pytest.raises(InvalidRequest, match="keeps the group's offsets"):
        await harness.call()
    assert harness.deliveries == []


async def test_a_topic_without_letters_costs_no_lease(make: Make) -> None:
    """A call for all topics does not join a group for each."""
    harness = make()
    assert (await harness.call()).status == "empty"
    assert harness.events == []


async def test_completed_dead_letters_are_not_read_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead letter that stays at the start does not let every call read all completed ones behind it."""
    monkeypatch.setattr(pages, "_FIRST_ROUND", 10)
    harness = make()
    harness.letter(0, group="other")
    for number in range(1, 200):
        harness.letter(number)
    harness.mark(range(1, 198))
    assert (await harness.call()).records == 2
    assert (harness.reads, harness.records_read) == (2, 12)


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
    redelivery = Redelivery(nothing, consumers, nothing, ManualClock(), "h")

    def chosen(**request: Any) -> list[tuple[str, str]]:
        return [(topic, c.group) for topic, c in redelivery.chosen(RedeliveryRequest(**request))]

    assert chosen(group="b") == [("orders", "b")]
    assert chosen(topic="orders") == [("orders", "a"), ("orders", "b")]
    assert chosen(topic=" refunds , metrics.1,", group="elsewhere") == [("refunds", "a"), ("metrics.1", "c")]
    assert chosen() == [("orders", "a"), ("orders", "b"), ("refunds", "a")]
    for wrong in ({"topic": "refunds", "group": "b"}, {"topic": "orders.dlq"}):
        with pytest.raises(InvalidTopicName):
            chosen(**wrong)
