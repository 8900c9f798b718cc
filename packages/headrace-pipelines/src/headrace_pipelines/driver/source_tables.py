"""Sources as tables: records of topics as rows, files, generated rows, static tables."""

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import BooleanType, StringType, StructField, StructType, VariantType

from headrace.config.format_list import SCHEMA_TYPES, STRINGS
from headrace.errors import PipelineInvalid
from headrace_pipelines.driver.json_values import is_misread, no_text
from headrace_pipelines.driver.kafka_rows import HEADERS, history_headers
from headrace_pipelines.driver_protocol import DriverPlan
from headrace_pipelines.sources import (
    CORRUPT_FLOW,
    CORRUPT_RECORDS,
    FileSource,
    KafkaSource,
    RateSource,
    TableSource,
    texts,
)

RAW = "records"
"""Appended to a source's name with a blank: the table of its unchanged records, for handlers."""
CORRUPT = "_corrupt_record"
"""Column with the text of a row that does not match its schema."""
_PARSER = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": CORRUPT,
    "enableDateTimeParsingFallback": "false",  # with it a DATE text of digits is days since 1970
}
_END = f"_{uuid4().hex[:8]}"
"""Last field of objects that are parsed; its name is random, so that no record has it."""
RECORD_COLUMNS = {"key": "_record_key", "headers": "_record_headers"}
"""Columns of Kafka's connector, and their names among the columns of a row."""
ORDER_COLUMNS = {"partition": "_record_partition", "offset": "_record_offset"}
"""The same for the columns by which the rows of a processor are sorted."""
_EXCERPT_LENGTH = 40
"""Characters of a field's value in the reason of a dead letter, which has the whole value."""
_LATENCY_BOUND_SECONDS = 1.0


def register_source(spark: SparkSession, plan: DriverPlan, name: str, *, bounded: bool = False) -> None:
    """Make a source known to SQL under its name, and the corrupt records of a topic under its name with `_corrupt`.

    Every flow that reads it counts the corrupt records of a topic. A `bounded` table is not a stream: it has the slices
    of the plan's task.
    """
    source = plan.spec.sources[name]
    reader: Any = spark.read if bounded else spark.readStream
    match source:
        case KafkaSource():
            options = {**kafka_options(plan, source), **(_bounds(plan, source) if bounded else {})}
            raw = reader.format("kafka").options(**options).load()
            raw.createOrReplaceTempView(f"`{name} {RAW}`")
            records = with_rows(raw, source, plan)
            corrupt_records(records, plan, name).createOrReplaceTempView(name + CORRUPT_RECORDS)
            table = rows(records, source, name)
        case RateSource():
            first = spark.range(source.rate).select(
                f.current_timestamp().alias("timestamp"), f.col("id").alias("value")
            )
            table = first if bounded else reader.format("rate").option("rowsPerSecond", source.rate).load()
        case FileSource():
            typed = reader.format(source.format).schema(source.value_schema)
            table = typed.options(**texts(source.options)).load(plan.path(source.files))
        case TableSource():
            table = _table(spark, plan, source)
    table.createOrReplaceTempView(name)


def _bounds(plan: DriverPlan, source: KafkaSource) -> dict[str, str]:
    """Return the connector's options for the slice of a topic."""
    slices = plan.task.slices[source.topic]
    sides = {"startingOffsets": 0, "endingOffsets": 1}
    found = {name: json.dumps({source.topic: {k: v[at] for k, v in slices.items()}}) for name, at in sides.items()}
    return {**found, "kafka.fetch.max.wait.ms": "10"}


def kafka_options(plan: DriverPlan, source: KafkaSource) -> dict[str, str]:
    """Return the connector's options for a source."""
    trigger = plan.spec.trigger
    quick = not trigger.once and trigger.interval_seconds < _LATENCY_BOUND_SECONDS
    return {
        **plan.security,
        "kafka.bootstrap.servers": plan.bootstrap_servers,
        "subscribe": source.topic,
        "startingOffsets": source.starting,
        "includeHeaders": "true",
        # A micro-batch in real-time mode reads without an end.
        **({} if trigger.realtime else {"maxOffsetsPerTrigger": str(trigger.max_records)}),
        # Missing offsets stop the flow: continuing would silently skip records.
        "failOnDataLoss": "true",
        "kafka.isolation.level": "read_committed",
        # A short outage of Kafka passes; after about a minute the flow fails, and readiness has the reason.
        "kafka.request.timeout.ms": "15000",
        "kafka.default.api.timeout.ms": "15000",
        # A micro-batch waits the default of 500 ms in full whenever a partition has nothing more.
        **({"kafka.fetch.max.wait.ms": "10"} if quick else {}),
        **texts(source.options),
    }


