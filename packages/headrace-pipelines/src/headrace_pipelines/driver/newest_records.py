"""The newest records of a micro-batch: of those with one key in a topic, only the last in sequence is written."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from headrace.errors import HeadraceError
from headrace_pipelines.sinks.changes import SEQUENCE, newest


def sequence_header(sequence: Column) -> Column:
    """Return the header by which a record carries its sequence from a query to its micro-batch."""
    return f.struct(f.lit(SEQUENCE).alias("key"), sequence.cast("binary").alias("value"))


def newest_records(batch: DataFrame) -> DataFrame:
    """Return the newest record of each key, and all records without a sequence, such as dead letters."""
    sequence = f.get(f.filter("headers", lambda header: header["key"] == SEQUENCE), f.lit(0))["value"]
    kept = newest(batch.withColumn(SEQUENCE, sequence), ["topic", "key"])
    others = f.filter("headers", lambda header: header["key"] != SEQUENCE)
    return kept.withColumn("headers", others).drop(SEQUENCE)


class NewestWriter:
    """Writes the newest records of each micro-batch with Spark's connector: at least once."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Take the options of the connector."""
        self._options = options
        self.failure: HeadraceError | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Write a micro-batch."""
        newest_records(batch).write.format("kafka").options(**self._options).save()

    def poll(self, completed: int) -> None:
        """Do nothing: nothing is due between batches."""
