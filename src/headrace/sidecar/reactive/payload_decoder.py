"""Decodes stored keys and values for requests, by the formats of the consumer."""

import msgspec

from headrace.config.format_list import FORMATS, SCHEMA_TYPES, STRINGS
from headrace.formats.choice import Reader
from headrace.records import Record, RecordBatch

_decode_text = msgspec.json.Decoder(str).decode


class PayloadDecoder:
    """Decodes keys and values of one consumer's records."""

    def __init__(self, keys: Reader, key_format: str, values: Reader, value_format: str) -> None:
        self.keys = keys
        self._key_format = key_format
        self.values = values
        self._value_format = value_format
        self.content_type = FORMATS[value_format].media_type
        """Of what `body` returns."""

    async def prepare(self, records: RecordBatch) -> None:
        """Fetch the schemas that these records name; await it before anything else.

        Raises:
            RegistryUnavailable: A schema is not cached, and the registry does not respond.
        """
        if self.keys.names_schemas:
            await self.keys.prepare(records.keys)
        if self.values.names_schemas:
            await self.values.prepare(records.values)

    def key_text(self, record: Record) -> str | None:
        """Return a key outside of JSON: text unchanged, bytes as base64, anything else as JSON text.

        Raises:
            DecodeError: It does not fit its format; also raised by `body`.
        """
        found = self.keys.decode(record.key)
        if found is None:
            return None
        return _decode_text(found) if self._key_format in STRINGS else found.decode()

    def body(self, record: Record) -> bytes:
        """Return a value as the body of a request; empty when it is null."""
        value = record.value
        if value is None or self._value_format == "binary":
            return value or b""
        found = self.values.decode(value)
        return found or b"" if self._value_format in SCHEMA_TYPES else value