def with_rows(records: DataFrame, source: KafkaSource, plan: DriverPlan) -> DataFrame:
    """Return Kafka records with a column `row`, `good`, whether the value is a row of the source, and `problem`."""
    records = records.withColumn("problem", f.lit(None).cast("string"))
    if source.value_format in STRINGS:
        kind = f.col("value").cast(source.value_format)
        good = f.is_valid_utf8(kind) if source.value_format == "string" else f.col("value").isNotNull()
        return records.withColumns({"row": f.struct(kind.alias("value")), "good": f.coalesce(good, f.lit(False))})
    columns, text = source.value_schema or "", f.col("value").cast("string")
    if source.value_format in SCHEMA_TYPES:
        from headrace_pipelines.driver.value_codecs import columns_of, decoded  # here, because most pipelines need none

        columns = columns or columns_of(source.value_format, source.topic, plan.secrets)
        records, text = decoded(records.drop("problem"), plan.secrets), f.col("text")
    schema = StructType.fromDDL(columns)
    if not isinstance(schema, StructType):
        raise PipelineInvalid(f"schema {source.value_schema} has no columns: write `name TYPE, name TYPE`")
    marked, is_flat = _with_end(text)
    if source.change:
        from headrace_pipelines.driver.debezium import changed_row, envelope  # here, because most pipelines need none

        columns_of_row, schema = StructType([*schema.fields]), envelope(schema)
    row = f.from_json(marked, schema.add(_END, BooleanType()).add(CORRUPT, StringType()), _PARSER)
    parsed = records.withColumn("row", row)
    # An empty value gives no row and no corrupt text either.
    good = f.col(f"row.{CORRUPT}").isNull() & (f.col(f"row.{_END}").isNotNull() | is_flat)
    good &= no_text(text).isNull() & ~is_misread(f.col("row"), schema, text)
    parsed = parsed.withColumn("good", f.coalesce(good, f.lit(False))).drop("text")
    if source.change:
        row, problem = changed_row(f.col("row"), columns_of_row)
        why = f.coalesce("problem", f.when(f.col("good"), problem))
        good = f.col("good") & f.col("problem").isNull()
        parsed = parsed.withColumns({"row": row, "problem": why}).withColumn("good", good)
    return parsed


def _with_end(text: Column) -> tuple[Column, Column]:
    """Return a JSON object with one more field at its end, and whether it is flat and needs none.

    Spark reads an object and ignores text after it. So the field is found only if the object is the whole text.
    The first brace that closes a flat object is its last character.
    """
    whole = f.when(text.endswith("}"), text).otherwise(f.rtrim(text, f.lit(" \t\r\n"))).cast("binary")
    head = f.substr(whole, f.lit(1), f.octet_length(whole) - 1)  # of bytes, because their number is known
    is_object, is_nested = f.endswith(whole, f.lit(b"}")), f.contains(head, f.lit(b"}"))
    marked = f.when(is_object & is_nested, f.concat(head, f.lit(f',"{_END}":true}}'.encode()))).otherwise(whole)
    return marked.cast("string"), is_object & ~is_nested


def rows_with_records(
    spark: SparkSession, plan: DriverPlan, name: str, columns: Mapping[str, str] = RECORD_COLUMNS
) -> DataFrame:
    """Return the rows of a topic, with columns of their records: by default those of `RECORD_COLUMNS`."""
    source = plan.spec.sources[name]
    assert isinstance(source, KafkaSource)
    return rows(with_rows(spark.table(f"`{name} {RAW}`"), source, plan), source, name, columns)


