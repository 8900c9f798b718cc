"""Avro schemas with full names, from what a registry accepted: types are found wherever a text defines them.

Reading needs types and names, and nothing else that a parser checks: not the order of definitions, not defaults, not
whether a logical type is complete. A type is written out at its first use and named afterwards. The result has the
library's mark of a parsed schema, so the library does not parse it again, more strictly than the registry did.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from fastavro.read import LOGICAL_READERS

from headrace.errors import SchemaInvalid

RECORDS: Final = ("record", "error")
NAMED: Final = (*RECORDS, "enum", "fixed")
ELEMENT: Final = {"array": "items", "map": "values"}
PRIMITIVES: Final = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_LOGICAL: Final = frozenset(LOGICAL_READERS)
Change = Callable[[Any], Any]


def kind_of(schema: Any) -> str:
    """Return the type of a schema that is not a union; a named type that is defined elsewhere is its name."""
    return str(schema["type"] if isinstance(schema, dict) else schema)


def resolved(schema: Any, references: Iterable[Any]) -> Any:
    """Return a schema with full names, which needs no other.

    Raises:
        SchemaInvalid: No text defines one of its types.
        LookupError, TypeError, ValueError: It does not have the form of a schema.
    """
    types = _Types()
    for text in (schema, *references):  # the first definition of a name counts
        types.collect(text, "")
    return parsed(types.resolve(schema, ""))


def parsed(schema: Any) -> Any:
    """Return a schema with the library's mark of one that it has parsed."""
    named: dict[str, Any] = {}
    _add_named(schema, named)
    mark = {"__fastavro_parsed": True, "__named_schemas": named}
    if isinstance(schema, list):
        return [{**branch, **mark} if isinstance(branch, dict) else branch for branch in schema]
    return {**schema, **mark} if isinstance(schema, dict) else schema


def _add_named(schema: Any, named: dict[str, Any]) -> None:
    for part in schema if isinstance(schema, list) else _parts(schema) if isinstance(schema, dict) else ():
        _add_named(part, named)
    if isinstance(schema, dict) and schema["type"] in NAMED:
        named[schema["name"]] = schema


def with_leaves(schema: Any, leaf: Change, field: Change = lambda field: field) -> Any:
    """Return a schema with changed fields of records, and changed types that are not records; names stay."""
    if isinstance(schema, list):
        return [with_leaves(branch, leaf, field) for branch in schema]
    kind = kind_of(schema)
    if kind in ELEMENT:
        return leaf({"type": kind, ELEMENT[kind]: with_leaves(schema[ELEMENT[kind]], leaf, field)})
    if kind in RECORDS:
        fields = [{**field(each), "type": with_leaves(each["type"], leaf, field)} for each in schema["fields"]]
        return {"type": kind, "name": schema["name"], "fields": fields}
    return leaf(schema)


def is_recursive(schema: Any, inside: tuple[str, ...] = ()) -> bool:
    """Return whether a type of the schema contains itself, so that the depth of a value has no bound."""
    if isinstance(schema, list):
        return any(is_recursive(branch, inside) for branch in schema)
    kind = kind_of(schema)
    if kind in RECORDS:
        return any(is_recursive(field["type"], (*inside, schema["name"])) for field in schema["fields"])
    return kind in inside or (kind in ELEMENT and is_recursive(schema[ELEMENT[kind]], inside))


class _Types:
    """The named types of all texts, and those that are written out so far."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[Any, str]] = {}
        """Definitions as registered, with the namespace of the names in them."""
        self._written: set[str] = set()

    def collect(self, schema: Any, namespace: str) -> None:
        if isinstance(schema, list):
            for branch in schema:
                self.collect(branch, namespace)
        if isinstance(schema, dict):
            if schema.get("type") in NAMED:
                name, namespace = _full_name(schema, namespace)
                self._texts.setdefault(name, (schema, namespace))
            for part in _parts(schema):
                self.collect(part, namespace)

    def resolve(self, schema: Any, namespace: str) -> Any:
        if isinstance(schema, list):
            return [self.resolve(branch, namespace) for branch in schema]
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind in NAMED and not isinstance(schema, str):
            return self._define(*_full_name(schema, namespace), schema)
        if kind in ELEMENT and not isinstance(schema, str):
            return {"type": kind, ELEMENT[kind]: self.resolve(schema[ELEMENT[kind]], namespace)}
        if kind not in PRIMITIVES:
            return self._by_name(str(kind), namespace)
        logical = {} if isinstance(schema, str) else _logical(schema, kind)
        return {"type": kind, **logical} if logical else kind

    def _by_name(self, name: str, namespace: str) -> Any:
        # A name without a namespace is first one of the namespace around it, as in Java.
        for full in (name,) if "." in name or not namespace else (f"{namespace}.{name}", name):
            if full in self._texts:
                schema, own = self._texts[full]
                return self._define(full, own, schema)
        raise SchemaInvalid(f"not a valid Avro schema: no text defines the type {name[:200]!r}")

    def _define(self, name: str, namespace: str, schema: Any) -> Any:
        if name in self._written:
            return name
        self._written.add(name)
        kind = schema["type"]
        if kind in RECORDS:
            fields = [_field(field, self.resolve(field["type"], namespace)) for field in schema["fields"]]
            return {"type": kind, "name": name, "fields": fields}
        if kind == "enum":
            return {"type": kind, "name": name, "symbols": [str(symbol) for symbol in schema["symbols"]]}
        return {"type": kind, "name": name, "size": int(schema["size"]), **_logical(schema, kind)}


def _field(field: Any, kind: Any) -> Any:
    default = {"default": field["default"]} if "default" in field else {}
    return {"name": str(field["name"]), "type": kind, **default}


def _parts(schema: Any) -> list[Any]:
    found = [schema[name] for name in ELEMENT.values() if name in schema]
    return [*found, *(field["type"] for field in schema.get("fields") or ())]


def _full_name(schema: Any, namespace: str) -> tuple[str, str]:
    """Return the full name of a type, and the namespace of the names in it."""
    name = str(schema["name"])
    own = schema.get("namespace")
    namespace = name.rpartition(".")[0] if "." in name else namespace if own is None else str(own)
    return (name if "." in name or not namespace else f"{namespace}.{name}"), namespace


def _logical(schema: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of a logical type; of one that is unknown or not complete there are none, as in Java."""
    logical, precision, scale = schema.get("logicalType"), schema.get("precision"), schema.get("scale", 0)
    if f"{kind}-{logical}" not in _LOGICAL:
        return {}
    if logical != "decimal":
        return {"logicalType": logical}
    is_complete = type(precision) is int and type(scale) is int and 0 <= scale <= precision and precision > 0
    return {"logicalType": logical, "precision": precision, "scale": scale} if is_complete else {}
