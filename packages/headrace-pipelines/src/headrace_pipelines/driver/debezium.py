"""Debezium's events as rows: the envelope, the row before or after the change, and the values that JSON lacks.

The declared type of a column decides on its conversion. Where a number or a text has two meanings, only the schema in
the message chooses one; without it the record is corrupt. All of it is SQL, because executors may have no Python for
it.
"""

from collections.abc import Callable, Mapping
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from headrace.errors import PipelineInvalid
from headrace_pipelines.sources import CHANGE_COLUMNS

_POSITION: Final = (
    "lsn BIGINT, file STRING, pos BIGINT, `row` BIGINT, commit_lsn STRING, change_lsn STRING, "
    "event_serial_no BIGINT, scn DECIMAL(38,0)"
)
"""Fields of `source` that are positions: of PostgreSQL, MySQL and MariaDB, SQL Server, and Oracle, in this order."""
_SOURCE: Final = f"{_POSITION.replace('DECIMAL(38,0)', 'STRING')}, ts_ms BIGINT"
_SCHEMA: Final = (
    "fields ARRAY<STRUCT<field: STRING, fields: ARRAY<STRUCT<field: STRING, name: STRING, "
    "parameters: STRUCT<scale: STRING>>>>>"
)
"""What is read of the schema in a message: the name and scale of each column."""
_CHANGES: Final = ("c", "r", "u", "d")
_UNAVAILABLE: Final = "__debezium_unavailable_value"
"""Stands for a large value that an update did not change, and that the database did not log."""
_UNAVAILABLE_BYTES: Final = _UNAVAILABLE.encode()
_KAFKA: Final = "org.apache.kafka.connect.data"
_FACTORS: Final = {
    "io.debezium.time.Timestamp": 1000,
    f"{_KAFKA}.Timestamp": 1000,
    "io.debezium.time.MicroTimestamp": 1,
}
"""Microseconds of one unit, by the name of a type."""
_NANOS: Final = "io.debezium.time.NanoTimestamp"
_FIRST_MICROS, _LAST_MICROS = -62_135_596_800_000_000, 253_402_300_799_999_999
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_CONVERTED: Final = (DecimalType, DateType, TimestampType, TimestampNTZType)
"""Types whose values are converted here; those of others are as in JSON."""


def envelope(columns: StructType) -> StructType:
    """Return the type of an event as JSON: an envelope, plain or below `payload` with its schema.

    Raises:
        PipelineInvalid: A column has a name of Debezium's metadata, or a type that cannot be nested.
    """
    raw = StructType()
    for column in columns.fields:
        if column.name.lower() in CHANGE_COLUMNS:
            raise PipelineInvalid(f"schema has the column {column.name}, which change: debezium adds: rename it")
        converted = isinstance(column.dataType, _CONVERTED)
        if not converted and (kind := _nested(column.dataType)):
            what = f"schema has {kind} below column {column.name}, where its unit or scale is not known"
            raise PipelineInvalid(f"{what}: write STRING or BIGINT there, and convert it in SQL")
        raw = raw.add(column.name, StringType() if converted else column.dataType)
    fields = [StructField("before", raw), StructField("after", raw), StructField("op", StringType())]
    fields += [StructField("ts_ms", LongType()), StructField("source", _struct(_SOURCE))]
    whole = [*fields, StructField("payload", StructType(fields))]
    if any(isinstance(column.dataType, _CONVERTED) for column in columns.fields):
        whole.append(StructField("schema", _struct(_SCHEMA)))
    return StructType(whole)


def _struct(text: str) -> StructType:
    found = StructType.fromDDL(text)
    assert isinstance(found, StructType)
    return found


def _nested(kind: DataType) -> str:
    """Return a converted type below another one; empty without one."""
    if isinstance(kind, _CONVERTED):
        return kind.simpleString().upper()
    if isinstance(kind, ArrayType):
        return _nested(kind.elementType)
    if isinstance(kind, MapType):
        return _nested(kind.keyType) or _nested(kind.valueType)
    found = kind.fields if isinstance(kind, StructType) else []
    return next((below for each in found if (below := _nested(each.dataType))), "")


def changed_row(event: Column, columns: StructType) -> tuple[Column, Column]:
    """Return the row of an event with Debezium's metadata, and why the event has none; null if it has one.

    Args:
        event: The event as `envelope` describes it.
        columns: The declared columns.
    """
    plain = f.struct(*(event[name].alias(name) for name in ("before", "after", "op", "ts_ms", "source")))
    change = f.when(event["op"].isNotNull(), plain).otherwise(event["payload"])
    op, source = change["op"], change["source"]
    raw = f.when(op == "d", change["before"]).otherwise(change["after"])
    values: dict[str, Column] = {}
    problems: list[Column] = []
    for column in columns.fields:
        value, problem = _value(event, raw[column.name], column)
        values[column.name] = value
        problems.append(problem)
    position = [
        _try(source[field.name], field.dataType.simpleString()).alias(field.name) for field in _struct(_POSITION).fields
    ]
    values |= {"__op": op, "__deleted": op == "d", "__ts_ms": change["ts_ms"], "__source_ts_ms": source["ts_ms"]}
    values["__position"] = f.struct(*position)
    row = f.struct(*(value.alias(name) for name, value in values.items()))
    why = (
        f.when(op.isNull(), f.lit("the value is not an event of Debezium: it has no op"))
        .when(op == "t", f.lit("op is t: the table was truncated, which changes no single row"))
        .when(~op.isin(*_CHANGES), f.lit("op is none of c, r, u and d: the event has no row"))
        .when(raw.isNull() & (op == "d"), f.lit("a delete without before: set REPLICA IDENTITY in the database"))
        .when(raw.isNull(), f.lit("the event has no after"))
    )
    return row, why.otherwise(f.coalesce(*problems, f.lit(None).cast("string")))


