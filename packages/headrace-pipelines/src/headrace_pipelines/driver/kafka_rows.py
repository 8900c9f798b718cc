"""Rows as Kafka records: key, value, headers and topic, and the history of dead letters."""

import functools
from collections.abc import Iterable, Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from headrace.config.format_list import SCHEMA_TYPES, STRINGS
from headrace.errors import PipelineInvalid
from headrace.formats.schema_codec import encodes_python
from headrace_pipelines.driver.newest_records import sequence_header
from headrace_pipelines.sinks.changes import is_delete, sequence_of
from headrace_pipelines.sinks.topic_sink import KafkaSink
from headrace_pipelines.spec import FlowSpec

HEADERS = "array<struct<key:string,value:binary>>"
"""Type of the column `headers`, as the connector has it."""
_HISTORY = "headrace.dlq."
_TIMES = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"}


def history_headers(group: str, error: str, reason: Column, *, origin: bool = False) -> Column:
    """Return the headers of a dead letter that say why it is one; with `origin` they name the row's Kafka record."""
    now = f.date_format(f.current_timestamp(), "yyyy-MM-dd'T'HH:mm:ss.SSSXXX")
    parts = {"group": f.lit(group), "attempts": f.lit("1"), "error": f.lit(error), "reason": reason}
    parts |= {"first_failure": now, "last_failure": now}
    if origin:
        parts |= {name: f.col(name).cast("string") for name in ("topic", "partition", "offset")}
        parts["timestamp"] = f.unix_millis("timestamp").cast("string")
    texts = [
        f.struct(f.lit(_HISTORY + name).alias("key"), text.cast("binary").alias("value"))
        for name, text in parts.items()
    ]
    return f.array(*texts).cast(HEADERS)


def as_records(rows: DataFrame, flow: FlowSpec, group: str) -> DataFrame:
    """Return rows as Kafka records: columns `topic`, `key`, `value` and `headers`. Null columns are written as null.

    Rows that a rule puts in quarantine go to the dead letter topic instead, as JSON. With a format of the schema
    registry, a further column `row` has the other rows, for `encoded`.
    """
    sink = flow.sink
    assert isinstance(sink, KafkaSink)
    if flow.handler:
        return rows
    names = sink.written([name for name in rows.columns if name not in (BROKEN, DEAD_LETTER)])
    columns = [f.col(f"`{name}`") for name in names]
    if sink.value_format == "record":
        here = set(rows.columns)
        key, value = (f.col(name).cast("binary") if name in here else f.lit(None) for name in ("key", "value"))
        headers = f.col("headers").cast(HEADERS) if "headers" in here else f.lit(None).cast(HEADERS)
    else:
        key = (f.expr(sink.key) if sink.key else f.lit(None)).cast("string").cast("binary")
        value, headers = to_json(names), f.lit(None).cast(HEADERS)
    if sink.value_format in STRINGS:
        value = _only_column(rows.select(*columns), columns, sink.value_format)
    records = {"topic": f.lit(sink.topic), "key": key, "value": value.cast("binary"), "headers": headers}
    if sink.value_format in SCHEMA_TYPES:
        # The text leaves nulls out, because an optional property may not be null in JSON Schema.
        row = f.struct(*columns) if encodes_python(sink.value_format) else f.to_json(f.struct(*columns), _TIMES)
        records["row"] = f.when(f.col(BROKEN).isNull(), row) if flow.quarantines else row
    if sink.change_settings:
        records |= _changes(rows, sink, records)
    if DEAD_LETTER in rows.columns:
        dead_letter = f.col(DEAD_LETTER)
        others = {"topic": f.lit(flow.dead_letters)} | {name: dead_letter[name] for name in ("key", "value", "headers")}
        records |= {name: f.when(dead_letter.isNotNull(), of).otherwise(records[name]) for name, of in others.items()}
        if "row" in records:
            records["row"] = f.when(dead_letter.isNull(), records["row"])
    if flow.quarantines:
        broken = f.col(BROKEN).isNotNull()
        reason = f.concat(f.lit("the row breaks rule "), BROKEN)
        records["topic"] = f.when(broken, f.lit(flow.dead_letters)).otherwise(records["topic"])
        records["headers"] = f.when(broken, history_headers(group, "RuleBroken", reason)).otherwise(records["headers"])
    return rows.select(*(column.alias(name) for name, column in records.items()))


def _changes(rows: DataFrame, sink: KafkaSink, records: Mapping[str, Column]) -> dict[str, Column]:
    """Return the parts of records that changes need: no value for a delete, and a header with the sequence."""
    others = functools.reduce(
        lambda left, right: left | right,
        (f.col(name).isNotNull() for name in (BROKEN, DEAD_LETTER) if name in rows.columns),
        f.lit(False),
    )
    deletes = ~others & is_delete(sink)
    sequence = sequence_of(rows, sink, [records["key"]])
    found = {name: f.when(~deletes, records[name]) for name in ("value", "row") if name in records}
    if sink.sequence_by:
        found["headers"] = f.when(~others, f.array(sequence_header(sequence)).cast(HEADERS))
    else:  # without a sequence to read, its check reads the key
        found["key"] = f.when(others | sequence.isNotNull(), records["key"])
    return found


def _only_column(rows: DataFrame, columns: list[Column], value_format: str) -> Column:
    kinds = [field.dataType.simpleString() for field in rows.schema]
    if kinds == [value_format]:
        return columns[0]
    text = f"sink.value_format {value_format} takes one column of type {value_format}, and the flow has"
    raise PipelineInvalid(f"{text} {', '.join(kinds)}: select one column and cast it, or use json")


def to_json(names: Iterable[str]) -> Column:
    """Return columns as the text of one JSON object."""
    return f.to_json(f.struct(*(f"`{name}`" for name in names)), {"ignoreNullFields": "false"})


BROKEN = "_broken_rule"
"""Column with the name of the rule that puts a row in quarantine; null for other rows."""

DEAD_LETTER = "_dead_letter"
"""Column with the dead letter that a row of a processor stands for; null for other rows."""


def with_rules(rows: DataFrame, flow: FlowSpec) -> DataFrame:
    """Return the rows that a flow's rules let pass, and count those that break a rule.

    Rows for the dead letter topic have the name of their rule in `BROKEN`.
    """
    if not flow.rules:
        return rows
    breaks = {rule: ~f.coalesce(f.expr(each.check).cast("boolean"), f.lit(False)) for rule, each in flow.rules.items()}
    counted = rows.observe(RULES, *(f.count_if(broken).alias(rule) for rule, broken in breaks.items()))
    kinds = {
        kind: [rule for rule, each in flow.rules.items() if each.otherwise == kind]
        for kind in ("fail", "drop", "quarantine")
    }
    for rule in kinds["fail"]:
        stop = f.raise_error(f.lit(f"a row breaks rule {rule}")).cast("boolean")
        counted = counted.where(f.when(breaks[rule], stop).otherwise(f.lit(True)))
    for rule in kinds["drop"]:
        counted = counted.where(~breaks[rule])
    if flow.quarantines:
        quarantined = f.coalesce(*(f.when(breaks[rule], f.lit(rule)) for rule in kinds["quarantine"]))
        counted = counted.withColumn(BROKEN, quarantined)
    return counted


RULES, FAILED, FAILED_CALLS = "rules of the flow", "records that failed", "calls that failed"
"""Names of the observed counts; no source has one, because a source's name has no blanks."""
