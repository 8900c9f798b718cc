"""Entries of a read whose keys and values have no chosen format."""

from __future__ import annotations

import json

import pytest

from headrace.config.kafka import SchemaRegistryConfig
from headrace.errors import RegistryUnavailable
from headrace.formats.choice import Codecs
from headrace.formats.registry import RegisteredSchema, SchemaRegistry
from headrace.records import RecordBatch, TopicPartition
from headrace.sidecar.active.read_entries import fitting, write_found
from headrace_devkit.testing import ManualClock


class Registry(SchemaRegistry):
    """Has the schema 2, and does not respond for others."""

    async def by_id(self, schema_id: int) -> RegisteredSchema:
        if schema_id != 2:
            raise RegistryUnavailable("away")
        return RegisteredSchema(2, "AVRO", '{"type":"record","name":"R","fields":[{"name":"n","type":"int"}]}')


@pytest.mark.parametrize(
    ("data", "format_name", "value"),
    [
        (b"\0\0\0\0\x02\x0e", "schema 2", {"n": 7}),
        (b"\0\0\0\0\x02", "string", "\0\0\0\0\x02"),
        (b"\0\0\0\0\x01\xff", "binary", "AAAAAAH/"),
        (b'{"a": 1.10}', "string", '{"a": 1.10}'),
        (b"", "string", ""),
        (b"\xff", "binary", "/w=="),
        (None, "null", None),
    ],
)
async def test_each_key_and_value_has_the_format_that_fits(data: bytes | None, format_name: str, value: object) -> None:
    """By its schema if the registry has that, else as text exactly as it is stored, else in base64."""
    codecs = Codecs(Registry(SchemaRegistryConfig(), ManualClock()))
    batch = RecordBatch(TopicPartition("t", 0), [1, 2], [5, 5], [data, b"k"], [b"v", data], None, [0, 0])
    first, second = json.loads(fitting(await write_found(codecs, [batch]))[0] + b"]")
    assert (first.get("key"), first["keyFormat"], first["value"], first["valueFormat"]) == (
        value,
        format_name,
        "v",
        "string",
    )
    assert (second["key"], second["keyFormat"]) == ("k", "string")
    assert (second.get("value"), second["valueFormat"]) == (value, format_name)
    assert ("key" in first, "value" in second) == (data is not None, data is not None)
