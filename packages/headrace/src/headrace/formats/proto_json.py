"""Protobuf's JSON mapping, compiled per message: from decoded JSON to a message's arguments (ProtoJSON Format).

It is as strict as the mapping allows and five times faster than the library's parser. Its errors never contain a value.
"""

import binascii
import re
from typing import Any, Final, NamedTuple

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from headrace.formats.plain import NOT_NUMBERS, Convert, Misfit, as_float, expected, of_type

_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WHOLE: Final = re.compile(r"-?\d{1,20}", re.ASCII)
_OTHER: Final = "another string"
_OWN_MAPPING: Final = frozenset(
    f"google.protobuf.{name}"
    for name in (
        *("Any", "Duration", "FieldMask", "ListValue", "Struct", "Timestamp", "Value", "BoolValue", "BytesValue"),
        *("DoubleValue", "FloatValue", "Int32Value", "Int64Value", "StringValue", "UInt32Value", "UInt64Value"),
    )
)


class _Field(NamedTuple):
    name: str
    convert: Convert
    oneof: str | None
    takes_null: bool


class MessageConverter:
    """From a JSON object to the keyword arguments of one message's class."""

    def __init__(self, descriptor: Any, known: dict[str, Convert]) -> None:
        """Compile; `known` holds converters by full name, since a message may contain itself."""
        known[descriptor.full_name] = self
        self._name = descriptor.full_name
        self._fields: dict[str, _Field] = {}
        for field in descriptor.fields:
            oneof = field.containing_oneof
            shared = oneof.name if oneof and len(oneof.fields) > 1 else None
            made = _Field(field.name, _field(field, known), shared, not field.is_repeated and _is_null_type(field))
            self._fields[field.json_name] = self._fields[field.name] = made

    def __call__(self, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            expected(f"an object ({self._name})", value)
        found: dict[str, Any] = {}
        chosen: set[str] = set()
        for key, item in value.items():
            field = self._fields.get(key)
            if field is None:
                raise Misfit(f"{self._name} has no field {key[:60]!r}")
            name, convert, oneof, takes_null = field
            if item is None and not takes_null:
                continue
            if name in found or oneof in chosen:
                raise Misfit(f"field {key} is set twice, or another field of its oneof is set too")
            if oneof:
                chosen.add(oneof)
            try:
                found[name] = convert(item)
            except Misfit as misfit:
                raise misfit.under(f".{key}") from None
        return found


def converter(descriptor: Any, known: dict[str, Convert]) -> Convert:
    """Return a function from decoded JSON to a message's keyword arguments, or to a message where JSON is special."""
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    return _special(descriptor) if descriptor.full_name in _OWN_MAPPING else MessageConverter(descriptor, known)


def is_known_any(type_url: str, pool: Any) -> bool:
    """Return whether the type of an `Any` is known; JSON has the bytes of others as base64."""
    try:
        pool.FindMessageTypeByName(type_url.rpartition("/")[2])
    except KeyError:
        return False
    return True


def _special(descriptor: Any) -> Convert:
    make = GetMessageClass(descriptor)
    pool = descriptor.file.pool
    is_any = descriptor.full_name == "google.protobuf.Any"

    def convert(value: Any) -> Any:
        try:
            if is_any and {*value} == {"@type", "value"} and not is_known_any(value["@type"], pool):
                return make(type_url=value["@type"], value=_bytes(value["value"]))
            return json_format.ParseDict(value, make(), descriptor_pool=pool)
        except (json_format.ParseError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
            raise Misfit(f"expected the JSON form of {descriptor.full_name}") from None

    return convert


def _field(field: Any, known: dict[str, Convert]) -> Convert:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return _map(message.fields_by_name["key"], message.fields_by_name["value"], known)
    return _repeated(_single(field, known), _is_null_type(field)) if field.is_repeated else _single(field, known)


def _single(field: Any, known: dict[str, Convert]) -> Convert:
    if field.message_type is not None:
        return converter(field.message_type, known)
    return _enum(field.enum_type) if field.enum_type is not None else _SCALARS[field.type]


def _is_null_type(field: Any) -> bool:
    kind = field.message_type or field.enum_type
    return kind is not None and kind.full_name in ("google.protobuf.Value", "google.protobuf.NullValue")


def _repeated(inner: Convert, takes_null: bool) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not list:
            expected("an array", value)
        found = []
        for index, item in enumerate(value):
            try:
                found.append(inner(item) if item is not None or takes_null else expected("a value", None))
            except Misfit as misfit:
                raise misfit.under(f"[{index}]") from None
        return found

    return convert


def _map(key: Any, value: Any, known: dict[str, Convert]) -> Convert:
    convert_key = _KEYS.get(key.type, _SCALARS[key.type])
    convert_value = _single(value, known)
    # In maps the library accepts messages, but not their keyword arguments.
    make = GetMessageClass(value.message_type) if isinstance(convert_value, MessageConverter) else None
    takes_null = _is_null_type(value)

    def convert(entries: Any) -> Any:
        if type(entries) is not dict:
            expected("an object (map)", entries)
        found = {}
        for name, item in entries.items():
            try:
                made = convert_value(item) if item is not None or takes_null else expected("a value", None)
                found[convert_key(name)] = make(**made) if make else made
            except Misfit as misfit:
                raise misfit.under("[...]") from None
        return found

    return convert


def _enum(descriptor: Any) -> Convert:
    by_name = {value.name: value.number for value in descriptor.values}
    numbers = frozenset(by_name.values()) if descriptor.is_closed else None
    null = 0 if descriptor.full_name == "google.protobuf.NullValue" else None

    def convert(value: Any) -> Any:
        if type(value) is str and value in by_name:
            return by_name[value]
        if value is None and null is not None:
            return null
        if type(value) is int and (value in numbers if numbers is not None else -(2**31) <= value < 2**31):
            return value
        raise Misfit(f"expected a value of {descriptor.full_name}")

    return convert


def _integer(bits: int, signed: bool) -> Convert:
    least = -(2 ** (bits - 1)) if signed else 0
    limit = least + 2**bits
    what = f"an integer of {bits} bits" + ("" if signed else " that is not negative")

    def convert(value: Any) -> Any:
        number = value
        if (type(value) is str and _WHOLE.fullmatch(value)) or (type(value) is float and value.is_integer()):
            number = int(value)
        if type(number) is not int or not least <= number < limit:
            expected(what, value, _OTHER)
        return number

    return convert


def _double(value: Any) -> Any:
    if type(value) is float:
        return value
    if type(value) is str and value in NOT_NUMBERS:
        return NOT_NUMBERS[value]
    if type(value) is int or (type(value) is str and _NUMBER.fullmatch(value)):
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        if abs(number) != float("inf"):
            return number
    return expected("a number", value, _OTHER)


def _bool_key(value: Any) -> Any:
    return value == "true" if value in ("true", "false") else expected('"true" or "false"', value, _OTHER)


def _bytes(value: Any) -> Any:
    try:
        text = _string(value).translate(_FROM_URL_SAFE)
        return binascii.a2b_base64(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), strict_mode=True)
    except ValueError:
        raise Misfit("expected bytes as base64") from None


_string: Final = of_type(str, "a string")
_FROM_URL_SAFE: Final = str.maketrans("-_", "+/")
_KINDS: Final = FieldDescriptor
_KEYS: Final[dict[int, Convert]] = {_KINDS.TYPE_BOOL: _bool_key}
_SCALARS: Final[dict[int, Convert]] = {
    **dict.fromkeys((_KINDS.TYPE_INT32, _KINDS.TYPE_SINT32, _KINDS.TYPE_SFIXED32), _integer(32, True)),
    **dict.fromkeys((_KINDS.TYPE_INT64, _KINDS.TYPE_SINT64, _KINDS.TYPE_SFIXED64), _integer(64, True)),
    **dict.fromkeys((_KINDS.TYPE_UINT32, _KINDS.TYPE_FIXED32), _integer(32, False)),
    **dict.fromkeys((_KINDS.TYPE_UINT64, _KINDS.TYPE_FIXED64), _integer(64, False)),
    _KINDS.TYPE_DOUBLE: _double,
    _KINDS.TYPE_FLOAT: lambda value: as_float(_double(value), value),
    _KINDS.TYPE_BOOL: of_type(bool, "a boolean"),
    _KINDS.TYPE_STRING: _string,
    _KINDS.TYPE_BYTES: _bytes,
}
