"""SliceReader of topics: which records are read, what their columns are, and which records meet a condition."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from yaml_table import table

from headrace.config.kafka import SchemaRegistryConfig
from headrace.errors import HeadraceError
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.queries.inference import format_of, inferred, merged
from headrace.queries.record_filter import RecordFilter
from headrace.queries.slice import newest
from headrace.records import Record, TopicPartition
from headrace.runtime import SystemClock

VALUES = [
    '{"amount": 5, "place": {"city": "Bonn"}}',
    '{"amount": -500, "name": "late"}',
    "no object",
    None,
    '{"Amount": 300, "tags": ["a"]}',
]


def matching(condition: str, value_format: str = "string") -> list[int]:
    """Return the offsets of the records of VALUES that meet a condition."""

    def headers() -> list[tuple[str, bytes | None]]:
        return [("source", b"web")]

    async def find() -> list[int]:
        codecs = Codecs(SchemaRegistry(SchemaRegistryConfig(), SystemClock()))
        found = RecordFilter(condition, codecs, "string", value_format, print)
        data = [value.encode() if value else None for value in VALUES]
        records = [Record("t", at % 2, at, 1_700_000_000_000, b"k%d" % at, one, headers) for at, one in enumerate(data)]
        return [record.offset for record in await found.matching(records)]

    return asyncio.run(find())


@pytest.mark.parametrize(("condition", "offsets"), table(__file__, "conditions"))
def test_records_that_meet_a_condition(condition: str, offsets: list[int]) -> None:
    """A field that a record lacks is null, as is the field of a value that is not an object."""
    assert matching(condition) == offsets


@pytest.mark.parametrize(("condition", "value_format", "problem"), table(__file__, "refused_conditions"))
def test_a_condition_that_is_refused(condition: str, value_format: str, problem: str) -> None:
    """It is one condition over the columns of a record, and their values are of the format."""
    with pytest.raises(HeadraceError, match=problem):
        matching(condition, value_format)


@pytest.mark.parametrize(("payloads", "of_keys", "expected"), table(__file__, "formats"))
def test_formats_by_content(payloads: list[str], of_keys: bool, expected: str) -> None:
    """Framed bytes name their schema; some text that is not JSON does not hide the others; keys are text."""
    assert format_of([bytes.fromhex(data) if data else None for data in payloads], of_keys=of_keys) == expected


@pytest.mark.parametrize(("structure", "expected"), table(__file__, "structures"))
def test_columns_by_content(structure: Any, expected: dict[str, str] | None) -> None:
    """Integers have a sign; what SQL cannot tell apart, or would be thousands of columns, stays JSON."""
    columns = inferred(structure)
    assert (columns and {column.name: column.type for column in columns}) == expected
    assert inferred({f"f{number}": "VARCHAR" for number in range(300)}) is None


@pytest.mark.parametrize(("one", "other", "expected"), table(__file__, "merged"))
def test_columns_of_a_slice_are_those_of_its_parts(one: Any, other: Any, expected: Any) -> None:
    """A large slice is looked at in parts; the order of the parts does not matter."""
    assert merged(one, other) == merged(other, one) == expected
    assert merged({}, one) == one


@pytest.mark.parametrize(("sizes", "most", "expected"), table(__file__, "shares"))
def test_the_newest_records_are_shared_by_the_partitions(sizes: list[int], most: int, expected: list[int]) -> None:
    """Small partitions leave their share to others, and the sum is never more."""
    partitions = [TopicPartition("t", number) for number in range(len(sizes))]
    ends = {partition: 100 + size for partition, size in zip(partitions, sizes, strict=True)}
    starts = newest(dict.fromkeys(partitions, 100), ends, most)
    assert [ends[partition] - starts[partition] for partition in partitions] == expected
