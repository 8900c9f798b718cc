from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kafka import compacted_table
from headrace.records import OutgoingRecord, TopicPartition
from headrace.runs.dead_letters import completed_offsets
from headrace.runs.dead_letters.completed_offsets import BLOCK_OFFSETS, COMPLETED_TOPIC, CompletedOffsets
from headrace_devkit.testing.memory_cluster import MemoryCluster

_offsets = st.one_of(st.integers(0, 40), st.integers(BLOCK_OFFSETS - 20, BLOCK_OFFSETS + 20), st.integers(0, 2**40))


class Cluster(MemoryCluster):
    """One log of marks, and ids of topics."""

    def __init__(self) -> None:
        super().__init__({COMPLETED_TOPIC: 1, "a.dlq": 1, "b.dlq": 1})
        self.brokers.topics["a.dlq"].id, self.brokers.topics["b.dlq"].id = "ida", "idb"

    def mark(self, records: Iterable[OutgoingRecord]) -> None:
        for record in records:
            self.write(record)

    def ended(self, topic: str = "a.dlq") -> CompletedOffsets:
        with pytest.MonkeyPatch.context() as patch:
            self.read_by(patch, compacted_table)
            made = CompletedOffsets(self, topic)  # type: ignore[arg-type]
            asyncio.run(made.load())
            return made


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(_offsets, max_size=30)), max_size=6))
def test_what_was_marked_is_found_by_another_process(steps: list[tuple[int, set[int]]]) -> None:
    """Offsets of any pattern, marked in any order, over restarts; and nothing else is."""
    admin = Cluster()
    expected: set[tuple[int, int]] = set()
    for partition, offsets in steps:
        admin.mark(admin.ended().records_for({partition: offsets}))
        expected |= {(partition, offset) for offset in offsets}
    found = admin.ended()
    near = {(p, o + step) for p, o in expected for step in (-1, 0, 1) if o + step >= 0}
    assert {place for place in near if found.is_completed(*place)} == expected
    assert not any(admin.ended("b.dlq").is_completed(*place) for place in expected)


@given(st.lists(st.tuples(st.integers(0, 3), _offsets), max_size=20), st.permutations(range(4)))
def test_no_writer_takes_back_what_another_marked(steps: list[tuple[int, int]], landing: list[int]) -> None:
    """Writers that know nothing of each other, as one that was asleep while another took over: all marks count."""
    admin = Cluster()
    writers = [admin.ended() for _ in range(4)]
    written = [[writers[n].records_for({0: [offset]})[0] for m, offset in steps if m == n] for n in range(4)]
    for writer in landing:
        admin.mark(written[writer])
    found = admin.ended()
    assert all(found.is_completed(0, offset) for _, offset in steps)


@given(st.sets(st.integers(0, 100), max_size=101), st.integers(0, 100), st.integers(0, 100))
def test_counts_and_first_left_are_those_of_the_offsets(ended: set[int], start: int, end: int) -> None:
    """Counting and skipping look at bits, and say what looking at every offset would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completed_offsets, "BLOCK_OFFSETS", 16)
        patch.setattr(completed_offsets, "_BLOCK_BYTES", 2)
        found = Cluster().ended()
        found.records_for({0: ended})
        window = range(start, end)
        assert found.completed_count(0, start, end) == len(ended & {*window})
        assert found.first_left(0, start, end) == next((o for o in window if o not in ended), end)
        assert found.completed_count(1, start, end) == 0


def test_a_topic_made_anew_has_no_marks_and_what_is_none_is_passed_over() -> None:
    """The id counts; tombstones, foreign records and broken values leave letters where they are."""
    admin = Cluster()
    admin.mark(admin.ended().records_for({0: [1, 2]}))
    bomb = zlib.compress(bytes(10_000_000))
    long = (b"ida:0:" + b"9" * 5000, zlib.compress(bytes(1024)))
    for key, value in (
        (b"ida:0:1", b"broken"),
        (b"ida:x:0", b""),
        (b"\xff", b""),
        (None, b""),
        (b"ida:0:2", bomb),
        long,
    ):
        admin.mark([OutgoingRecord(COMPLETED_TOPIC, key, value)])
    found = admin.ended()
    assert found.is_completed(0, 2)
    assert not found.is_completed(0, BLOCK_OFFSETS)
    admin.mark(found.tombstones_for_expired({TopicPartition("a.dlq", 0): BLOCK_OFFSETS}))
    assert not admin.ended().is_completed(0, 2)
    admin.brokers.topics["a.dlq"].id = "other"
    assert not admin.ended().is_completed(0, 2)
