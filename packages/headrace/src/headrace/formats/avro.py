"""AVRO: converts JSON text or Python values to payloads of one schema and back. Only this module imports fastavro.

A payload has no framing of the registry. Function workers and Spark drivers import this module, so it must stay light.
"""

import contextlib
import functools
import io
import struct
from collections.abc import Mapping
from typing import Any, Final

import fastavro
import fastavro._read_py
import msgspec
from fastavro.validation import ValidationError, validate

from headrace.errors import DecodeError, EncodeError, SchemaInvalid
from headrace.formats import avro_values
from headrace.formats.avro_json import Named, converter, with_defaults, wrapped
from headrace.formats.avro_schema import is_recursive, parsed, resolved
from headrace.formats.plain import Convert, Misfit
from headrace.formats.sql_types import refuse, row_type, sql_names

_BAD_DATA: Final = (EOFError, LookupError, ValueError, ArithmeticError, TypeError, RecursionError, struct.error)
_NONE: Final[Mapping[str, str]] = {}
_decode_json = msgspec.json.Decoder().decode
_encode_json = msgspec.json.Encoder().encode

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
            references: Texts of schemas whose types it names, in any order.
            plain_unions: Whether values of unions are in JSON without the branch's name.

        Raises:
            SchemaInvalid: The text is not a valid Avro schema, or names unknown types.
        """
        self._plain_unions = plain_unions
        try:
            own, *others = [_decode_json(source.encode()) for source in (text, *references.values())]
            self.schema: Any = resolved(own, others)
        except (*_BAD_DATA, AttributeError) as cause:
            raise SchemaInvalid(f"not a valid Avro schema: {type(cause).__name__}: {cause}") from cause
        # The compiled reader recurses on the C stack without a limit, so a nested payload would end the process.
        self._read = fastavro._read_py.schemaless_reader if is_recursive(self.schema) else fastavro.schemaless_reader

    def require_writable(self) -> None:
        """Accept every schema: what reading needs is enough to write."""

    @functools.cached_property
    def _json(self) -> Any:
        return parsed(wrapped(self.schema, plain_unions=self._plain_unions))

    @functools.cached_property
    def _python(self) -> Any:
        return avro_values.for_python(self.schema)

    @functools.cached_property
    def _kept(self) -> Any:
        return avro_values.for_python_kept(self.schema)

    @functools.cached_property
    def _rows(self) -> Any:
        return avro_values.for_rows(self.schema)

    @functools.cached_property
    def _writing(self) -> Any:
        return with_defaults(self.schema)

    @functools.cached_property
    def _convert(self) -> Convert:
        return converter(self._writing, Named(plain_unions=self._plain_unions))

    def encode(self, text: bytes) -> bytes:
        target = io.BytesIO()
        try:
            fastavro.schemaless_writer(target, self._writing, self._convert(_decode_json(text)))
        except Misfit as misfit:
            raise EncodeError(f"the value does not fit its Avro schema at ${misfit.path}: {misfit.text}") from misfit
        except _BAD_DATA as cause:
            raise EncodeError(f"the value does not fit its Avro schema ({type(cause).__name__})") from cause
        return target.getvalue()

    def decode(self, data: bytes) -> bytes:
        return _encode_json(self._decoded(data, self._json))

    def decode_python(self, payload: bytes) -> object:
        """Return a payload as plain Python values.

        Union values have no branch name; logical types are `datetime`, `date`, `time`, `Decimal` and `UUID`, or the
        number or text where these cannot hold the value.

        Raises:
            DecodeError: The bytes were not written with this schema.
        """
        source = io.BytesIO(payload)
        with contextlib.suppress(*_BAD_DATA):
            value: object = self._read(source, self._python, None)
            if source.tell() == len(payload):
                return value
        return self._decoded(payload, self._kept)

    def decode_row(self, payload: bytes) -> bytes:
        """Return a payload as JSON for columns of SQL: plain unions, times as ISO texts, bytes as base64.

        Raises:
            DecodeError: The bytes were not written with this schema, or a value is outside of its type in SQL.
        """
        return _encode_json(self._decoded(payload, self._rows))

    def encode_python(self, value: object) -> bytes:
        """Return the payload of plain Python values, such as `decode_python` returns.

        Raises:
            EncodeError: The value does not fit; the message names the field and never the value.
        """
        target = io.BytesIO()
        try:
            validate(value, self._writing)
            fastavro.schemaless_writer(target, self._writing, value, strict_allow_default=True)
        except ValidationError as misfit:
            found = misfit.errors[0]
            raise EncodeError(f"{found.field or 'the value'} is not of Avro type {found.schema}") from None
        except _BAD_DATA as cause:
            raise EncodeError(f"the value does not fit its Avro schema ({type(cause).__name__})") from None
        return target.getvalue()

    def _decoded(self, payload: bytes, schema: Any) -> object:
        source = io.BytesIO(payload)
        try:
            value: object = self._read(source, schema, None)
        except _BAD_DATA as cause:
            position = f"{type(cause).__name__} at byte {source.tell()} of {len(payload)}"
            raise DecodeError(
                f"the bytes do not fit their Avro schema, or a value does not fit its type in Python ({position})"
            ) from cause
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
