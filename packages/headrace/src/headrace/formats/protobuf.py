"""PROTOBUF: converts JSON text in Protobuf's JSON mapping to payloads of one schema, and back.

A payload starts with the message indexes of the Confluent wire format; Protobuf's binary encoding follows. The indexes
are a count and that many numbers, as zigzag varints; one zero byte means `[0]`.
"""

import binascii
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import EncodeError as ProtobufEncodeError
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace.errors import DecodeError, EncodeError, SchemaInvalid
from headrace.formats.plain import Convert, Misfit
from headrace.formats.proto_files import parse_proto
from headrace.formats.proto_json import converter, is_known_any
from headrace.formats.proto_known import is_known
from headrace.formats.sql_types import refuse, row_type, sql_names

_MAX_INDEXES: Final = 100
_MAX_VARINT_BITS: Final = 35
_NOT_SHOWN: Final = (json_format.Error, ProtobufDecodeError, ValueError, TypeError, LookupError, RecursionError)
_INTEGERS: Final = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
_decode_json = msgspec.json.Decoder().decode
_encode_json = msgspec.json.Encoder().encode
_SQL: Final = "- INT BIGINT BIGINT DECIMAL(20,0) DOUBLE FLOAT BOOLEAN STRING STRING -".split()  # noqa: SIM905
"""Types by the number of the C++ type."""
_SQL_OF_WELL_KNOWN: Final = sql_names(
    "TIMESTAMP Timestamp; STRING Duration FieldMask Struct Value ListValue StringValue; BOOLEAN BoolValue; "
    "BINARY BytesValue; INT Int32Value; BIGINT UInt32Value Int64Value; DECIMAL(20,0) UInt64Value; "
    "DOUBLE DoubleValue; FLOAT FloatValue"
)


class _Json(json_format._Printer):  # type: ignore[misc]
    """The JSON mapping, with base64 for an `Any` of a type that the schema does not have."""

    def _AnyMessageToJsonObject(self, message: Any) -> Any:  # noqa: N802 the library's name
        if is_known_any(message.type_url, self.descriptor_pool):
            return super()._AnyMessageToJsonObject(message)
        value = binascii.b2a_base64(message.value, newline=False).decode()
        return {"@type": message.type_url, "value": value} if message.ListFields() else {}


class _Numbers(_Json):
    """The JSON mapping, in which 64-bit integers are strings, with numbers instead."""

    def _FieldToJsonObject(self, field: Any, value: Any) -> Any:  # noqa: N802 the library's name
        return value if field.cpp_type in _INTEGERS else super()._FieldToJsonObject(field, value)


