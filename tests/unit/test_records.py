"""Records as columns: a batch is the list of its records, whatever is done with it."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.consumers import BatchConfig
from headrace.delivery.backlog import Backlog
from headrace.records import Header, Record, RecordBatch, TopicPartition

P0 = TopicPartition("t", 3)
BYTES = st.none() | st.binary(max_size=9)
HEADERS: Any = st.none() | st.lists(st.tuples(st.text(max_size=2), BYTES), max_size=2)
SIZES = st.integers(0, 9)
Row = tuple[Any, ...]


def rows_of(records: Any) -> list[Row]:
    """Return every field of records, the headers as they are read."""
    return [
        (*r.topic_partition, r.offset, r.timestamp_ms, r.key, r.value, r.headers, r.size_bytes, type(r))
        for r in records
    ]


@st.composite
def plain_lists(draw: st.DrawFn, most: int = 12) -> list[Record]:
    """Draw records of one partition, with holes between their offsets."""
    offsets = sorted(draw(st.sets(st.integers(0, 99), max_size=most)))
    all_headers: list[list[Header] | None] = [draw(HEADERS) for _ in offsets]
    return [
        Record(*P0, offset, draw(st.integers(-1, 5)), draw(BYTES), draw(BYTES), lambda h=headers: h, draw(SIZES))  # type: ignore[misc]
        for offset, headers in zip(offsets, all_headers, strict=True)
    ]


BOUNDS = st.none() | st.integers(-14, 14)


@given(plain_lists(), BOUNDS, BOUNDS, st.sampled_from([None, 1, 2]))
def test_a_batch_is_the_list_of_its_records(
    records: list[Record], start: int | None, stop: int | None, step: int | None
) -> None:
    """By index, by iteration, and in every slice; sizes, columns and a search agree with it."""
    part, batch = slice(start, stop, step), RecordBatch.of(records)
    for plain, found in ((records, batch), (records[part], batch[part])):
        assert rows_of(found) == rows_of(plain)
        assert rows_of([found[index] for index in range(-len(plain), len(plain))]) == rows_of([*plain, *plain])
        assert (len(found), found.size_bytes) == (len(plain), sum(record.size_bytes for record in plain))
        assert (found.keys, found.values) == ([r.key for r in plain], [r.value for r in plain])
        assert (found.offsets, found.sizes) == ([r.offset for r in plain], [r.size_bytes for r in plain])
        assert found.timestamps_ms == [r.timestamp_ms for r in plain]
        assert [each or [] for each in found.headers or [None] * len(plain)] == [r.headers for r in plain]
        for offset in range(100):
            same = [r for r in plain if r.offset == offset]
            assert rows_of(filter(None, [found.find(offset)])) == rows_of(same)
        with pytest.raises(IndexError):
            found[len(plain)]
    assert RecordBatch.of(batch) is batch
    chosen = [index for index in (start, stop, 0) if index is not None and -len(records) <= index < len(records)]
    assert rows_of(batch.select(chosen)) == rows_of([records[index] for index in chosen])


@given(plain_lists(), st.lists(st.integers(0, 12)))
def test_parts_that_are_joined_are_the_whole(records: list[Record], cuts: list[int]) -> None:
    """Wherever it was cut, also where no part or only one of them has headers."""
    bounds = [0, *sorted(cuts), len(records)]
    parts = [RecordBatch.of(records)[a:b] for a, b in pairwise(bounds)]
    whole = RecordBatch.join(parts)
    assert rows_of(whole) == rows_of(records)
    assert whole.size_bytes == sum(part.size_bytes for part in parts)


def test_a_reader_may_change_its_list_of_headers() -> None:
    """Other readers do not see the change."""
    batch = RecordBatch.of([Record(*P0, 1, 0, None, None, lambda: [("a", b"1")]), Record(*P0, 2, 0, None, None)])
    for record in (batch[0], *batch, *batch[:1]):
        record.headers.append(("b", b"2"))
    assert [record.headers for record in batch] == [[("a", b"1")], []]


def test_a_slice_keeps_no_other_record_in_memory() -> None:
    """One that is delivered again and again must not hold what was polled with it."""
    value = b"large" * 1000
    part, uses = RecordBatch.of([Record(*P0, n, 0, None, value) for n in range(9)])[:2], sys.getrefcount(value)
    del part
    assert uses - sys.getrefcount(value) == 2


@given(st.lists(plain_lists(6), max_size=5), st.integers(1, 9), st.integers(1, 40), st.data())
def test_deliveries_of_a_backlog_are_as_large_as_possible(
    added: list[list[Record]], most_records: int, most_bytes: int, data: st.DataObject
) -> None:
    """The next records in their order, over the bounds of batches; the first of a delivery whatever its size."""
    records = [
        Record(*P0, n, 0, record.key, None, record.read_headers, record.size_bytes)
        for n, record in enumerate(record for part in added for record in part)
    ]
    context: Any = SimpleNamespace(batch=BatchConfig(max_bytes=most_bytes), most_records=most_records)
    backlog, waiting, first = Backlog(context), list[Record](), 0
    for part in (*added, None):
        if part is not None:
            backlog.add(RecordBatch.of(records[first : first + len(part)]))
            waiting += records[first : first + len(part)]
            first += len(part)
        while waiting and (part is None or data.draw(st.booleans())):
            expected = waiting[:1]
            for record in waiting[1:most_records]:
                if sum(each.size_bytes for each in (*expected, record)) > most_bytes:
                    break
                expected.append(record)
            assert rows_of(backlog.take()) == rows_of(expected)
            waiting = waiting[len(expected) :]
        assert backlog.ready_records == len(waiting)
        here = [record.offset for record in records if backlog.find(record.offset)]
        assert here == [record.offset for record in waiting]
