"""Which JSON values Spark takes for another value instead of rejecting them.

A value is compared with what its type can mean; the text is searched only where a number is infinite. Searching each
text for all that Spark misreads would halve the throughput of a source.
"""

from functools import reduce
from operator import or_
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    MapType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

_RANGES: Final[dict[type[DataType], tuple[str, str]]] = {
    TimestampType: ("TIMESTAMP'0001-01-01 00:00:00Z'", "TIMESTAMP'9999-12-31 23:59:59.999999Z'"),
    TimestampNTZType: ("TIMESTAMP_NTZ'0001-01-01 00:00:00'", "TIMESTAMP_NTZ'9999-12-31 23:59:59.999999'"),
    DateType: ("DATE'0001-01-01'", "DATE'9999-12-31'"),
}
"""The years that a text of ISO 8601 can have: milliseconds as seconds are in others."""
_PAIR: Final = r"\\[^u]|\\u[dD][89abAB]..\\u[dD][c-fC-F].."
"""An escape of one character, which may be a backslash, or of a surrogate pair."""


def no_text(text: Column) -> Column:
    """Return why JSON has what is not text, which Spark would replace; null if it has nothing such."""
    may_be = text.contains("\\ud") | text.contains("\\uD")
    half = may_be & f.regexp_replace(text, _PAIR, "").rlike(r"\\u[dD][89a-fA-F]")
    why = f.when(half, f.lit("the value has half of a surrogate pair"))
    return f.when(~f.is_valid_utf8(text), f.lit("the value is not UTF-8 text")).otherwise(why)


def is_misread(row: Column, schema: StructType, text: Column) -> Column:
    """Return whether a row has a year or an infinite number that its JSON does not have."""
    found = _misread(row, schema, text)
    return f.lit(False) if found is None else found


def _misread(value: Column, kind: DataType, text: Column) -> Column | None:
    if bounds := _RANGES.get(type(kind)):
        return ~value.between(*(f.expr(bound) for bound in bounds))
    if isinstance(kind, FloatType | DoubleType):
        return (f.abs(value) == float("inf")) & ~text.rlike("INF|Infinity")
    if isinstance(kind, StructType):
        parts = [_misread(value.getField(field.name), field.dataType, text) for field in kind.fields]
        return _any(parts) if any(part is not None for part in parts) else None
    if isinstance(kind, MapType):
        return _misread(f.map_values(value), ArrayType(kind.valueType), text)
    if isinstance(kind, ArrayType) and _misread(value, kind.elementType, text) is not None:
        return f.exists(value, lambda each: _any([_misread(each, kind.elementType, text)]))
    return None


def _any(found: list[Column | None]) -> Column:
    """Return whether one holds; a null value is not misread."""
    known = [f.coalesce(each, f.lit(False)) for each in found if each is not None]
    return reduce(or_, known, f.lit(False))
