"""What the records of a topic are that has no description: their format by their bytes, their columns by their text."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from headrace.config.format_list import ANY_SCHEMA
from headrace.formats.plain import schema_id_of
from headrace.formats.stored_values import by_bytes
from headrace_queries.columns import STORED, Column, quoted

_LOOKED_AT: Final = 100
_MOST_FIELDS: Final = 200
"""An object with more fields is rather a map, and stays JSON."""
_TYPES: Final = {"UBIGINT": "BIGINT", "HUGEINT": "BIGINT"}
"""Types of DuckDB, and those used here: the difference of two numbers may be negative."""
_NUMBERS: Final = {*_TYPES, "BIGINT", "DOUBLE"}
_RARE: Final = 0.1
"""What fewer of the records have says nothing about the others."""
_MOST_LEVELS: Final = 50
"""What is deeper stays JSON."""
_NULL: Final = "NULL"
_JSON: Final = "JSON"
_OBJECT: Final = "object"
_LIST: Final = "list"

Structure = str | list[Any] | dict[str, Any]
"""What `json_structure` finds: a type, a list with the type of its elements, or types by field."""


def format_of(payloads: Iterable[bytes | None], *, of_keys: bool) -> str:
    """Return the format that the first of these bytes have.

    Bytes that name a schema may be of any format of the registry: their schema says which.
    """
    first = [*islice((data for data in payloads if data), _LOOKED_AT)]
    if first and all(map(schema_id_of, first)):
        return ANY_SCHEMA
    formats = Counter(by_bytes(data).format for data in first)
    if not of_keys and formats["json"] * 2 >= len(first):
        return "json"
    return "binary" if formats["binary"] else "string"


def structure_of(text: str | None) -> Structure:
    """Return the result of `json_structure`; an empty object for None.

    Raises:
        RecursionError: It has hundreds of levels.
    """
    return _with_empty(msgspec.json.decode(text)) if text else {}


def _with_empty(kind: Structure) -> Structure:
    """Return a structure in which an object without fields is one: DuckDB says JSON, as of a list of several types."""
    if isinstance(kind, dict):
        return {name: _with_empty(inner) for name, inner in kind.items()}
    return {} if kind == _JSON else kind


def usual(found: Iterable[tuple[Structure, int]], levels: int = _MOST_LEVELS) -> Structure:
    """Return the structure of records, given each one that occurs and how often.

    What few records have does not change the types of the others: it is left out, and does not fit their columns.
    """
    known = [(kind, count) for kind, count in found if kind != _NULL]
    if not known:
        return _NULL
    if not levels:
        return _JSON
    families: Counter[str] = Counter()
    for kind, count in known:
        families[_family(kind)] += count
    total, most = families.total(), max(families.values())
    [family, *others] = [name for name, count in families.items() if count == most or not _is_rare(count, total)]
    if others:
        return _JSON
    known = [(kind, count) for kind, count in known if _family(kind) == family]
    if family == _OBJECT:
        return _usual_fields(known, levels)
    if family == _LIST:
        elements = [(kind[0] if kind else _NULL, count) for kind, count in known if isinstance(kind, list)]
        return [usual(elements, levels - 1)]
    return "DOUBLE" if any(kind == "DOUBLE" for kind, _ in known) else family


def _usual_fields(found: Iterable[tuple[Structure, int]], levels: int) -> Structure:
    """Return the fields of objects. If they cannot be columns because of a few objects, their fields are left out.

    If most of them cannot be columns, as the keys of maps, it is an object without fields.
    """
    objects = [(kind, count) for kind, count in found if isinstance(kind, dict)]
    fields: dict[str, list[tuple[Structure, int]]] = defaultdict(list)
    for kind, count in objects:
        for name, inner in kind.items():
            fields[name].append((inner, count))
    if not _is_row(fields):
        total = sum(count for _, count in objects)
        kept = {name for name, inner in fields.items() if not _is_rare(sum(count for _, count in inner), total)}
        odd = sum(count for kind, count in objects if not kind.keys() <= kept)
        if not (_is_rare(odd, total) and _is_row(kept)):
            return {}  # whatever their types are, they cannot be columns
        fields = {name: fields[name] for name in fields if name in kept}
    return {name: usual(inner, levels - 1) for name, inner in fields.items()}


def _family(kind: Structure) -> str:
    """Return the kind of a column that takes these values, too: numbers are of several types."""
    if isinstance(kind, str):
        return "BIGINT" if kind in _NUMBERS else kind
    return _LIST if isinstance(kind, list) else _OBJECT


def _is_rare(count: int, total: int) -> bool:
    return count < max(2, total * _RARE)


def inferred(found: Mapping[str, int]) -> tuple[list[Column] | None, int]:
    """Return the columns of objects with these results of `json_structure`, each with how often it occurs.

    The second is how many of the objects have fields that are not columns, because few others have such fields.
    Columns are None if the fields of these objects cannot be columns.
    """
    known: list[tuple[Structure, int]] = []
    more = 0
    for text, count in found.items():
        try:
            known.append((structure_of(text), count))
        except RecursionError:
            more += count
    structure = usual(known)
    if not isinstance(structure, dict):
        return None, 0
    total = sum(found.values())
    for name in [name for name in structure if name.lower().startswith(STORED)]:
        if _is_rare(sum(count for kind, count in known if isinstance(kind, dict) and name in kind), total):
            del structure[name]
    if not _is_row(structure) or any(name.lower().startswith(STORED) for name in structure):
        return None, 0
    columns = [Column(name, _type(kind)) for name, kind in structure.items()]
    return columns, more + sum(count for kind, count in known if _has_more(kind, structure))


def _has_more(kind: Structure, than: Structure) -> bool:
    """Whether a structure has fields that another lacks."""
    if isinstance(kind, dict) and isinstance(than, dict) and _is_row(than):
        return any(name not in than or _has_more(inner, than[name]) for name, inner in kind.items())
    if isinstance(kind, list) and isinstance(than, list):
        return any(_has_more(one, other) for one, other in zip(kind, than, strict=False))
    return False


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


def _is_row(structure: Collection[str]) -> bool:
    """Whether the fields can be columns: SQL ignores the case of names."""
    return 0 < len(structure) <= _MOST_FIELDS and len({name.lower() for name in structure}) == len(structure)
