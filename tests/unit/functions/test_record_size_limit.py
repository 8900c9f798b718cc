"""Records above `fetchMax`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace.config.consumers import RetryConfig
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.delivery.policy import action_of
from headrace.functions.destination import RecordSizeLimit
from headrace.records import Record, TopicPartition


class Echo:
    """A destination whose reply names the offset."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.seen.append([record.offset for record in delivery.records])
        return [Reply(str(record.offset)) for record in delivery.records]


def delivery(*sizes: int) -> Delivery:
    records = [Record("t", 0, offset, 0, None, None, size_bytes=size) for offset, size in enumerate(sizes)]
    return Delivery("g", TopicPartition("t", 0), 1, records, 1)


@given(st.lists(st.integers(0, 20), max_size=12))
def test_only_small_records_are_delivered_and_replies_keep_their_order(sizes: list[int]) -> None:
    """One call for all of them, none if there is none."""
    inner = Echo()
    replies = asyncio.run(RecordSizeLimit(inner, 10).deliver(delivery(*sizes)))
    small = [offset for offset, size in enumerate(sizes) if size <= 10]
    assert inner.seen == ([small] if small or not sizes else [])
    assert [reply.error for reply in replies] == [
        str(offset) if size <= 10 else "RecordTooLarge" for offset, size in enumerate(sizes)
    ]


async def test_a_large_record_goes_to_the_policy() -> None:
    """It is a dead letter at once, or what `retry.errors` says; it proves nothing about the workers."""
    (reply,) = await RecordSizeLimit(Echo(), 10).deliver(delivery(11))
    assert (reply.reached, reply.reason) == (False, "key and value have 11 bytes, more than fetchMax (10)")
    assert action_of(reply, RetryConfig()) == "dead_letter"
    assert action_of(reply, RetryConfig(errors={"RecordTooLarge": "skip"})) == "skip"
    assert reply is not ACK
