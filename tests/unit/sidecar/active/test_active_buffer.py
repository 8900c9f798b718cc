"""The limits of one read. `test_active_machine.py` follows the records."""

from __future__ import annotations

import pytest

from headrace.records import Record
from headrace.sidecar.active.buffer import RecordBuffer
from headrace.sidecar.active.read_entries import fitting


@pytest.mark.parametrize(
    ("most", "count", "taken"), [(100, 9, [0, 1, 2]), (25, 9, [0, 1]), (5, 9, [0]), (100, 2, [0, 1]), (0, 1, [0])]
)
def test_a_read_is_bounded_and_what_is_put_back_comes_first(most: int, count: int, taken: list[int]) -> None:
    """A first record of more bytes comes alone."""
    buffer = RecordBuffer()
    records = [Record("t", 0, n, 0, None, b"", size_bytes=10) for n in range(3)]
    buffer.add(records[0].topic_partition, records)
    for _ in range(2):
        found = buffer.take(most, count)
        assert [record.offset for record in found] == taken
        assert (buffer.records, buffer.size_bytes) == (3 - len(taken), 30 - 10 * len(taken))
        buffer.put_back(found)
    assert (buffer.records, buffer.size_bytes) == (3, 30)


def test_a_response_has_at_least_one_entry_and_a_bound() -> None:
    """8 MiB of text."""
    part = "x" * 4_194_304
    for entries, count in (([], 0), ([part * 3, ""], 1), ([part, part], 2), ([part, part, "x"], 2), (["", part], 2)):
        assert fitting(entries) == entries[:count]
