"""Which JSON values Spark takes for another value instead of rejecting them.

A search in the text shows whether a record may have such a value. Only then are the columns of its type parsed again.
"""

from functools import reduce
from operator import or_
from typing import Final, NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

_TEXT: Final = StringType()


class _Misread(NamedTuple):
    """Values of a type that Spark misreads."""

    kind: type[DataType]
    json: str
    """What such a value, or a right one, begins with in JSON."""
    parsed_as: DataType | None
    """The type as which it is parsed again; None for its own."""
    text: str
    """What a misread value then begins with as a text."""


_QUOTE: Final = r"""["'][ \x7f]*"""
"""What a text begins with; Spark takes single quotes too, and ignores blanks of times."""
_YEAR: Final = (_QUOTE + r"[+-]?\d{5}", None, r"\+")
"""A text such as 202601 is a year. From the year 10,000 on Spark writes a plus."""
_LARGE: Final = (r"-?(?:\d{30}|[\d.]*+[eE]\+?\d\d)", None, "-?Infinity")
_MISREAD: Final = (
    _Misread(TimestampType, *_YEAR),
    # Right are seconds of less than 12 digits, and texts with a year. A time alone is one of today.
    _Misread(TimestampType, rf"-?\d{{12}}|{_QUOTE}(?:T\d|\d{{1,2}}:)", _TEXT, r'(?!-?\d{1,11}"| *[+-]?\d{4}(?!\d))'),
    _Misread(TimestampNTZType, *_YEAR),
    _Misread(DateType, *_YEAR),
    _Misread(ByteType, r"[12]\d\d", _TEXT, r"12[89]|1[3-9]\d|2\d\d"),  # 128 is -128
    _Misread(DecimalType, _QUOTE + r"[-+.\p{Nd}]*,", _TEXT, '[^"]*,'),  # "1,5" is 15
    _Misread(FloatType, *_LARGE),
    _Misread(DoubleType, *_LARGE),
)
_ESCAPED: Final = rf"[:\[,]\s*{_QUOTE}\\|\\u00[235]"
"""A text that begins with an escape, or has one for a digit, a sign or a T."""
_PAIR: Final = r"\\[^u]|\\u[dD][89abAB]..\\u[dD][c-fC-F].."
"""An escape of one character, which may be a backslash, or of a surrogate pair."""


def no_text(text: Column) -> Column:
    """Return why JSON has what is not text, which Spark would replace; null if it has nothing such."""
    may_be = text.contains("\\ud") | text.contains("\\uD")
    half = may_be & f.regexp_replace(text, _PAIR, "").rlike(r"\\u[dD][89a-fA-F]")
    why = f.when(half, f.lit("the value has half of a surrogate pair"))
    return f.when(~f.is_valid_utf8(text), f.lit("the value is not UTF-8 text")).otherwise(why)


def is_misread(text: Column, schema: StructType) -> Column:
    """Return whether Spark misreads a value of a JSON object with such a schema."""
    parts = [(rule, part) for rule in _MISREAD if (part := _part(schema, rule))]
    if not parts:
        return f.lit(False)
    beginnings = "|".join(dict.fromkeys(rule.json for rule, _ in parts))
    may_be = text.rlike(rf"[:\[,]\s*(?:{beginnings})|{_ESCAPED}")
    found = (_found(text, rule, part) for rule, part in parts)
    return f.when(may_be, reduce(or_, found)).otherwise(f.lit(False))


def _found(text: Column, rule: _Misread, part: DataType) -> Column:
    finite = f.regexp_replace(text, "[-+]?(?:Infinity|INF)", "NaN")  # so that only an overflow is infinite
    values = f.to_json(f.from_json(finite, part))  # type: ignore[arg-type]
    return f.coalesce(values.rlike(rf'"(?:{rule.text})[^"]*"[,}}\]]'), f.lit(False))


def _part(kind: DataType, rule: _Misread) -> DataType | None:
    """Return the parts of a type that a rule is about; None if it has none."""
    if isinstance(kind, rule.kind):
        return rule.parsed_as or kind
    if isinstance(kind, StructType):
        fields = [StructField(field.name, part) for field in kind.fields if (part := _part(field.dataType, rule))]
        return StructType(fields) if fields else None
    if isinstance(kind, ArrayType):
        part = _part(kind.elementType, rule)
        return part and ArrayType(part)
    if isinstance(kind, MapType):
        part = _part(kind.valueType, rule)
        return part and MapType(_TEXT, part)
    return None
