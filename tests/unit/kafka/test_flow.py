"""Which partitions are paused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.config.consumers import FlowControl
from headrace.kafka.fetch_flow import FetchFlowControl
from headrace.records import TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def flow(records: int = 10_000, size: int = 10_000_000) -> FetchFlowControl:
    made = FetchFlowControl(FlowControl(max_records=records, max_bytes=size))
    made.assigned({A: 1, B: 1})
    return made


def test_without_room_for_a_while_everything_is_paused_and_polling_goes_on() -> None:
    """With every partition paused a poll brings no records, so the membership lives."""
    made = flow()
    made.fetched(A, 10_000, 10, 0)
    made.changes(0.0)
    assert made.changes(1.0) == ([A, B], [])
    assert not made.must_wait
    made.released(A, 1, 1000, 1, 2)
    assert made.changes(2) == ([], [B])
    made.released(A, 1, 7000, 5, 3)
    assert made.changes(3) == ([], [A])


def test_a_partition_that_hangs_leaves_room_for_the_others() -> None:
    """However fast it filled up: the other one goes on, is paused when its own part is full, and goes on again."""
    made = flow()
    made.fetched(A, 7600, 10, 0)
    assert made.changes(0) == ([], [])
    assert made.must_wait
    assert made.changes(1) == ([A], [])
    for now in range(2, 100):
        assert not made.must_wait
        made.fetched(B, 2399, 10, now)
        assert made.changes(now) == ([], [])
        made.released(B, 1, 2399, 10, now)
        assert made.changes(now) == ([], [])
    made.fetched(B, 2390, 10, 100)
    made.fetched(B, 500, 10, 100)
    assert made.changes(100) == ([B], [])
    made.released(B, 1, 2000, 10, 101)
    assert made.changes(101) == ([], [B])


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([A, B]), st.booleans(), st.integers(1, 4000), st.floats(0, 2)),
        min_size=1,
        max_size=60,
    )
)
def test_the_budget_holds_and_no_partition_is_paused_for_ever(
    steps: list[tuple[TopicPartition, bool, int, float]],
) -> None:
    """Nothing is polled beyond the budget but the last poll, and once everything has ended all are resumed."""
    made, paused, held, now = flow(), set(), {A: 0, B: 0}, 0.0
    for partition, take, count, seconds in steps:
        now += seconds
        if take and partition not in paused and not made.must_wait:
            made.fetched(partition, count, count, now)
            held[partition] += count
        else:
            part = min(count, held[partition])
            made.released(partition, 1, part, part, now)
            held[partition] -= part
        pause, resume = made.changes(now)
        paused = (paused | set(pause)) - set(resume)
        assert made.records == sum(held.values())
        assert made.records < 10_000 + 4000
    for partition, count in held.items():
        made.released(partition, 1, count, count, now)
    _, resume = made.changes(now)
    assert not paused - set(resume)
