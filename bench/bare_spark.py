"""The same jobs in bare PySpark, each in a process of its own.

usage: python -m bench.bare_spark sql|tasks|handler BOOTSTRAP SOURCE TARGET RECORDS
`tasks` is `sql` with the sink `headrace-kafka`. It reads all present records, so many in a micro-batch, and ends. It
prints JSON: seconds and records of all micro-batches.
An AssertionError in `getOrCreateInitialPartitionOffsets` means that its JVM was ended from outside, as by a time limit:
the connector asserts that the context, which is stopped then, is in use.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from bench.work import add_tax
from headrace.functions.sdk import Event, EventSource, TriggerInfo
from headrace_jvm import ensure_artifacts, find_java
from pyspark_headrace import keyed

SCHEMA = "id INT, name STRING, amount DOUBLE, tags ARRAY<STRING>, active BOOLEAN"
RECORD = "key binary, value binary"
TRIGGER = TriggerInfo("kafka", "bench")


def session() -> SparkSession:
    os.environ["JAVA_HOME"] = str(find_java(17, for_spark=True).home)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    jars = os.pathsep.join(map(str, sorted(ensure_artifacts("spark").glob("*.jar"))))
    builder = SparkSession.builder.master("local[*]").config("spark.ui.enabled", "false")
    return (
        builder.config("spark.driver.extraClassPath", jars)
        .config("spark.driver.memory", "1g")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )


def sql(records: DataFrame) -> DataFrame:
    parsed = records.select(f.from_json(f.col("value").cast("string"), SCHEMA).alias("row")).select("row.*")
    parsed.createOrReplaceTempView("orders")
    rows = records.sparkSession.sql("SELECT id, name, amount * 1.2 AS gross FROM orders WHERE active")
    return rows.select(f.to_json(f.struct("*")).alias("value"))


def call(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        columns = [column.to_pylist() for column in batch.columns]
        values = [add_tax(None, event) for event in map(event_of, *columns)]
        yield pa.RecordBatch.from_arrays([batch.column(0), pa.array(values, pa.binary())], ["key", "value"])


def event_of(
    key: bytes, value: bytes, topic: str, partition: int, offset: int, at: datetime, headers: list[dict[str, Any]]
) -> Event:
    pairs = [(header["key"], header["value"]) for header in headers or ()]
    return Event(value, key, pairs, offset, int(at.timestamp() * 1000), EventSource(topic, partition, 0, TRIGGER))


def handler(records: DataFrame) -> DataFrame:
    columns = "key", "value", "topic", "partition", "offset", "timestamp", "headers"
    return records.select(*columns).mapInArrow(call, RECORD)


def main(what: str, servers: str, source: str, target: str, most: str) -> None:
    spark = session()
    kafka = {"kafka.bootstrap.servers": servers}
    reader = spark.readStream.format("kafka").options(**kafka, subscribe=source, maxOffsetsPerTrigger=most)
    headers = "true" if what == "handler" else "false"  # the event of a handler has them
    records = reader.option("startingOffsets", "earliest").option("includeHeaders", headers).load()
    rows = (handler if what == "handler" else sql)(records)
    sink = "headrace-kafka" if what == "tasks" else "kafka"
    if what == "tasks":
        rows = keyed(rows, 2)
    writer = rows.writeStream.format(sink).options(**kafka, topic=target, name=target)
    writer = writer.option("checkpointLocation", tempfile.mkdtemp())
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
    milliseconds = sum(progress["durationMs"]["triggerExecution"] for progress in batches)
    found = {"records": sum(progress["numInputRows"] for progress in batches), "seconds": milliseconds / 1000}
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
