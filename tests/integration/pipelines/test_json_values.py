"""Hostile JSON values in the columns of a source: each is itself or a corrupt record, on a real Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import functions as f

from headrace_pipelines.driver.session import spark_session
from headrace_pipelines.driver.source_tables import corrupt_records, with_rows
from headrace_pipelines.sources import KafkaSource
from headrace_pipelines.spec import PipelineSpec
from tests.pipeline_harness import document, plan_of
from yaml_table import table

pytestmark = pytest.mark.heavy

VALUES = table(__file__, "values")
OBJECTS = {text.encode("latin-1"): shown for text, shown in table(__file__, "objects").items()}
COLUMNS = {f"c{number}": kind for number, kind in enumerate(VALUES)}
SCHEMA = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())


def test_a_value_is_itself_or_its_record_is_corrupt(tmp_path: Path) -> None:
    """What Spark would take for another value is corrupt too, with a reason; no record stops those beside it."""
    source = {"topic": "t", "schema": f"x INT, s STRING, {SCHEMA}", "corrupt": "quarantine"}
    spec = PipelineSpec.model_validate(document(sources={"a": source}))
    plan, expected = plan_of(spec, folder=tmp_path, jars=()), dict(OBJECTS)
    for name, kind in COLUMNS.items():
        expected |= {f'{{"{name}": {value}}}'.encode(): shown for value, shown in VALUES[kind].items()}
    with spark_session(plan, lambda owner: None) as spark:
        kafka = spark.createDataFrame([(value,) for value in expected], "value BINARY")
        headers = f.array().cast("array<struct<key:string,value:binary>>")
        kafka = kafka.withColumns({"key": f.lit(None).cast("binary"), "headers": headers, "topic": f.lit("t")})
        kafka = kafka.withColumns({"partition": f.lit(0), "offset": f.lit(0), "timestamp": f.current_timestamp()})
        read = spec.sources["a"]
        assert isinstance(read, KafkaSource)
        parsed = with_rows(kafka, read, plan).coalesce(1).cache()
        text = f.concat_ws("|", *(f.col(f"row.{name}").cast("string") for name in ("x", "s", *COLUMNS)))
        found = parsed.where("good").select("value", text.alias("text")).collect()
        dead = {bytes(row.value): dict(row.headers) for row in corrupt_records(parsed, plan, "a").collect()}
    rows = {bytes(row.value): row.text for row in found}
    assert rows == {value: shown for value, shown in expected.items() if shown is not None}
    assert rows.keys() | dead.keys() == expected.keys()
    reasons = {value: bytes(headers["headrace.dlq.reason"]).decode() for value, headers in dead.items()}
    for value, reason in table(__file__, "reasons").items():
        assert reasons[value.encode("latin-1")] == reason
