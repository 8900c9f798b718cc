"""What the records of a topic are that has no description: their format by their bytes, their columns by their text."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from headrace.config.format_list import SCHEMA_TYPES
from headrace.errors import FormatError
from headrace.formats.plain import schema_id_of
from headrace.formats.schema_codec import PLAIN_CODECS
from headrace.queries.columns import STORED, Column, quoted

_LOOKED_AT: Final = 100
_MOST_FIELDS: Final = 200
"""An object with more fields is rather a map, and stays JSON."""
_TYPES: Final = {"UBIGINT": "BIGINT", "HUGEINT": "BIGINT"}
"""Types of DuckDB, and those used here: the difference of two numbers may be negative."""
_NULL: Final = "NULL"
_JSON: Final = "JSON"

Structure = str | list[Any] | dict[str, Any]
"""What `json_group_structure` finds: a type, a list with the type of its elements, or types by field."""


def format_of(payloads: Iterable[bytes | None], *, of_keys: bool) -> str:
    """Return the format that the first of these bytes have.

    Bytes that name a schema may be of any format of the registry: their schema says which.
    """
    first = [*islice((data for data in payloads if data), _LOOKED_AT)]
    if first and all(map(schema_id_of, first)):
        return next(iter(SCHEMA_TYPES))
    if not of_keys and sum(_fits("json", data) for data in first) * 2 >= len(first):
        return "json"
    return "string" if all(_fits("string", data) for data in first) else "binary"


def _fits(name: str, data: bytes) -> bool:
    try:
        PLAIN_CODECS[name].decode(data)
    except FormatError:
        return False
    return True


def structure_of(text: str | None) -> Structure:
    """Return the result of `json_group_structure`; an empty object for None."""
    found: Structure = msgspec.json.decode(text) if text else {}
    return found


def merged(one: Structure, other: Structure) -> Structure:
    """Return the structure of records of which some have one, and some the other."""
    if one == other or other == _NULL:
        return one
    if one == _NULL:
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {name: merged(one[name], kind) if name in one else kind for name, kind in other.items()}
    if isinstance(one, list) and isinstance(other, list):
        return [merged(one[0], other[0])] if one and other else one or other
    kinds = {_TYPES.get(kind, kind) for kind in (one, other) if isinstance(kind, str)}
    if len(kinds) == 1 and isinstance(one, str) and isinstance(other, str):
        return kinds.pop()
    return "DOUBLE" if kinds == {"BIGINT", "DOUBLE"} else _JSON


def inferred(structure: Structure) -> list[Column] | None:
    """Return the columns of objects with this structure; None if their fields cannot be columns."""
    if not isinstance(structure, dict) or not _is_row(structure):
        return None
    if any(name.lower().startswith(STORED) for name in structure):
        return None
    return [Column(name, _type(kind)) for name, kind in structure.items()]


def for_fields(structure: Structure, paths: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the part of a structure that has the fields of these paths; a field that it lacks is null."""
    found: dict[str, Any] = {}
    names = {path[0].lower() for path in paths}
    for name, kind in structure.items() if isinstance(structure, dict) else ():
        if name.lower() in names:
            names.remove(name.lower())  # SQL cannot tell it from another that differs in case
            found[name] = _plain(kind)
    for *outer, last in paths:
        node = found
        for step in outer:
            name = _same(step, node)
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        node.setdefault(_same(last, node), _NULL)
    return found


def _same(name: str, known: Iterable[str]) -> str:
    """Return the name as it is written in the data."""
    return next((one for one in known if one.lower() == name.lower()), name)


def _plain(structure: Structure) -> Structure:
    """Return a structure without what `json_transform` refuses."""
    if isinstance(structure, str):
        return _TYPES.get(structure, structure)
    if isinstance(structure, list):
        return [_plain(kind) for kind in structure] or _JSON
    return {name: _plain(kind) for name, kind in structure.items()} if _is_row(structure) else _JSON


def _type(structure: Structure) -> str:
    """Return the type in DuckDB; a field that is always null says nothing, and is JSON."""
    if isinstance(structure, str):
        return _JSON if structure == _NULL else _TYPES.get(structure, structure)
    if isinstance(structure, list):
        return f"{_type(structure[0])}[]" if structure else _JSON
    if not _is_row(structure):
        return _JSON
    return f"STRUCT({', '.join(f'{quoted(name)} {_type(kind)}' for name, kind in structure.items())})"


def _is_row(structure: Mapping[str, Any]) -> bool:
    """Whether the fields can be columns: SQL ignores the case of names."""
    return 0 < len(structure) <= _MOST_FIELDS and len({name.lower() for name in structure}) == len(structure)
