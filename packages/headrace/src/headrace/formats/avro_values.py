"""How values of Avro's types are shown: in its JSON encoding, as Python values, and in rows of tables and pipelines.

Avro's times, dates, UUIDs and decimals hold more than Python's. A handler gets the number or the text of such a value;
in a row, which has a column of a type, it is an error.
"""

import struct
from collections.abc import Callable
from datetime import datetime, time, timedelta
from decimal import MAX_PREC, Context, Decimal
from typing import Any, Final

from fastavro.read import LOGICAL_READERS

from headrace.formats.avro_schema import kind_of, parsed, with_leaves

JSON_TYPE: Final = "headrace-json"
"""Logical type of values that JSON does not have: bytes, floats that are not numbers or have only 32 bits."""
_KEPT: Final = "headrace-kept"
_LARGEST_DOUBLE: Final = 1.7976931348623157e308
_EXACT: Final = Context(prec=MAX_PREC)
_AS_FLOAT: Final = struct.Struct("<f")


def to_json(value: Any, *_: Any) -> Any:
    """Convert a value of logical type `JSON_TYPE` to one that JSON has."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if -_LARGEST_DOUBLE <= value <= _LARGEST_DOUBLE:
        return value
    if value != value:
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _shortest(value: float, *_: Any) -> float:
    """Return the number with the fewest digits that is the same 32-bit float."""
    if value - value:  # neither infinity nor NaN
        return value
    for digits in (6, 7, 8):
        short = float(f"{value:.{digits}g}")
        if _AS_FLOAT.unpack(_AS_FLOAT.pack(short))[0] == value:
            return short
    return float(f"{value:.9g}")


def _float_to_json(value: float, *_: Any) -> Any:
    return to_json(_shortest(value))


def _decimal(data: bytes, schema: Any, *_: Any) -> Decimal:
    """Return a decimal with every digit, also of more than the declared precision."""
    return Decimal(int.from_bytes(data, "big", signed=True)).scaleb(-schema["scale"], _EXACT)


def _decimal_text(data: bytes, schema: Any, *_: Any) -> str:
    return format(_decimal(data, schema), "f")


def _time(unit: str) -> Callable[..., time]:
    def read(value: int, *_: Any) -> time:
        found = datetime.min + timedelta(**{unit: value})
        if found.toordinal() != 1:
            raise OverflowError
        return found.time()

    return read


def _kept(value: Any, schema: Any, *_: Any) -> Any:
    try:
        return LOGICAL_READERS[schema["reader"]](value, schema, None)
    except (ValueError, ArithmeticError):
        return value


LOGICAL_READERS.update(
    {
        **{f"{kind}-{JSON_TYPE}": to_json for kind in ("bytes", "fixed", "double")},
        **{f"{kind}-headrace-decimal": _decimal for kind in ("bytes", "fixed")},
        **{f"{kind}-headrace-text": _decimal_text for kind in ("bytes", "fixed")},
        **{f"{kind}-{_KEPT}": _kept for kind in ("int", "long", "string")},
        f"float-{JSON_TYPE}": _float_to_json,
        "float-headrace-shortest": _shortest,
        "int-headrace-time": _time("milliseconds"),
        "long-headrace-time": _time("microseconds"),
    }
)


def for_python(schema: Any) -> Any:
    """Return a schema of the same bytes with which the reader returns Python values."""
    return parsed(with_leaves(schema, _python))


def for_python_kept(schema: Any) -> Any:
    """Return the same as `for_python`, but numbers and texts stay where Python cannot hold the value."""
    return parsed(with_leaves(schema, lambda leaf: _keeping(_python(leaf), leaf)))


def for_rows(schema: Any) -> Any:
    """Return a schema of the same bytes with which the reader returns what JSON has, for columns of SQL."""
    return parsed(with_leaves(schema, _row))


def _python(leaf: Any) -> Any:
    logical = _logical(leaf)
    if logical == "decimal":
        return {**leaf, "logicalType": "headrace-decimal"}
    if logical.startswith("time-"):
        return {**leaf, "logicalType": "headrace-time"}
    return {"type": "float", "logicalType": "headrace-shortest"} if leaf == "float" else leaf


def _row(leaf: Any) -> Any:
    found = _python(leaf)
    if kind_of(leaf) in ("float", "double"):
        return {"type": kind_of(leaf), "logicalType": JSON_TYPE}
    if _logical(found) == "headrace-decimal":
        return {**found, "logicalType": "headrace-text"}
    return "string" if kind_of(leaf) == "string" else found


def _logical(leaf: Any) -> str:
    return str(leaf.get("logicalType", "")) if isinstance(leaf, dict) else ""


def _keeping(read: Any, leaf: Any) -> Any:
    kind = kind_of(leaf)
    if kind not in ("int", "long", "string") or not _logical(leaf):
        return read
    return {"type": kind, "logicalType": _KEPT, "reader": f"{kind}-{_logical(read)}"}
