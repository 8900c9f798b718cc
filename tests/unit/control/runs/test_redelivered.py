"""Dead letters of one origin: judged as their consumer's own records are, each delivered once, none lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.control.running_consumer import RunningConsumer
from headrace.control.runs.redelivery import PartitionRedelivery, Redelivered, Redelivery, RedeliveryRequest, Restored
from headrace.delivery.dead_letter import headers_of, require_origin, restored
from headrace.delivery.outcomes import ACK, DeadLetter, Delivery, Reply
from headrace.errors import DeadLetterFailed, DestinationRefused, DestinationUnavailable, InvalidTopicName
from headrace.records import Record, TopicPartition
from headrace.testing import ManualClock
from tests.control_world import running

FAILED = Reply("ValueError", "no")


class House:
    """A backend that answers by the offset, and a dead letter topic."""

    def __init__(self, response: Callable[[Sequence[int]], Sequence[Reply]], **retry: Any) -> None:
        self.response = response
        self.deliveries: list[Delivery] = []
        self.written: list[DeadLetter] = []
        self.broken = False
        self.config = consumer_config(retry=retry)

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.deliveries.append(delivery)
        return self.response([record.offset for record in delivery.records])

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        if self.broken:
            raise DeadLetterFailed("the topic is away")
        self.written += letters

    def redeliver(
        self, letters: Sequence[Restored], last_retry: bool = False, writes: bool = True
    ) -> tuple[list[Restored], Redelivered]:
        done = Redelivered(letters[-1])
        consumer = running(self.config, self, dead_letters=self if writes else None)
        delivery = Delivery("g", TopicPartition("t", 0), 0, [], 1, "replay")
        one = PartitionRedelivery(consumer, delivery, done, ManualClock(), last_retry=last_retry)
        return asyncio.run(one.deliver(letters)), done

    @property
    def sizes(self) -> list[int]:
        return [len(delivery.records) for delivery in self.deliveries]


def consumer_config(**settings: Any) -> ReactiveConsumerConfig:
    base = {"topics": ["t"], "group": "g", "backend": {"url": "http://127.0.0.1:1"}}
    return ReactiveConsumerConfig.model_validate({**base, **settings})


def letter(offset: int, at: int, attempts: int = 3) -> Restored:
    failed = DeadLetter(Record("t", 0, offset, 5, None, b"v"), "g", attempts, FAILED, 1.0, 2.0)
    stored = Record("t.dlq", 0, at, 9, None, b"v", lambda: headers_of(failed))
    return Restored(stored, require_origin(stored), restored(stored))


def fails(*bad: int, outcome: Reply = FAILED) -> Callable[[Sequence[int]], Sequence[Reply]]:
    return lambda offsets: [outcome if offset in bad else ACK for offset in offsets]


def test_records_come_in_their_order_and_each_once() -> None:
    """Two letters of one record, as a crash leaves them, are one delivery, and both end."""
    house = House(fails())
    ended, done = house.redeliver([letter(8, 0), letter(5, 1, attempts=4), letter(8, 2)])
    (delivery,) = house.deliveries
    assert [record.offset for record in delivery.records] == [5, 8]
    assert (delivery.group, delivery.partition, delivery.attempt, delivery.replay) == ("g", ("t", 0), 5, "replay")
    assert sorted(one.record.offset for one in ended) == [0, 1, 2]
    assert (done.completed, done.again, done.left) == (3, 0, 0)


@pytest.mark.parametrize("writes", [True, False])
def test_what_cannot_be_kept_has_not_ended(writes: bool) -> None:
    """The dead letter topic is away, or dead letters are off: the letter stays, and it is said why."""
    house = House(fails(2))
    house.broken = True
    ended, done = house.redeliver([letter(1, 1), letter(2, 2)], writes=writes)
    assert [one.was.offset for one in ended] == [1]
    assert (done.completed, done.left) == (1, 1)
    assert ("away" if writes else "dead letters are off") in done.why


def test_what_has_ended_does_not_come_again_because_another_has_not() -> None:
    """One of two new dead letters is not written; or the backend is away for the second half of a delivery."""

    class OneMissing(House):
        async def write(self, letters: Sequence[DeadLetter]) -> None:
            self.written += letters[:1]
            raise DeadLetterFailed("no room", missing=[1])

    ended, done = OneMissing(fails(2, 3)).redeliver([letter(n, n) for n in (1, 2, 3)])
    assert [one.was.offset for one in ended] == [1, 2]
    assert (done.again, done.left) == (1, 1)

    def away_after_the_first_half(offsets: Sequence[int]) -> Sequence[Reply]:
        if 2 not in offsets:
            return [ACK] * len(offsets)
        if len(offsets) == 2:
            raise DestinationUnavailable("away")
        return [Reply("HTTP 422", "no", 422)] * len(offsets)

    ended, done = House(away_after_the_first_half).redeliver([letter(n, n) for n in range(4)])
    assert [one.was.offset for one in ended] == [0, 1]
    assert (done.left, done.why) == (2, "away")


@pytest.mark.parametrize(("bad", "left"), [((1,), 0), ((1, 2), 4), ((1, 2, 3, 4), 4)])
def test_a_threshold_rolls_the_delivery_back(bad: tuple[int, ...], left: int) -> None:
    """As in the consumer: more than the percentage, also when all fail; and up to it what failed is a letter."""
    house = House(fails(*bad), rollback_threshold_percent=25)
    ended, done = house.redeliver([letter(n, n) for n in (1, 2, 3, 4)])
    assert (len(ended), done.left, len(house.written)) == (4 - left, left, 0 if left else 1)


def test_a_response_for_all_is_cut_in_halves() -> None:
    """Until the one to blame is found."""
    status = Reply("HTTP 422", "no", 422)
    house = House(lambda offsets: [status if 3 in offsets else ACK] * len(offsets))
    ended, done = house.redeliver([letter(n, n) for n in range(8)])
    assert house.sizes == [8, 4, 2, 2, 1, 1, 4]
    assert (len(ended), done.again, [one.record.offset for one in house.written]) == (8, 1, [3])


def test_a_policy_may_skip_or_blame_the_backend() -> None:
    """A skipped record has ended; one that waits for its backend has not."""
    house = House(fails(1), errors={"ValueError": "skip"})
    assert house.redeliver([letter(1, 1)])[1].completed == 1
    house = House(fails(1), errors={"ValueError": "unavailable"})
    ended, done = house.redeliver([letter(1, 1), letter(2, 2)])
    assert ([one.was.offset for one in ended], done.left, done.why) == ([2], 1, "ValueError")


def test_a_response_that_is_none_leaves_all() -> None:
    """And a backend that is away is the caller's to tell."""

    def refuse(offsets: Sequence[int]) -> Sequence[Reply]:
        raise DestinationRefused("2 results for 1 record")

    def away(offsets: Sequence[int]) -> Sequence[Reply]:
        raise DestinationUnavailable("away")

    assert House(refuse).redeliver([letter(1, 1)])[1].why == "2 results for 1 record"
    with pytest.raises(DestinationUnavailable):
        House(away).redeliver([letter(1, 1)])


def test_which_consumers_are_meant() -> None:
    """By group if it is one here, else by topic; all topics when none is named."""

    def one(group: str, **settings: Any) -> RunningConsumer:
        return running(consumer_config(group=group, **settings))

    consumers = {
        "a": one("a", topics=["orders", "refunds"]),
        "b": one("b", topics=["orders"]),
        "c": one("c", topics=[], topic_patterns=[r"metrics\..*"]),
    }
    nothing = cast(Any, None)
    redelivery = Redelivery(nothing, consumers, nothing, ManualClock(), "h")

    def chosen(**asked: Any) -> list[tuple[str, str]]:
        return [(topic, c.group) for topic, c in redelivery.chosen(RedeliveryRequest(**asked))]

    assert chosen(group="b") == [("orders", "b")]
    assert chosen(topic="orders") == [("orders", "a"), ("orders", "b")]
    assert chosen(topic=" refunds , metrics.1,", group="elsewhere") == [("refunds", "a"), ("metrics.1", "c")]
    assert chosen() == [("orders", "a"), ("orders", "b"), ("refunds", "a")]
    for wrong in ({"topic": "refunds", "group": "b"}, {"topic": "orders.dlq"}):
        with pytest.raises(InvalidTopicName):
            chosen(**wrong)
