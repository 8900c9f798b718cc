"""SliceReader of topics: which records are read, what their columns are, and which records meet a condition."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.errors import HeadraceError, SchemaNotFound
from headrace.formats.choice import Codecs
from headrace.formats.registry import RegisteredSchema, SchemaRegistry
from headrace.records import Record, TopicPartition
from headrace.runtime import SystemClock
from headrace_queries.inference import inferred
from headrace_queries.record_filter import RecordFilter
from headrace_queries.slice import SliceReader, SliceSpec, newest
from yaml_table import table

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


class Registry(SchemaRegistry):
    """Has the schema 2 only."""

    async def by_id(self, schema_id: int) -> RegisteredSchema:
        if schema_id != 2:
            raise SchemaNotFound("it is not registered")
        return RegisteredSchema(2, "AVRO", '{"type":"record","name":"R","fields":[{"name":"n","type":"int"}]}')


@pytest.mark.parametrize(
    ("condition", "offsets"),
    [
        ("value.n > 5", [0, 1]),
        ("value.n = 7 AND key = 'k'", [1]),
        ("value IS NULL", [3, 4, 5]),
        ("value LIKE '%text'", [2]),
    ],
)
async def test_each_value_is_seen_in_the_format_that_fits(condition: str, offsets: list[int]) -> None:
    """By its schema, or as text; other bytes are null, also those whose schema is not there."""
    codecs = Codecs(Registry(SchemaRegistryConfig(), SystemClock()))
    found = RecordFilter(condition, codecs, "auto", "auto", print)
    values = [b'{"n": 6}', b"\0\0\0\0\x02\x0e", b"a text", b"\xff", b"\0\0\0\0\x01\xff", None]
    records = [Record("t", 0, at, 1_700_000_000_000, b"k", data) for at, data in enumerate(values)]
    assert [record.offset for record in await found.matching(records)] == offsets


@pytest.mark.parametrize(("structure", "expected"), table(__file__, "structures"))
def test_columns_by_content(structure: Any, expected: dict[str, str] | None) -> None:
    """Integers have a sign; what SQL cannot tell apart, or would be thousands of columns, stays JSON."""
    for count in (1, 100):
        columns, _ = inferred({json.dumps(structure): count})
        assert (columns and {column.name: column.type for column in columns}) == expected
    assert inferred({json.dumps({f"f{number}": "VARCHAR" for number in range(300)}): 1}) == (None, 0)


GOOD = [b'{"id": %d, "place": {"city": "Bonn"}, "tags": ["a"], "at": "2026-01-01"}' % n for n in range(20)]
FIELDS = ("id", "place", "tags", "at")
SHOWN = {
    "an object for a text": b'{"id": 7, "at": {"year": 2026}}',
    "a name of SQL": b'{"id": 7, "from": 5}',
    "no number": b'{"id": NaN}',
    "twice a field": b'{"id": 7, "id": "x"}',
    "no value": None,
}
LEFT_OUT = {
    "another kind of field": b'{"id": "x", "place": {"city": "Bonn"}, "tags": ["a"], "at": "2026-01-01"}',
    "a list for an object": b'{"id": 7, "place": [1]}',
    "no text": b'{"id": 7, "at": "\\ud800"}',
    "no JSON": b"\xff\xfe",
}
IN_PART = {
    "names that differ in case": b'{"id": 7, "ID": 8}',
    "hundreds of fields": b'{"id": 7, %s}' % b", ".join(b'"f%d": 1' % n for n in range(500)),
    "a thousand levels": b'{"id": 7, "deep": ' + b"[" * 1_000 + b"]" * 1_000 + b"}",
}
ODD = SHOWN | LEFT_OUT | IN_PART


@pytest.mark.parametrize("odd", ODD)
def test_one_record_does_not_change_what_the_others_are(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """Wherever it is: their rows are as without it, and what is left out of it is told."""
    before, _ = read_rows(monkeypatch, GOOD)
    for at in 0, 10, 20:
        rows, told = read_rows(monkeypatch, [*GOOD[:at], ODD[odd], *GOOD[at:]])
        others = [{name: row[name] for name in FIELDS} for row in rows if row["offset"] != at]
        assert others == [{name: row[name] for name in FIELDS} for row in before]
        assert (len(told), len(rows)) == (0 if odd in SHOWN else 1, 20 if odd in LEFT_OUT else 21)


def read_rows(monkeypatch: pytest.MonkeyPatch, values: list[bytes | None]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what `headrace sql` finds in a topic of one partition with these values, and what it says of them."""

    async def window(*_: object) -> AsyncIterator[list[Record]]:
        yield [Record("t", 0, at, 1_700_000_000_000, b"k", value) for at, value in enumerate(values)]

    monkeypatch.setattr("headrace_queries.slice.read_window", window)

    async def read() -> tuple[SliceReader, list[str]]:
        registry = SchemaRegistry(SchemaRegistryConfig(), SystemClock())
        reader = SliceReader(Codecs(registry), registry)
        return reader, await reader.add(KafkaConfig(), SliceSpec("t", {}, {}))

    reader, told = asyncio.run(read())
    return [json.loads(row) for row in reader.rows('SELECT * FROM t ORDER BY "offset"')[1]], told


@pytest.mark.parametrize(("sizes", "most", "expected"), table(__file__, "shares"))
def test_the_newest_records_are_shared_by_the_partitions(sizes: list[int], most: int, expected: list[int]) -> None:
    """Small partitions leave their share to others, and the sum is never more."""
    partitions = [TopicPartition("t", number) for number in range(len(sizes))]
    ends = {partition: 100 + size for partition, size in zip(partitions, sizes, strict=True)}
    starts = newest(dict.fromkeys(partitions, 100), ends, most)
    assert [ends[partition] - starts[partition] for partition in partitions] == expected