def _value(event: Column, raw: Column, column: StructField) -> tuple[Column, Column]:
    """Return the value of a column, and the problem with it."""
    kind, name = column.dataType, column.name
    missing = f.lit(
        f"column {name} has the placeholder for a value that the database did not log: set REPLICA IDENTITY FULL"
    )
    convert = next((_CONVERSIONS[each] for each in _CONVERSIONS if isinstance(kind, each)), None)
    if convert:
        value = convert(raw, _declared(event, name), kind.simpleString())
        wrong = f.lit(f"column {name} is not {kind.simpleString().upper()}, or its unit or scale is not known")
        problem = f.when(raw == _UNAVAILABLE, missing).when(raw.isNotNull() & value.isNull(), wrong)
        return value, problem
    if isinstance(kind, StringType):
        return raw, f.when(raw == _UNAVAILABLE, missing)
    if isinstance(kind, BinaryType):
        return raw, f.when(raw == f.lit(_UNAVAILABLE_BYTES), missing)
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StringType):
        return raw, f.when(f.array_contains(raw, _UNAVAILABLE), missing)
    return raw, f.lit(None).cast("string")


def _declared(event: Column, name: str) -> Column:
    """Return what the schema in the message says of a column: its name and parameters; null without a schema."""
    rows = f.filter(event["schema"]["fields"], lambda part: part["field"] == "after")
    fields = f.get(rows, f.lit(0))["fields"]
    return f.get(f.filter(fields, lambda part: part["field"] == name), f.lit(0))


def _try(value: Column, kind: str) -> Column:
    return value.try_cast(kind)


def _decimal(raw: Column, declared: Column, kind: str) -> Column:
    """Convert a number or its text; base64 with its scale, if the schema or the value has a scale."""
    own = f.from_json(raw, _struct("scale INT, value STRING"))
    is_bytes = declared["name"] == f"{_KAFKA}.Decimal"
    return (
        f.when(is_bytes, _unscaled(raw, _try(declared["parameters"]["scale"], "int"), kind))
        .when(raw.startswith("{"), _unscaled(own["value"], own["scale"], kind))
        .otherwise(_try(raw, kind))
    )


def _unscaled(text: Column, scale: Column, kind: str) -> Column:
    """Convert the base64 of a whole number of at most 16 bytes, highest first, in two's complement."""
    digits = f.hex(f.try_to_binary(text, f.lit("base64")))
    sign = f.when(f.substr(digits, f.lit(1), f.lit(1)) >= "8", f.lit("F")).otherwise(f.lit("0"))
    fits = (f.length(digits) > 0) & (f.length(digits) <= 32)
    whole = f.when(fits, f.lpad(digits, 32, sign))
    high = f.conv(f.substr(whole, f.lit(1), f.lit(16)), 16, -10).cast("decimal(20,0)")
    low = f.conv(f.substr(whole, f.lit(17), f.lit(16)), 16, 10).cast("decimal(20,0)")
    number = f.try_add(f.try_multiply(high, f.lit(str(1 << 64)).cast("decimal(20,0)")), low)
    return _try(f.concat(number.cast("string"), f.lit("E"), (-scale).cast("string")), kind)


def _date(raw: Column, declared: Column, kind: str) -> Column:
    """Convert days since 1970, or a text."""
    date = f.when(raw.rlike(r"^-?\d+$"), f.date_from_unix_date(_try(raw, "int"))).otherwise(_try(raw, kind))
    return f.when(f.unix_date(date).between(_FIRST_DAY, _LAST_DAY), date)


def _timestamp(raw: Column, declared: Column, kind: str) -> Column:
    """Convert a number in the unit that the schema names, or a text."""
    name, number = declared["name"], _try(raw, "bigint")
    micros = f.when(name == _NANOS, _thousandth(number))
    for known, factor in _FACTORS.items():
        micros = micros.when(name == known, f.try_multiply(number, f.lit(factor)))
    within = micros.between(_FIRST_MICROS, _LAST_MICROS)
    of_number = f.when(within, f.timestamp_micros(micros).cast(kind))
    has_date = raw.rlike(r"^\d{4}-")  # Spark would take a time alone for one of today
    return f.when(raw.rlike(r"^-?\d+$"), of_number).when(has_date, _try(raw, kind))


def _thousandth(number: Column) -> Column:
    """Return a number divided by 1000, rounded down."""
    return f.floor(number.cast("decimal(20,0)") / 1000).cast("bigint")


_CONVERSIONS: Final[Mapping[type[DataType], Callable[[Column, Column, str], Column]]] = {
    DecimalType: _decimal,
    DateType: _date,
    TimestampType: _timestamp,
    TimestampNTZType: _timestamp,
}
