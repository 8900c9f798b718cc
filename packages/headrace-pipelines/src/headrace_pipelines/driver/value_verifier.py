"""Verifies values that Spark takes from Python: one that only Spark refuses would fail its task again and again."""

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StringType, StructType, _make_type_verifier


def verifier_of(kind: DataType, *, nullable: bool = True) -> Callable[[Any], None]:
    """Return what raises TypeError or ValueError for a value that is not of a type, or does not fit it."""
    verify = _make_type_verifier(kind, nullable=nullable)
    if not _has_limits(kind):
        return verify

    def verified(value: Any) -> None:
        verify(value)
        _require_fit(kind, value)

    return verified


def _has_limits(kind: DataType) -> bool:
    return isinstance(kind, StringType | DecimalType) or any(_has_limits(each) for each in _parts(kind))


def _parts(kind: DataType) -> Iterable[DataType]:
    if isinstance(kind, StructType):
        return [field.dataType for field in kind.fields]
    if isinstance(kind, MapType):
        return [kind.keyType, kind.valueType]
    return [kind.elementType] if isinstance(kind, ArrayType) else []


def _require_fit(kind: DataType, value: Any) -> None:
    """Verify the texts and decimals in a value, which PySpark takes as they are."""
    if value is None:
        return
    if isinstance(kind, StringType):
        if not isinstance(value, str):
            raise TypeError(f"a STRING is a str, and this one is of type {type(value).__name__}")
        value.encode()  # half of a surrogate pair is not text
    elif isinstance(kind, DecimalType):
        _require_digits(kind, value)
    elif isinstance(kind, StructType):
        is_dict = isinstance(value, dict)
        for number, field in enumerate(kind.fields):
            _require_fit(field.dataType, value.get(field.name) if is_dict else value[number])
    elif isinstance(kind, ArrayType):
        for each in value:
            _require_fit(kind.elementType, each)
    elif isinstance(kind, MapType):
        for key, each in value.items():
            _require_fit(kind.keyType, key)
            _require_fit(kind.valueType, each)


def _require_digits(kind: DecimalType, value: Decimal) -> None:
    fits = value.is_finite() and (value == 0 or value.adjusted() < kind.precision - kind.scale)
    if not (fits and value == round(value, kind.scale)):
        raise ValueError(
            f"a number does not fit DECIMAL({kind.precision},{kind.scale}): round it, or write a larger type"
        )