class _Strict:
    """Shows what proto2 lets pass: numbers that a closed enum does not have, and strings that are not UTF-8."""

    def _FieldToJsonObject(self, field: Any, value: Any) -> Any:  # noqa: N802 the library's name
        if field.type == FieldDescriptor.TYPE_STRING and type(value) is bytes:
            raise ValueError  # not UTF-8, which proto2 lets pass
        return super()._FieldToJsonObject(field, value)  # type: ignore[misc]

    def _RegularMessageToJsonObject(self, message: Any, js: Any) -> Any:  # noqa: N802 the library's name
        found = super()._RegularMessageToJsonObject(message, js)  # type: ignore[misc]
        for unknown in UnknownFieldSet(message):
            field = message.DESCRIPTOR.fields_by_number.get(unknown.field_number)
            if field is None:
                continue
            if field.enum_type is None or field.is_repeated:
                raise ValueError
            # A number that a closed enum does not have; shown as those of open enums.
            number = (unknown.data & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
            names_kept = self.preserving_proto_field_name  # type: ignore[attr-defined]
            found[field.name if names_kept else field.json_name] = number
        return found


class _StrictJson(_Strict, _Json):
    pass


class _StrictNumbers(_Strict, _Numbers):
    pass


class ProtobufCodec:
    """Writes one message type of a schema; reads all of them."""

    def __init__(self, text: str, references: Mapping[str, str], message: str | None = None, **_: object) -> None:
        """Compile a schema.

        Args:
            text: Source text, or a serialized file descriptor in base64.
            references: Files that it may import, by their names in the imports.
            message: Full name of the message type to write, or its name below the package; None for the first.

        Raises:
            SchemaInvalid: The text is not a valid schema, or has no such message type.
        """
        self._file = parse_proto(text, references)
        is_old, pool = _has_old_syntax(self._file), self._file.pool
        self._shown = (_StrictJson if is_old else _Json)(False, False, pool, True)
        self._shown_row = (_StrictNumbers if is_old else _Numbers)(True, False, pool, True)
        descriptor = self._find(message)
        self._name: str = descriptor.full_name
        self._make: Any = GetMessageClass(descriptor)
        self._indexes = _indexes_of(descriptor)
        self._convert: Convert = converter(descriptor, {})
        self.first: Any = GetMessageClass(next(iter(self._file.message_types_by_name.values())))

    def encode(self, text: bytes) -> bytes:
        try:
            made = self._convert(_decode_json(text))
            message = self._make(**made) if type(made) is dict else made
            payload: bytes = message.SerializeToString(deterministic=True)
        except Misfit as misfit:
            raise EncodeError(f"the value does not fit {self._name} at ${misfit.path}: {misfit.text}") from misfit
        except ProtobufEncodeError as cause:
            raise EncodeError(f"the value does not fit {self._name}: {cause}") from cause
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as cause:
            raise EncodeError(f"the value does not fit {self._name} ({type(cause).__name__})") from cause
        return self._indexes + payload

    def decode(self, data: bytes) -> bytes:
        return _encode_json(self.decode_python(data))

    def decode_python(self, data: bytes) -> object:
        """Return a payload in Protobuf's JSON mapping; raises as `decode` does."""
        return self._decoded(data, self._shown)

    def decode_row(self, data: bytes) -> bytes:
        """Return a payload in Protobuf's JSON mapping, but with the fields' own names and 64-bit integers as numbers.

        Raises:
            DecodeError: The bytes were not written with this schema.
        """
        return _encode_json(self._decoded(data, self._shown_row))

    def require_writable(self) -> None:
        """Accept every schema: what reading needs is enough to write."""

    def _decoded(self, data: bytes, printer: Any) -> Any:
        make, start = (self.first, 1) if data[:1] == b"\x00" else self._follow(data)
        name = make.DESCRIPTOR.full_name
        try:
            message = make.FromString(data[start:])
        except ProtobufDecodeError as cause:
            why = "they are cut off, nested too deeply, or have a string that is not UTF-8"
            raise DecodeError(f"the bytes are not a valid {name}: {why}") from cause
        try:
            return printer._MessageToJsonObject(message)
        except _NOT_SHOWN as cause:
            why = "a string is not UTF-8, or a type of google.protobuf has a value that its JSON form cannot hold"
            raise DecodeError(f"the {name} cannot be converted to JSON ({type(cause).__name__}): {why}") from cause

    def _find(self, message: str | None) -> Any:
        types = self._file.message_types_by_name
        if not types:
            raise SchemaInvalid("the Protobuf schema has no message type")
        if message is None:
            return next(iter(types.values()))
        path = message.removeprefix(f"{self._file.package}.").split(".")
        found = types.get(path[0])
        for name in path[1:]:
            found = found.nested_types_by_name.get(name) if found else None
        if not found:
            raise SchemaInvalid(f"the Protobuf schema has no message type {message[:200]!r}")
        return found

    def _follow(self, data: bytes) -> tuple[Any, int]:
        """Return the class that the indexes lead to, and where they end."""
        try:
            count, at = _read_varint(data, 0)
            if not 0 < count <= _MAX_INDEXES:
                raise IndexError
            types, found = list(self._file.message_types_by_name.values()), None
            for _ in range(count):
                index, at = _read_varint(data, at)
                if index < 0:
                    raise IndexError
                found = types[index]
                types = list(found.nested_types)
        except IndexError:
            raise DecodeError("the bytes do not begin with the indexes of a message type in their schema") from None
        return GetMessageClass(found), at


def _has_old_syntax(file: Any) -> bool:
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    others = (each for each in file.dependencies if not is_known(each.name))
    return proto.syntax != "proto3" or any(map(_has_old_syntax, others))


def _indexes_of(descriptor: Any) -> bytes:
    indexes = []
    while descriptor is not None:
        outer = descriptor.containing_type
        siblings = outer.nested_types if outer else descriptor.file.message_types_by_name.values()
        indexes.append([sibling.full_name for sibling in siblings].index(descriptor.full_name))
        descriptor = outer
    if indexes == [0]:
        return b"\x00"
    return b"".join(map(_varint, [len(indexes), *reversed(indexes)]))


def _varint(number: int) -> bytes:
    rest = number << 1  # the zigzag encoding of a number that is not negative
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, _MAX_VARINT_BITS, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number >> 1 ^ -(number & 1), at
    raise IndexError


def sql_type(text: str, references: Mapping[str, str]) -> str:
    """Return the type of a schema's first message in SQL; raises as `sql_columns` does."""
    return _sql_message(ProtobufCodec(text, references).first.DESCRIPTOR, "$", ())


def _sql_message(message: Any, path: str, inside: tuple[str, ...]) -> str:
    known = message.full_name.removeprefix("google.protobuf.")
    if known != message.full_name:
        return _SQL_OF_WELL_KNOWN.get(known) or refuse(path, f"of type {known}")
    if message.full_name in inside:
        refuse(path, "a message within itself")
    inside = (*inside, message.full_name)
    return row_type((field.name, _sql_field(field, f"{path}.{field.name}", inside)) for field in message.fields)


def _sql_field(field: Any, path: str, inside: tuple[str, ...]) -> str:
    message = field.message_type
    if message and message.GetOptions().map_entry:
        return f"MAP<STRING, {_sql_field(message.fields_by_name['value'], path, inside)}>"
    found = "BINARY" if field.type == field.TYPE_BYTES else _SQL[field.cpp_type]
    found = _sql_message(message, path, inside) if message else found
    return f"ARRAY<{found}>" if field.is_repeated else found
