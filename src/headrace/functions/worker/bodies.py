"""Bytes of keys and values to what the handler sees, by the format the trigger names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import DecodeError, FormatError

Decode = Callable[[bytes], Any]


class Bodies:
    """Decodes by format names; knows the Avro schemas that the parent has sent."""

    def __init__(self) -> None:
        self._schemas: dict[int, Any] = {}
        self._decode_avro: Callable[[bytes, Any], Any] | None = None

    def learn(self, schema_id: int, text: str) -> None:
        """Take a schema; one that is not usable makes its records undecodable and nothing else."""
        from headrace.formats.codec_avro import decode_avro, parse_avro

        self._decode_avro = decode_avro
        try:
            self._schemas[schema_id] = parse_avro(text)
        except FormatError as cause:
            self._schemas[schema_id] = DecodeError(f"schema {schema_id} is not usable: {cause.description}")

    def decoder(self, format_name: str) -> Decode | None:
        """Return what decodes a format, None where bytes stay as they are. It raises `DecodeError`."""
        return {"string": _decode_string, "json": _decode_json, "avro": self._decode_framed}.get(format_name)

    def _decode_framed(self, data: bytes) -> Any:
        from headrace.formats.framing import unframe

        schema_id, payload = unframe(data)
        schema = self._schemas.get(schema_id)
        if schema is None or self._decode_avro is None:
            raise DecodeError(f"the bytes name schema {schema_id}, which the schema registry does not have")
        if isinstance(schema, DecodeError):
            raise DecodeError(schema.description)
        return self._decode_avro(payload, schema)


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
