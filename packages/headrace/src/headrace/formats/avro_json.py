"""Avro's JSON encoding, compiled per schema: a converter for writing, a rewritten schema for reading.

A non-null value of a union is an object with the branch's name as its one key; bytes and fixed are strings of the
characters U+0000 to U+00FF; logical types show their underlying value (Avro specification 1.12, JSON encoding).
With plain unions (light-4j's `useNoWrappingAvro`) the object is left out, and the first branch that fits is written.
Schemas here are parsed: names are full, a type is text, a list (union) or a dict.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

from headrace.formats.avro_schema import ELEMENT, NAMED, RECORDS, kind_of, parsed, with_leaves
from headrace.formats.avro_values import JSON_TYPE
from headrace.formats.plain import NOT_NUMBERS, Convert, Misfit, as_float, expected, of_type


def wrapped(schema: Any, *, plain_unions: bool = False) -> Any:
    """Return a schema of the same bytes with which a reader returns Avro's JSON encoding.

    A union's branch becomes a record with one field of the branch's name. It has the same bytes, and the compiled
    reader returns it as the object that the JSON encoding requires.
    """
    return _wrap(schema, None if plain_unions else itertools.count())


def _wrap(schema: Any, numbers: Iterator[int] | None) -> Any:
    if isinstance(schema, list) and numbers is None:
        return [_wrap(branch, None) for branch in schema]
    if isinstance(schema, list) and numbers is not None:
        return [branch if branch == "null" else _wrap_branch(branch, numbers) for branch in schema]
    kind = kind_of(schema)
    if kind in ("bytes", "float", "double"):
        return {"type": kind, "logicalType": JSON_TYPE}
    if kind == "fixed":
        return {"type": kind, "name": schema["name"], "size": schema["size"], "logicalType": JSON_TYPE}
    if kind == "enum":
        return {"type": kind, "name": schema["name"], "symbols": schema["symbols"]}
    if kind in ("array", "map"):
        return {"type": kind, ELEMENT[kind]: _wrap(_element(schema), numbers)}
    if kind in RECORDS:
        fields = [{"name": field["name"], "type": _wrap(field["type"], numbers)} for field in schema["fields"]]
        return {"type": kind, "name": schema["name"], "fields": fields}
    return kind


def _wrap_branch(branch: Any, numbers: Iterator[int]) -> Any:
    field = {"name": _branch_name(branch), "type": _wrap(branch, numbers)}
    return {"type": "record", "name": f"HeadraceBranch{next(numbers)}", "fields": [field]}


class Named(dict[str, Convert]):
    """Converters and schemas of the named types so far, and how unions are written."""

    def __init__(self, *, plain_unions: bool = False) -> None:
        super().__init__()
        self.schemas: dict[str, Any] = {}
        self.plain_unions = plain_unions


def converter(schema: Any, known: Named) -> Convert:
    """Return a function from a decoded JSON value to what Avro's writer takes.

    It is stricter than the writer: types, ranges, lengths and unknown fields are checked. An absent field gets its
    default.
    """
    if isinstance(schema, list):
        return _plain_union(schema, known) if known.plain_unions else _union(schema, known)
    kind = kind_of(schema)
    if kind in _PRIMITIVES:
        return _PRIMITIVES[kind]
    if kind not in _COMPOSED:
        return lambda value: known[kind](value)  # a name: looked up at run time, because a type may contain itself
    if kind in NAMED:
        known.schemas[schema["name"]] = schema
    convert = _COMPOSED[kind](schema, known)
    if kind in NAMED:
        known[schema["name"]] = convert
    return convert


def with_defaults(schema: Any) -> Any:
    """Return a schema whose defaults are what the writer takes; one that does not fit its field is left out.

    A default is written like a value, but without the branch's name of a union.
    """
    known = Named(plain_unions=True)
    converter(schema, known)

    def converted(field: Any) -> Any:
        if "default" in field:
            with contextlib.suppress(Misfit):
                return {**field, "default": converter(field["type"], known)(field["default"])}
        return {"name": field["name"], "type": field["type"]}

    return parsed(with_leaves(schema, lambda leaf: leaf, converted))


def _record(schema: Any, known: Named) -> Convert:
    name = schema["name"]
    fields = [(field["name"], converter(field["type"], known), "default" in field) for field in schema["fields"]]
    names = frozenset(field[0] for field in fields)

    def convert(value: Any) -> Any:
        if type(value) is not dict:
            expected(f"an object ({name})", value)
        found = {}
        for field, inner, optional in fields:
            if field in value:
                try:
                    found[field] = inner(value[field])
                except Misfit as misfit:
                    raise misfit.under(f".{field}") from None
            elif not optional:
                raise Misfit(f"field {field} of {name} is missing")
        if len(found) != len(value):
            raise Misfit(f"{name} has no field {min(value.keys() - names)[:60]!r}")
        return found

    return convert


def _union(branches: list[Any], known: Named) -> Convert:
    inner = {_branch_name(branch): converter(branch, known) for branch in branches}
    forms = "a union, which is written " + " or ".join(
        "null" if name == "null" else f'{{"{name}": ...}}' for name in inner
    )

    def convert(value: Any) -> Any:
        if value is None and "null" in inner:
            return None
        if type(value) is not dict or len(value) != 1:
            expected(forms, value)
        ((name, item),) = value.items()
        if name not in inner or name == "null":
            raise Misfit(f"expected {forms}")
        try:
            return name, inner[name](item)
        except Misfit as misfit:
            raise misfit.under(f".{name}") from None

    return convert


def _plain_union(branches: list[Any], known: Named) -> Convert:
    # Maps last, because they accept any object. No branch is converted as an attempt: with recursive types that would
    # double the cost at every level.
    ordered = sorted(branches, key=lambda branch: kind_of(branch) == "map")
    choices = [(_branch_name(branch), _looks_like(branch, known), converter(branch, known)) for branch in ordered]

    def convert(value: Any) -> Any:
        for name, fits, inner in choices:
            if fits(value):
                return None if name == "null" else (name, inner(value))
        return expected("one of " + ", ".join(name for name, _, _ in choices), value)

    return convert


def _looks_like(schema: Any, known: Named) -> Callable[[Any], bool]:
    """Return a predicate for values that may be of a branch; it checks only one level."""
    schema = known.schemas.get(kind_of(schema), schema)
    kind = kind_of(schema)
    if kind in RECORDS:
        names = {field["name"] for field in schema["fields"]}
        needed = {field["name"] for field in schema["fields"] if "default" not in field}
        return lambda value: type(value) is dict and needed <= value.keys() <= names
    if kind in ELEMENT:
        return lambda value: type(value) is (list if kind == "array" else dict)
    flat = converter(schema, known)

    def fits(value: Any) -> bool:
        try:
            flat(value)
        except Misfit:
            return False
        return True

    return fits


def _collection(schema: Any, known: Named) -> Convert:
    inner = converter(_element(schema), known)
    is_array = schema["type"] == "array"
    kind: type[Any] = list if is_array else dict
    what = "an array" if is_array else "an object (map)"

    def convert(value: Any) -> Any:
        if type(value) is not kind:
            expected(what, value)
        try:
            return [inner(item) for item in value] if is_array else {key: inner(item) for key, item in value.items()}
        except Misfit as misfit:
            raise misfit.under("[...]") from None

    return convert


def _enum(schema: Any, _: Named) -> Convert:
    symbols = frozenset(schema["symbols"])

    def convert(value: Any) -> Any:
        if type(value) is not str or value not in symbols:
            raise Misfit(f"expected a symbol of {schema['name']}")
        return value

    return convert


def _fixed(schema: Any, _: Named) -> Convert:
    size = schema["size"]

    def convert(value: Any) -> Any:
        data = _bytes(value)
        if len(data) != size:
            raise Misfit(f"expected {size} characters ({schema['name']}), got {len(data)}")
        return data

    return convert


def _integer(bits: int) -> Convert:
    limit = 2 ** (bits - 1)

    def convert(value: Any) -> Any:
        if type(value) is not int or not -limit <= value < limit:
            expected(f"an integer of {bits} bits", value)
        return value

    return convert


def _double(value: Any) -> Any:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    if type(value) is str and value in NOT_NUMBERS:
        return NOT_NUMBERS[value]
    return expected("a number", value)


def _bytes(value: Any) -> Any:
    if type(value) is not str:
        expected("a string (bytes)", value)
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        raise Misfit("expected bytes as a string of the characters U+0000 to U+00FF") from None


_PRIMITIVES: Final[dict[str, Convert]] = {
    "null": of_type(type(None), "null"),
    "boolean": of_type(bool, "a boolean"),
    "int": _integer(32),
    "long": _integer(64),
    "float": lambda value: as_float(_double(value), value),
    "double": _double,
    "string": of_type(str, "a string"),
    "bytes": _bytes,
}
_COMPOSED: Final[dict[str, Callable[[Any, Named], Convert]]] = {
    "record": _record,
    "error": _record,
    "enum": _enum,
    "fixed": _fixed,
    "array": _collection,
    "map": _collection,
}


def _branch_name(schema: Any) -> str:
    return str(schema["name"]) if kind_of(schema) in NAMED else kind_of(schema)


def _element(schema: Any) -> Any:
    return schema[ELEMENT[kind_of(schema)]]
