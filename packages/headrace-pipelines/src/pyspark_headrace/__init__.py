"""`format("headrace-kafka")` for any PySpark job: Spark finds it by this module's name."""

from pyspark_headrace.data_source import DefaultSource, keyed

__all__ = ["DefaultSource", "keyed"]
