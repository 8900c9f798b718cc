"""The checker of exactly-once functions finds what was planted in its topics, and nothing else."""

from __future__ import annotations

import pytest

from headrace.records import Record, TopicPartition
from tests.exactly_once import by_id, violations

INPUTS = [Record("t", partition, offset, 0, b"k", b"v") for partition in (0, 1) for offset in (0, 1)]
COMMITTED = {TopicPartition("t", 0): 2, TopicPartition("t", 1): 1}


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ("0-0 1-0 0-1", ""),
        ("0-0 1-0", "output b't-0-1' is missing"),
        ("0-0 0-0 0-1 1-0", "output b't-0-0' is visible 2 times"),
        ("0-0 0-1 1-0 1-1", "output b't-1-1' is visible, and the offset of its record is not committed"),
        ("0-0 0-1 1-0 7-7", "output b't-7-7' belongs to no record"),
        ("0-1 0-0 1-0", "the output of t-0 offset 0 follows that of 1"),
    ],
)
def test_each_violation_is_found_and_named(outputs: str, said: str) -> None:
    """Outputs are named by the places of their records."""
    found = [Record("out", 0, n, 0, None, f"t-{place}".encode()) for n, place in enumerate(outputs.split())]
    wrong = violations(INPUTS, found, COMMITTED, by_id, lane_of=lambda record: record.partition)
    assert wrong == [said] * bool(said)
