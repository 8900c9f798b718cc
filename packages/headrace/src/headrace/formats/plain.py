"""The codecs of the formats without a schema, and the registry's framing.

A codec turns JSON text into stored bytes and back. Values stay JSON text, so a value is copied into a body unparsed
and numbers keep every digit. Callers store null as null bytes (a tombstone, or no key); codecs never see it.
Function workers import this module, so it must stay light.
"""

import binascii
import struct
from collections.abc import Callable
from typing import Any, Final, NoReturn, Protocol, Self

import msgspec

from headrace.errors import DecodeError, EncodeError

_NOT_JSON: Final = "not readable as JSON"
_TOO_LARGE_FOR_FLOAT: Final = 3.4028235677973366e38
NOT_NUMBERS: Final = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""What JSON writes as a text."""
_HEADER: Final = struct.Struct(">BI")
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode_json = msgspec.json.Encoder().encode

Convert = Callable[[Any], Any]
"""Checks one decoded JSON value and returns what a format's writer takes; raises `Misfit`."""


class ValueEncoder(Protocol):
    """Writes one format, or one format with its schema."""

    def encode(self, text: bytes) -> bytes:
        """Return the stored bytes of one JSON value.

        Raises:
            EncodeError: The value does not fit; the message names the cause and never the value.
        """


class Codec(ValueEncoder, Protocol):
    """Writes and reads one format, or one format with its schema."""

    def decode(self, data: bytes) -> bytes:
        """Return stored bytes as JSON text.

        Raises:
            DecodeError: The bytes are not of this format.
        """


class PythonCodec(Codec, Protocol):
    """A codec that also decodes for handlers."""

    @property
    def decode_python(self) -> Convert | None:
        """Turns stored bytes into the value that a handler gets; None if it gets the bytes.

        Raises:
            DecodeError: The bytes are not of this format.
        """


class Misfit(Exception):
    """A value does not fit its schema, at a path below the value; the text never holds the value itself."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path = ""

    def under(self, step: str) -> Self:
        """Return this misfit with the path from one level further up."""
        self.path = step + self.path
        return self


def expected(what: str, value: Any, string: str = "a string") -> NoReturn:
    """Raise a `Misfit` that names the JSON type of a value in place of the value."""
    kinds = {dict: "an object", list: "an array", str: string, bool: "a boolean", type(None): "null"}
    number = "another number" if "number" in what or "integer" in what else "a number"
    raise Misfit(f"expected {what}, got {kinds.get(type(value), number)}")


def as_float(number: Any, value: Any) -> Any:
    """Return the number that a value is, if it fits a float of 32 bits; smaller ones are rounded to the largest."""
    if abs(number) >= _TOO_LARGE_FOR_FLOAT and number not in NOT_NUMBERS.values():
        expected("a number that a float holds", value)
    return number


def of_type(kind: type, what: str) -> Convert:
    """Return a converter that accepts values of one Python type; `what` names it in the error."""

    def convert(value: Any) -> Any:
        if type(value) is not kind:
            expected(what, value)
        return value

    return convert


class BinaryCodec:
    """BINARY: any bytes, as standard base64 with padding in a JSON string (RFC 4648 section 4)."""

    decode_python: None = None

    def encode(self, text: bytes) -> bytes:
        try:
            return binascii.a2b_base64(_decode_text(text), strict_mode=True)
        except (msgspec.DecodeError, ValueError) as cause:
            raise EncodeError(f"BINARY takes a JSON string in standard base64 with padding: {cause}") from cause

    decode = staticmethod(_encode_json)  # a string in standard base64, of bytes


class StringCodec:
    """STRING: UTF-8 text, as a JSON string."""

    def encode(self, text: bytes) -> bytes:
        try:
            return _decode_text(text).encode()
        except (msgspec.DecodeError, UnicodeDecodeError) as cause:
            raise EncodeError(f"STRING takes a JSON string: {cause}") from cause

    def decode(self, data: bytes) -> bytes:
        return _encode_json(self.decode_python(data))

    @staticmethod
    def decode_python(data: bytes) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as cause:
            raise DecodeError(f"not UTF-8 text, which STRING requires: {cause.reason} at byte {cause.start}") from cause


class JsonCodec:
    """JSON: any JSON value, stored as its text, so integers of any size, decimals and field order survive."""

    def encode(self, text: bytes) -> bytes:
        return text  # the parser of the request has checked it

    def decode(self, data: bytes) -> bytes:
        try:
            _check_json(data)
            if not data.isascii():
                str(data, "utf-8")  # the check above does not decode strings
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
            raise DecodeError(f"{_NOT_JSON}: {cause}") from cause
        return data

    @staticmethod
    def decode_python(data: bytes) -> Any:
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
            raise DecodeError(f"{_NOT_JSON}: {cause}") from cause


def header_of(schema_id: int) -> bytes:
    """Return the framing of the Confluent wire format: a zero byte and the schema's id in four bytes."""
    return _HEADER.pack(0, schema_id)


def schema_id_of(data: bytes) -> int | None:
    """Return the schema id at the start of the bytes; None without one."""
    return _HEADER.unpack_from(data)[1] if len(data) >= _HEADER.size and data[0] == 0 else None


def unframe(data: bytes) -> tuple[int, bytes]:
    """Return schema id and payload.

    Raises:
        DecodeError: The bytes do not begin with a schema id.
    """
    schema_id = schema_id_of(data)
    if schema_id is None:
        raise DecodeError(
            "the bytes do not begin with a zero byte and a schema id: "
            "they were written without a schema registry, so read them in another format"
        )
    return schema_id, data[_HEADER.size :]
