"""AVRO: converts JSON text or Python values to payloads of one schema and back. Only this module imports fastavro.

A payload has no framing of the registry. Function workers and Spark drivers import this module, so it must stay light.
"""

import functools
import io
import struct
from collections.abc import Mapping
from typing import Any, Final

import fastavro
import fastavro._read_py
import msgspec
from fastavro.read import LOGICAL_READERS
from fastavro.schema import SchemaParseException
from fastavro.validation import ValidationError, validate

from headrace.errors import DecodeError, EncodeError, SchemaInvalid
from headrace.formats.avro_json import JSON_TYPE, Named, converter, inlined, is_recursive, to_json, wrapped
from headrace.formats.plain import Convert, Misfit
from headrace.formats.sql_types import refuse, row_type, sql_names

_BAD_DATA: Final = (EOFError, LookupError, ValueError, ArithmeticError, TypeError, RecursionError, struct.error)
_NONE: Final[Mapping[str, str]] = {}
_decode_json = msgspec.json.Decoder().decode
_encode_json = msgspec.json.Encoder().encode

LOGICAL_READERS.update({f"{kind}-{JSON_TYPE}": to_json for kind in ("bytes", "fixed", "float", "double")})
_SQL: Final = sql_names(
    "BOOLEAN boolean; INT int; BIGINT long; FLOAT float; DOUBLE double; BINARY bytes fixed; DATE date; "
    "STRING string enum uuid time-millis time-micros; TIMESTAMP timestamp-millis timestamp-micros; "
    "TIMESTAMP_NTZ local-timestamp-millis local-timestamp-micros"
)


class AvroCodec:
    """Converts JSON text in Avro's JSON encoding to payloads of one schema, and back; also decodes to Python values."""

    def __init__(
        self, text: str, references: Mapping[str, str] = _NONE, *, plain_unions: bool = False, **_: object
    ) -> None:
        """Compile a schema; keep the codec, because compiling takes about a millisecond.

        Args:
            references: Texts of schemas whose types it names, each after those that it names itself.
            plain_unions: Whether values of unions are in JSON without the branch's name.

        Raises:
            SchemaInvalid: The text is not a valid Avro schema, or names unknown types.
        """
        self._plain_unions = plain_unions
        named: dict[str, Any] = {}
        try:
            for source in references.values():
                fastavro.parse_schema(_decode_json(source.encode()), named, _write_hint=False)
            outside = dict(named)
            parsed = fastavro.parse_schema(_decode_json(text.encode()), named, _write_hint=not outside)
            self.schema: Any = fastavro.parse_schema(inlined(parsed, outside)) if outside else parsed
        except (*_BAD_DATA, AttributeError, SchemaParseException) as cause:
            raise SchemaInvalid(
                f"not a valid Avro schema, or it names unknown types: {type(cause).__name__}: {cause}"
            ) from cause
        # The compiled reader recurses on the C stack without a limit, so a nested payload would end the process.
        self._read = fastavro._read_py.schemaless_reader if is_recursive(self.schema) else fastavro.schemaless_reader
        self.record_name = str(self.schema.get("name", "")) if isinstance(self.schema, dict) else ""

    @functools.cached_property
    def _json(self) -> Any:
        """The schema for reading as Avro's JSON encoding."""
        return fastavro.parse_schema(wrapped(self.schema, plain_unions=self._plain_unions))

    @functools.cached_property
    def _convert(self) -> Convert:
        return converter(self.schema, Named(plain_unions=self._plain_unions))

    def encode(self, text: bytes) -> bytes:
        target = io.BytesIO()
        try:
            fastavro.schemaless_writer(target, self.schema, self._convert(_decode_json(text)))
        except Misfit as misfit:
            raise EncodeError(f"the value does not fit its Avro schema at ${misfit.path}: {misfit.text}") from misfit
        except _BAD_DATA as cause:
            raise EncodeError(f"the value does not fit its Avro schema ({type(cause).__name__})") from cause
        return target.getvalue()

    def decode(self, data: bytes) -> bytes:
        return _encode_json(self._decoded(data, self._json))

    def decode_python(self, payload: bytes) -> object:
        """Return a payload as plain Python values.

        Union values have no branch name; logical types are `datetime`, `date`, `time`, `Decimal` and `UUID`.

        Raises:
            DecodeError: The bytes were not written with this schema.
        """
        value: object = self._decoded(payload, self.schema)
        return value

    decode_row = decode_python

    def encode_python(self, value: object) -> bytes:
        """Return the payload of plain Python values, such as `decode_python` returns.

        Raises:
            EncodeError: The value does not fit; the message names the field and never the value.
        """
        target = io.BytesIO()
        try:
            validate(value, self.schema)
            fastavro.schemaless_writer(target, self.schema, value, strict_allow_default=True)
        except ValidationError as misfit:
            found = misfit.errors[0]
            raise EncodeError(f"{found.field or 'the value'} is not of Avro type {found.schema}") from None
        except _BAD_DATA as cause:
            raise EncodeError(f"the value does not fit its Avro schema ({type(cause).__name__})") from None
        return target.getvalue()

    def _decoded(self, payload: bytes, schema: Any) -> Any:
        source = io.BytesIO(payload)
        try:
            value = self._read(source, schema, None)
        except _BAD_DATA as cause:
            position = f"{type(cause).__name__} at byte {source.tell()} of {len(payload)}"
            raise DecodeError(f"the bytes do not fit their Avro schema ({position})") from cause
        if source.tell() != len(payload):
            raise DecodeError(f"{len(payload) - source.tell()} bytes follow the end of the Avro value")
        return value


def sql_type(text: str, references: Mapping[str, str]) -> str:
    """Return the type of a schema in SQL; raises as `sql_columns` does."""
    return _sql_type(AvroCodec(text, references).schema, "$", {})


def _sql_type(schema: Any, path: str, named: dict[str, str]) -> str:
    if isinstance(schema, list):
        branches = [branch for branch in schema if branch != "null"]
        return _sql_type(branches[0], path, named) if len(branches) == 1 else refuse(path, "a union of several types")
    if isinstance(schema, str):
        return _SQL.get(schema) or named.get(schema) or refuse(path, f"{schema} alone or within itself")
    kind, logical = schema["type"], schema.get("logicalType", "")
    if kind == "array":
        return f"ARRAY<{_sql_type(schema['items'], f'{path}[]', named)}>"
    if kind == "map":
        return f"MAP<STRING, {_sql_type(schema['values'], f'{path}[]', named)}>"
    if logical == "decimal":
        found = f"DECIMAL({schema['precision']},{schema.get('scale', 0)})"
    elif kind in ("record", "error"):
        names = [(field["name"], field["type"]) for field in schema["fields"]]
        found = row_type((name, _sql_type(inner, f"{path}.{name}", named)) for name, inner in names)
    else:
        found = _SQL.get(logical) or _SQL[kind]
    named[schema.get("name", "")] = found
    return found
