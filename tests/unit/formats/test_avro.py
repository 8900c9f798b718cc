"""Avro: its JSON encoding in both directions, plain Python values, and bytes that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DecodeError, EncodeError, SchemaInvalid
from headrace.formats.avro import AvroCodec
from yaml_table import table

TABLE = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
ANIMAL = table(__file__, "animal")
IDENT = "12345678-1234-5678-1234-567812345678"
LIST = '{"type":"record","name":"L","fields":[{"name":"b","type":"bytes"},{"name":"next","type":["null","L"]}]}'


def animal(**changes: Any) -> dict[str, Any]:
    return {
        "legs": 4,
        "born": {"long": 1_700_000_000_000},
        "photo": "\u00ff\u0000",
        "tag": "ab",
        "weight": {"double": 0.1},
        "note": None,
        "price": "\u0001\u0002",
        "ident": IDENT,
        "size": 2.5,
    } | changes


@pytest.fixture(scope="module")
def schema() -> AvroCodec:
    return AvroCodec(json.dumps(ANIMAL))


def encode(schema: AvroCodec, value: Any) -> bytes:
    return schema.encode(json.dumps(value).encode())


@pytest.mark.parametrize(
    "changes",
    [
        *({"note": note} for note in (None, {"string": "GOOD"}, {"zoo.Mood": "GOOD"}, {"zoo.Tag": "\u00e9\u0000"})),
        *({"note": note} for note in ({"array": [None, {"int": 7}]}, {"map": {"a": True}})),
        *({"weight": weight} for weight in ({"float": 3.4028235e38}, {"double": 0.5}, {"int": 1}, {"long": 1})),
        {"weight": {"double": "-Infinity"}},
        {"size": "NaN"},
    ],
)
def test_every_branch_of_a_union_comes_back_under_its_name(schema: AvroCodec, changes: Any) -> None:
    """Branches that share a Python type are not mixed up; what is no number is a string, as JSON has none for it."""
    value = animal(**changes)
    assert json.loads(schema.decode(encode(schema, value))) == value


@pytest.mark.parametrize(("kind", "default", "expected"), TABLE["avro defaults"])
def test_a_field_that_is_absent_takes_its_default(kind: Any, default: Any, expected: Any) -> None:
    """Over HTTP and from a pipeline, also of bytes, which are text in a schema; within others too."""
    fields = [{"name": "f", "type": kind, "default": default}, {"name": "g", "type": "int"}]
    codec = AvroCodec(json.dumps({"type": "record", "name": "R", "fields": fields}))
    written = encode(codec, {"g": 1})
    assert json.loads(codec.decode(written)) == {"f": expected, "g": 1}
    assert codec.encode_python({"g": 1}) == written


@pytest.mark.parametrize(("changes", "place"), TABLE["avro values"])
def test_a_value_that_does_not_fit_is_refused_with_its_place(
    schema: AvroCodec, changes: dict[str, Any], place: str
) -> None:
    """Nothing is bent into shape, and the error says where, without the value, which may be a secret."""
    with pytest.raises(EncodeError) as raised:
        encode(schema, animal(**changes))
    assert place in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_a_missing_field_without_default_is_named(schema: AvroCodec) -> None:
    """The error names the field."""
    with pytest.raises(EncodeError, match=r"field legs of zoo\.Animal is missing"):
        encode(schema, {})


@given(data=st.data())
def test_bytes_that_were_cut_or_changed_end_as_a_decode_error_or_a_value(data: st.DataObject) -> None:
    """No payload makes anything else happen."""
    schema = AvroCodec(json.dumps(ANIMAL))
    payload = bytearray(encode(schema, animal(note={"array": [{"int": 7}]})))
    del payload[data.draw(st.integers(1, len(payload))) :]
    for index in data.draw(st.lists(st.integers(0, len(payload) - 1), max_size=3)):
        payload[index] = data.draw(st.integers(0, 255))
    for decode in (schema.decode, schema.decode_python):
        try:
            decode(bytes(payload))
        except DecodeError as error:
            assert "Avro" in str(error) or str(error).startswith("$")  # or the path of a value


def test_a_million_nested_values_do_not_end_the_process() -> None:
    """The compiled reader would overflow the C stack on this payload."""
    with pytest.raises(DecodeError):
        AvroCodec(LIST).decode_python(b"\x00\x02" * 1_000_000)


@pytest.mark.parametrize("text", ["", "{", '"nope"', "5", "null", '{"type":"record"}', '{"type":{"type":"string"}}'])
def test_text_that_is_not_a_schema_is_rejected(text: str) -> None:
    """Every failure of the parser is one error."""
    with pytest.raises(SchemaInvalid):
        AvroCodec(text)


def plain_codec(schema: Any) -> AvroCodec:
    return AvroCodec(json.dumps(schema), plain_unions=True)


@pytest.mark.parametrize(("schema", "value", "wrapped"), TABLE["avro plain unions"])
def test_unions_without_their_branch_names_are_the_same_bytes(schema: Any, value: Any, wrapped: Any) -> None:
    """By switch, as the original's `useNoWrappingAvro`: written by the first branch that fits, and read plain."""
    plain, usual = plain_codec(schema), AvroCodec(json.dumps(schema))
    data = plain.encode(json.dumps(value).encode())
    assert data == usual.encode(json.dumps(wrapped).encode())
    assert json.loads(plain.decode(data)) == value


@pytest.mark.parametrize(("branch", "value", "says"), TABLE["avro values of no branch"])
def test_a_value_of_no_branch_is_rejected(branch: Any, value: bytes, says: str) -> None:
    """The error names the branches; where one is chosen, the place in it."""
    with pytest.raises(EncodeError) as raised:
        plain_codec(["null", branch]).encode(json.dumps(value).encode())
    assert says in str(raised.value)


def test_deep_values_of_types_that_hold_themselves_are_looked_at_once() -> None:
    """Trying each branch at each level would never finish."""
    following = {"name": "next", "default": None}
    second = {"type": "record", "name": "B", "fields": [{**following, "type": ["null", "A", "B"]}]}
    first = {"type": "record", "name": "A", "fields": [{**following, "type": ["null", "A", second]}]}
    with pytest.raises(EncodeError, match="expected one of null, A, B, got a number"):
        plain_codec(first).encode(b'{"next":' * 60 + b"1" + b"}" * 60)