def rows(parsed: DataFrame, source: KafkaSource, name: str, further: Mapping[str, str] = {}) -> DataFrame:
    """Return the rows of records, with `further` columns of the records, and count the records that are not rows."""
    tombstone = f.col("value").isNull()
    corrupt = ~f.col("good") & ~tombstone
    counted = parsed.observe(name, f.count_if(tombstone).alias("tombstones"), f.count_if(corrupt).alias("corrupt"))
    good: Column = f.col("good")
    if source.corrupt == "fail":
        record = f.concat_ws(":", "topic", "partition", "offset")
        why = _mismatch(parsed, source, name, excerpts=False)
        refused = f.concat(f.lit(f"{name}: record "), record, f.lit(": "), f.coalesce("problem", why))
        good = f.when(corrupt, f.raise_error(refused).cast("boolean")).otherwise(good)
    fields = [field for field in counted.schema["row"].dataType.fieldNames() if field not in (_END, CORRUPT)]  # type: ignore[attr-defined]
    chosen = [f.col(f"row.`{field}`") for field in fields]
    if source.key_column:
        chosen.append(f.col("key").cast("string").alias(source.key_column))
    if source.timestamp_column:
        chosen.append(f.col("timestamp").alias(source.timestamp_column))
    chosen += [f.col(column).alias(alias) for column, alias in further.items()]
    return counted.where(good).select(*chosen)


def _mismatch(parsed: DataFrame, source: KafkaSource, name: str, *, excerpts: bool) -> Column:
    """Return why the value of a corrupt record is not a row: the first field that is not of its type.

    With `excerpts` it includes the beginning of the field's value. SQL, because executors may have no Python for it.
    """
    head = f.lit(f"the value does not match the schema of {name}")
    if source.value_format == "string":
        return f.lit("the value is not UTF-8 text")
    if source.value_format != "json":
        return head
    text, fields = f.col("value").cast("string"), parsed.schema["row"].dataType.fields  # type: ignore[attr-defined]
    if source.change:
        return f.coalesce(no_text(text), head)
    found: list[Column] = []
    for field in (field for field in fields if field.name not in (_END, CORRUPT)):
        alone = f.from_json(text, StructType([field]).add(CORRUPT, StringType()), _PARSER)
        kind = field.dataType.simpleString()
        subject, expected = f.lit(f": {field.name}"), f.lit(f" is not {kind if '<' in kind else kind.upper()}")
        if excerpts:
            value = f.from_json(text, StructType([StructField(field.name, VariantType())])).getField(field.name)
            shown = f.coalesce(f.substring(f.to_json(value), 1, _EXCERPT_LENGTH), f.lit("its value"))
            subject = f.concat(subject, f.lit(": "), shown)
        what = f.concat(subject, expected)
        wrong = alone.getField(CORRUPT).isNotNull() | is_misread(alone, StructType([field]), text)
        found.append(f.when(wrong, what))
    behind = f.lit(": text follows the JSON object")
    no_object = f.when(f.json_object_keys(text).isNull(), f.lit("the value is not a JSON object"))
    return f.coalesce(no_text(text), no_object, f.concat(head, f.coalesce(*found, behind)))


def corrupt_records(parsed: DataFrame, plan: DriverPlan, name: str) -> DataFrame:
    """Return the corrupt records as records of a dead letter topic: columns `key`, `value` and `headers`."""
    corrupt, source = parsed.where(~f.col("good") & f.col("value").isNotNull()), plan.spec.sources[name]
    assert isinstance(source, KafkaSource)
    reason = f.coalesce("problem", _mismatch(parsed, source, name, excerpts=True))
    history = history_headers(plan.spec.group(name + CORRUPT_FLOW), "CorruptRecord", reason, origin=True)
    own = f.coalesce(f.col("headers"), f.array().cast(HEADERS))
    return corrupt.select("key", "value", f.concat(own, history).alias("headers"))


def _table(spark: SparkSession, plan: DriverPlan, source: TableSource) -> DataFrame:
    reader = spark.read.format(source.format).options(**texts(source.options))
    if source.value_schema:
        reader = reader.schema(source.value_schema)
    if source.format == "jdbc":
        return reader.option("dbtable", source.table).load()
    return reader.load(plan.path(source.table))
