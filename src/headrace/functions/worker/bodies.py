"""Bytes of keys and values to what the handler sees, by the format the trigger names."""

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import DecodeError, HeadraceError
from headrace.functions import wire

Decode = Callable[[bytes], Any]


class Bodies:
    """Decodes by format names; knows the schemas that the parent has sent."""

    def __init__(self) -> None:
        self._schemas: dict[int, Decode | HeadraceError] = {}

    def learn(self, schema: wire.Schema) -> None:
        """Take a schema; one that is not usable makes its records undecodable and nothing else."""
        try:
            self._schemas[schema.schema_id] = _decoder_of(schema)
        except HeadraceError as cause:
            self._schemas[schema.schema_id] = cause

    def decoder(self, format_name: str) -> Decode | None:
        """Return what decodes a format, None where bytes stay as they are. It raises `DecodeError`."""
        plain = {"binary": None, "string": _decode_string, "json": _decode_json}
        return plain.get(format_name, self._decode_framed)

    def _decode_framed(self, data: bytes) -> Any:
        from headrace.formats.codec import unframe

        schema_id, payload = unframe(data)
        decode = self._schemas.get(schema_id)
        if decode is None:
            raise DecodeError(f"the bytes name schema {schema_id}, which the schema registry does not have")
        if isinstance(decode, HeadraceError):
            raise DecodeError(f"schema {schema_id} is not usable: {decode.description}")
        return decode(payload)


def _decoder_of(schema: wire.Schema) -> Decode:
    if schema.schema_type == "AVRO":
        from headrace.formats.codec_avro import decode_avro, parse_avro

        return functools.partial(decode_avro, writer=parse_avro(schema.text, schema.references.values()))
    from headrace.formats.codec import compile_schema

    codec = compile_schema(schema.schema_type, schema.text, schema.references)
    return lambda payload: _decode_json(codec.decode(payload))


def _decode_string(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as cause:
        raise DecodeError(f"not UTF-8 text: {cause.reason} at byte {cause.start}") from None


def _decode_json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise DecodeError(f"not JSON text: {cause}") from None
