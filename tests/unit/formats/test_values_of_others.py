"""What other tools may write comes out of every face, or the record is refused with the true cause."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from headrace.errors import FormatError, SchemaInvalid
from headrace.formats.choice import Codecs, SchemaChoice
from headrace.formats.plain import header_of
from headrace.formats.schema_codec import compile_schema
from headrace.functions.protocol import Schema
from headrace.functions.worker.serving import Bodies
from headrace.records import RecordBatch, TopicPartition
from headrace_pipelines.driver.value_codecs import BlockingRegistry
from headrace_queries.engine.decoding import Decoder
from tests.unit.formats.conftest import Setting
from yaml_table import table

ID = 7
FORMATS = {"AVRO": "avro", "JSON": "jsonschema", "PROTOBUF": "protobuf"}
PROTO = "".join(f'import "google/protobuf/{name}.proto"; ' for name in ("any", "timestamp", "duration", "struct"))


def texts_of(references: Mapping[str, Any]) -> dict[str, str]:
    return {name: text if isinstance(text, str) else json.dumps(text) for name, text in references.items()}


def outcome(show: Callable[[], Any]) -> str:
    try:
        found = show()
    except FormatError as cause:
        return f"!{cause.description}"
    return found if isinstance(found, str) else str(found, "utf-8")


async def faces(serving: Any, kind: str, text: str, references: Mapping[str, Any], payload: bytes) -> list[str]:
    """Return what HTTP and push, a function, a table and a pipeline make of a value."""
    data, texts = header_of(ID) + payload, texts_of(references)
    async with serving() as it:
        for at, (name, other) in enumerate(texts.items()):
            it.server.add(name, 20 + at, other, kind)
        it.server.add("t-value", ID, text, kind, [(name, name) for name in texts])
        codecs = Codecs(it.client)
        reader = codecs.for_reading(FORMATS[kind])
        await reader.prepare([data])
        bodies = Bodies()
        bodies.learn(Schema(ID, kind, text, texts))
        decode: Any = bodies.decoder(FORMATS[kind])
        rows = Decoder("string", FORMATS[kind], codecs)
        batch = RecordBatch(TopicPartition("t", 0), [0], [0], [None], [data], None, [9])
        await rows.prepare([batch])
        [row] = rows.to_arrow([batch]).to_pylist()
    spark = BlockingRegistry.__new__(BlockingRegistry)

    def in_pipeline() -> bytes:
        spark._codecs = {ID: compile_schema(kind, text, texts)}
        return spark.decode(data)

    made = outcome(in_pipeline)
    table_text = row["value"] or f"!{row['problem']}"
    assert made == table_text or made[1:] in table_text, "a pipeline reads as a table does"
    return [outcome(lambda: reader.decode(data)), outcome(lambda: repr(decode(data))), table_text]


def agree(found: str, expected: str) -> bool:
    return expected[1:] in found if expected.startswith("!") else found == expected


@pytest.mark.parametrize("row", table(__file__, "avro"))
async def test_each_value_of_avro_comes_out_or_is_named(
    serving: Callable[..., AbstractAsyncContextManager[Setting]], row: list[Any]
) -> None:
    """Smallest, largest and "never": JSON has the plain number, a handler the same if Python has no such value."""
    schema, data, text, *others = row
    python, cell = (*others, *(text, text)[len(others) :])
    record = json.dumps({"type": "record", "name": "R", "fields": [{"name": "f", "type": schema}]})
    found = await faces(serving, "AVRO", record, {}, bytes.fromhex(data))
    whole = [each if each[0] == "!" else f'{{"f":{each}}}' for each in (text, cell)]
    assert agree(found[0], whole[0])
    assert agree(found[1], str(python) if str(python)[0] == "!" else f"{{'f': {python}}}")
    assert agree(found[2], whole[1])


@pytest.mark.parametrize("syntax", ["proto3", "proto2"])
async def test_each_value_of_protobuf_comes_out_or_is_named(
    serving: Callable[..., AbstractAsyncContextManager[Setting]], syntax: str
) -> None:
    """Also what proto2 lets pass."""
    for fields, data, text, *cell in table(__file__, "protobuf" if syntax == "proto3" else syntax):
        source = f'syntax = "{syntax}"; {PROTO} message M {{ {fields} }}'
        found = await faces(serving, "PROTOBUF", source, {}, b"\0" + base64.b64decode(data))
        assert agree(found[0], text), (fields, found)
        assert agree(found[1], text if text[0] == "!" else repr(json.loads(text)))
        assert agree(found[2], (*cell, text)[0])


@pytest.mark.parametrize(("name", "data", "text", "python"), table(__file__, "plain"))
async def test_each_value_of_the_other_formats_comes_out_or_is_named(
    serving: Callable[..., AbstractAsyncContextManager[Setting]], name: str, data: str, text: str, python: str
) -> None:
    """Texts stay as they are; a handler gets what Python has, and no number becomes infinite."""
    stored = data.encode("latin-1")
    if name == "jsonschema":
        found = await faces(serving, "JSON", '{"properties":{"n":{"type":"number"}}}', {}, stored)
    else:
        async with serving() as it:
            reader = Codecs(it.client).for_reading(name)
        decode: Any = Bodies().decoder(name) or bytes
        found = [outcome(lambda: reader.decode(stored)), outcome(lambda: repr(decode(stored)))]
    assert agree(found[0], text)
    assert agree(found[1], python)


@pytest.mark.parametrize("row", table(__file__, "schemas"))
async def test_each_schema_that_a_registry_accepts_is_read(
    serving: Callable[..., AbstractAsyncContextManager[Setting]], row: list[Any]
) -> None:
    """Whatever the order, nesting and names of references; writing says what it needs and does not have."""
    kind, schema, references, data, text, *refusal = row
    source = schema if isinstance(schema, str) else json.dumps(schema)
    found = await faces(serving, kind, source, references, bytes.fromhex(data))
    assert agree(found[0], text)
    assert all((shown[0] == "!") == (text[0] == "!") for shown in found)
    async with serving() as it:
        it.server.add("t-value", ID, source, kind, [(name, name) for name in references])
        for at, (name, other) in enumerate(texts_of(references).items()):
            it.server.add(name, 20 + at, other, kind)
        codecs = Codecs(it.client)
        write = functools.partial(codecs.for_writing, SchemaChoice(FORMATS[kind]), "json", "t-value")
        if refusal:
            with pytest.raises(SchemaInvalid) as raised:
                await write()
            assert refusal[0] in raised.value.description
        elif text[0] != "!":
            written = (await write()).codec.encode(text.encode())
            reader = codecs.for_reading(FORMATS[kind])
            await reader.prepare([written])
            assert reader.decode(written) == text.encode()
