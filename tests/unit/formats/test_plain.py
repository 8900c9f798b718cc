"""BINARY, STRING, JSON, and the registry's framing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DecodeError, EncodeError
from headrace.formats.plain import BinaryCodec, Codec, JsonCodec, StringCodec, header_of, schema_id_of, unframe


@given(st.binary())
def test_binary_gives_back_every_byte(data: bytes) -> None:
    """What BINARY decodes it encodes again."""
    assert BinaryCodec().encode(BinaryCodec().decode(data)) == data


@given(st.text())
def test_string_gives_back_every_text(text: str) -> None:
    """Stored bytes are the text's UTF-8; reading them gives the JSON string."""
    stored = StringCodec().encode(json.dumps(text).encode())
    assert stored == text.encode()
    assert json.loads(StringCodec().decode(stored)) == text


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        *(
            (BinaryCodec(), text)
            for text in (b'"a"', b'"YQ"', b'"YQ==="', b'"Y Q="', b"5", b"{}", b'"_-=="', b'"\\ud800"')
        ),
        *((StringCodec(), text) for text in (b"5", b"true", b"[]", b'{"a":"b"}')),
    ],
)
def test_a_value_of_another_form_is_rejected(codec: Codec, text: bytes) -> None:
    """BINARY accepts only standard base64, STRING only a JSON string: no number becomes text silently."""
    with pytest.raises(EncodeError):
        codec.encode(text)


NOT_JSON = [b"", b"hello", b"NaN", b'{"a":1}{', b'"\xff"', b"[" * 5000 + b"]" * 5000]


@pytest.mark.parametrize(("codec", "data"), [(StringCodec(), b"\xff\xfe"), *((JsonCodec(), data) for data in NOT_JSON)])
def test_stored_bytes_of_another_format_are_an_error(codec: Codec, data: bytes) -> None:
    """A reader never gets text that is not JSON."""
    with pytest.raises(DecodeError):
        codec.decode(data)


@pytest.mark.parametrize("data", [b"", b"\x00\x00\x00\x01", b"\x01\x00\x00\x00\x01x", b'{"a":1}'])
def test_bytes_without_a_schema_id_are_told_apart(data: bytes) -> None:
    """Plain JSON in an Avro topic is a decode error, not a crash. An id is five bytes before the payload."""
    for schema_id in (0, 1, 2**31, 2**32 - 1):
        assert unframe(header_of(schema_id) + b"\x00payload") == (schema_id, b"\x00payload")
    assert schema_id_of(data) is None
    with pytest.raises(DecodeError):
        unframe(data)
