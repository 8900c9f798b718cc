"""Which partitions are paused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.config.model import FlowControl
from headrace.kafka.flow import Flow
from headrace.records import TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def flow(records: int = 10_000, size: int = 10_000_000) -> Flow:
    made = Flow(FlowControl(max_records=records, max_bytes=size))
    made.assigned([A, B])
    return made


def test_nothing_is_paused_while_there_is_room() -> None:
    """Half full is fine."""
    made = flow()
    made.taken(A, 4999, 10)
    assert made.changes() == ([], [])


def test_a_partition_beyond_its_share_is_paused_and_the_other_is_not() -> None:
    """One slow partition cannot take the room of the others."""
    made = flow()
    made.taken(A, 6000, 10)
    made.taken(B, 10, 10)
    assert made.changes() == ([A], [])


def test_a_paused_partition_is_resumed_when_it_has_room_again() -> None:
    """Each change is said once."""
    made = flow()
    made.taken(A, 6000, 10)
    made.changes()
    assert made.changes() == ((), ())
    made.released(A, 4000, 5)
    assert made.changes() == ([], [A])


def test_bytes_count_too() -> None:
    """Few large records fill the budget as many small ones do."""
    made = flow()
    made.taken(A, 1, 6_000_000)
    assert made.changes() == ([A], [])


def test_late_releases_of_a_revoked_partition_are_ignored() -> None:
    """After a revoke nothing of it is counted."""
    made = flow()
    made.taken(A, 6000, 10)
    made.revoked([A])
    made.released(A, 6000, 10)
    assert (made.records, made.bytes) == (0, 0)


@given(steps=st.lists(st.tuples(st.sampled_from([A, B]), st.booleans(), st.integers(1, 4000)), min_size=1, max_size=60))
def test_no_partition_is_paused_for_ever(steps: list[tuple[TopicPartition, bool, int]]) -> None:
    """Whatever happened, once everything has ended every paused partition was resumed."""
    made, paused, held = flow(), set(), {A: 0, B: 0}
    for partition, take, count in steps:
        if take:
            made.taken(partition, count, count)
            held[partition] += count
        else:
            part = min(count, held[partition])
            made.released(partition, part, part)
            held[partition] -= part
        pause, resume = made.changes()
        paused = (paused | set(pause)) - set(resume)
        assert made.records < 10_000 or paused
    for partition, count in held.items():
        made.released(partition, count, count)
    _, resume = made.changes()
    assert not paused - set(resume)
