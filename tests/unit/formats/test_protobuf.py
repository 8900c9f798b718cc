"""Protobuf: its JSON mapping both ways, checked against the library's own, and the place of a type in its file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DecodeError, EncodeError, SchemaInvalid
from headrace.formats.protobuf import ProtobufCodec
from yaml_table import table

TABLE = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
ALL = table(__file__, "all")
CODEC = ProtobufCodec(ALL, {})
ORDER: Any = GetMessageClass(CODEC._file.message_types_by_name["Order"])


def rest(text: str) -> str:
    return f'syntax = "proto3"; package shop; {text}'


def encode(value: object, codec: ProtobufCodec = CODEC) -> bytes:
    return codec.encode(json.dumps(value).encode())


line = st.fixed_dictionaries({}, optional={"what": st.text(max_size=5), "count": st.integers(-(2**31), 2**31 - 1)})
orders = st.fixed_dictionaries(
    {},
    optional={
        "id": st.integers(-(2**63), 2**63 - 1).map(str) | st.integers(-(2**63), 2**63 - 1),
        "small": st.integers(0, 2**32 - 1),
        "large": st.integers(0, 2**64 - 1).map(str),
        "price": st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(["NaN", "Infinity", "-Infinity"]),
        "weight": st.floats(width=32, allow_nan=False, allow_infinity=False),
        "paid": st.booleans(),
        "buyerName": st.text(max_size=9),
        "seal": st.binary(max_size=9).map(lambda data: base64.b64encode(data).decode()),
        "state": st.sampled_from(["OPEN", "PAID", 0, 1, 7]),
        "lines": st.lists(line, max_size=3),
        "byName": st.dictionaries(st.text(max_size=3), line, max_size=3),
        "counts": st.dictionaries(st.integers(-9, 9).map(str), st.integers(-9, 9).map(str), max_size=3),
        "flags": st.dictionaries(st.sampled_from(["true", "false"]), st.text(max_size=3)),
        "letter": st.none() | st.text(max_size=3),
        "maybe": st.none() | st.integers(0, 9),
        "at": st.just("2024-02-29T23:59:59.000000001Z"),
        "any": st.recursive(st.none() | st.booleans() | st.text(max_size=3), st.lists, max_leaves=4),
        "wrapped": st.integers(-(2**63), 2**63 - 1).map(str),
        "before": st.fixed_dictionaries({"before": st.fixed_dictionaries({"id": st.integers(0, 9)})}),
    },
)


@given(orders)
def test_bytes_are_those_of_the_librarys_own_parser_and_come_back(value: Any) -> None:
    """Whatever the mapping allows, ours and theirs agree byte for byte, both ways."""
    theirs = json_format.Parse(json.dumps(value), ORDER(), descriptor_pool=CODEC._file.pool)
    data = encode(value)
    assert data == b"\x00" + theirs.SerializeToString(deterministic=True)
    decoded = CODEC.decode(data)
    assert CODEC.encode(decoded) == data
    assert json.loads(decoded) == json_format.MessageToDict(theirs, always_print_fields_with_no_presence=True)


@pytest.mark.parametrize(("value", "says"), TABLE["protobuf values"])
def test_a_value_that_does_not_fit_is_refused_with_path_and_reason(value: object, says: str) -> None:
    """The place, what is expected, and never the value."""
    with pytest.raises(EncodeError) as raised:
        encode(value)
    assert says in str(raised.value)
    assert "hunter2" not in str(raised.value).replace("{'hunter2'", "")


def test_a_value_nested_too_deeply_is_refused_or_comes_back() -> None:
    """No crash, whatever the depth."""
    value: dict[str, Any] = {}
    for _ in range(400):
        value = {"before": value}
    with pytest.raises((EncodeError, DecodeError)):
        CODEC.decode(encode(value))


def test_old_syntax_keeps_its_rules() -> None:
    """proto2: required fields are named when missing, enums are closed."""
    codec = ProtobufCodec(
        'syntax = "proto2"; message M { required int32 id = 1; enum E { A = 3; } optional E e = 2; }', {}
    )
    assert encode({"id": 1, "e": 3}, codec) == b"\x00\x08\x01\x10\x03"
    with pytest.raises(EncodeError, match="id"):
        encode({}, codec)
    with pytest.raises(EncodeError, match=r"\$.e"):
        encode({"id": 1, "e": 4}, codec)


def test_places_above_63_take_two_bytes() -> None:
    """The varint of a zigzag number."""
    text = rest("".join(f"message M{index} {{ int32 a = 1; }}" for index in range(200)))
    codec = ProtobufCodec(text, {}, "shop.M150")
    assert encode({"a": 1}, codec) == b"\x02\xac\x02\x08\x01"
    assert json.loads(ProtobufCodec(text, {}).decode(b"\x02\xac\x02\x08\x01")) == {"a": 1}


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x01", b"\x02", b"\x02\x7f", b"\x02\x01", b"\x04\x00", b"\x04\x00\x0e"),
        *(b"\xff" * 9, b"\xfe\xff\x7f", b"\x00\xff", b"\x00\x32\x01\xff"),
    ],
)
def test_bytes_of_another_form_are_not_read(data: bytes) -> None:
    """Wrong places, cut-off bytes, text that is not UTF-8."""
    with pytest.raises(DecodeError):
        CODEC.decode(data)


LONG = [
    [rest("message A {" * 101 + "}" * 101), {}, "nested deeper"],
    [rest("message A {" * 60 + "}" * 60), {}, "recursion limit"],
    [rest("//" + "x" * 1_048_577), {}, "larger than"],
    [base64.b64encode(b"\x1a\x08no.proto").decode(), {}, "no.proto"],
]


@pytest.mark.parametrize(("text", "references", "says"), [*table(__file__, "invalid"), *LONG])
def test_an_invalid_schema_is_rejected_with_its_place(text: str, references: dict[str, str], says: str) -> None:
    """The error is the compiler's; nothing is written outside a folder of Headrace."""
    with pytest.raises(SchemaInvalid) as raised:
        ProtobufCodec(text, references)
    assert says in str(raised.value)


def test_an_unknown_message_type_is_rejected_by_name() -> None:
    """A request may name one."""
    with pytest.raises(SchemaInvalid, match=r"Order\.Nope"):
        ProtobufCodec(ALL, {}, "shop.Order.Nope")
