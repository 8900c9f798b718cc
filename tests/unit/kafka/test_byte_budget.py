"""How many bytes may wait, in all and for one partition."""

from __future__ import annotations

import pytest

from headrace.errors import ProducerQueueFull
from headrace.kafka.producer import ByteBudget, key_of_request
from headrace.records import OutgoingRecord

A, B, C = ("t", 0), ("t", 1), ("u", -1)


def test_a_lane_and_the_whole_are_bounded() -> None:
    """A refused request counts nothing, and what is released may be taken again."""
    budget = ByteBudget(100, 0.5)
    first = budget.take(A, 30)
    with pytest.raises(ProducerQueueFull, match="30 bytes for partition 0 of topic t are awaiting"):
        budget.take(A, 30)
    budget.release(first)
    budget.take(A, 30)
    budget = ByteBudget(100, 1.0)
    for lane in (A, C):
        budget.take(lane, 50)
    for lane in (B, C):
        with pytest.raises(ProducerQueueFull, match="max_pending_bytes"):
            budget.take(lane, 1)
    assert budget.pending_bytes == 100


def test_a_request_larger_than_a_limit_passes_alone() -> None:
    """Or it could never be sent."""
    budget = ByteBudget(100, 0.5)
    budget.release(budget.take(A, 500))
    budget.take(A, 80)
    assert budget.pending_bytes == 80


def record(key: bytes | None = None, partition: int | None = None) -> OutgoingRecord:
    return OutgoingRecord("t", key, b"v", None, partition)


@pytest.mark.parametrize(
    ("records", "partitions", "lane"),
    [
        ([record(partition=2)], 3, 2),
        ([record(partition=2)] * 3, 3, 2),
        ([record(partition=2), record(partition=1)], 3, -1),
        ([record(partition=2), record()], 3, -1),
        ([record()], 3, -1),
        ([record(b"a")], 10, 4),
        ([record(b"")], 10, 1),
        ([record(b"a")], 0, -1),
        ([record(b"a")] * 2, 10, -1),
    ],
)
def test_a_request_to_one_partition_has_its_lane(records: list[OutgoingRecord], partitions: int, lane: int) -> None:
    """Named, or found from the one key as the client finds it; everything else counts for the topic."""
    assert key_of_request(records, partitions) == ("t", lane)
