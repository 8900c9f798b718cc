"""The format `headrace-kafka` as Spark knows it: what it can write, and what it refuses.

Spark imports this file whenever a session looks for formats, so it imports Kafka's client and Arrow only to write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark_headrace.stream_writer import StreamWriter


KEYED = "_keyed"
"""Column of rows whose tasks are the same in a repeated micro-batch."""


class DefaultSource(DataSource):
    """Writes the micro-batches of a streaming query to Kafka, each task in one transaction."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "headrace-kafka"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 Spark's signature
        """Return the writer of one micro-batch; Spark asks for it in a process of the driver's machine.

        Raises:
            HeadraceError: An option or a column is not usable, or Kafka cannot be reached.
        """
        from pyspark_headrace.stream_writer import writer_of

        return writer_of(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        """Refuse: only the micro-batches of a stream have numbers."""
        self._refuse("writes streams only, because a batch write has no number: use writeStream, or format kafka")

    def schema(self) -> NoReturn:
        """Refuse to read."""
        self._refuse("writes only: read by format kafka, with kafka.isolation.level read_committed")

    def _refuse(self, reason: str) -> NoReturn:
        from headrace.errors import PipelineInvalid

        raise PipelineInvalid(f"{self.name()} {reason}")


def keyed(rows: DataFrame, tasks: int) -> DataFrame:
    """Return the rows in this number of tasks, by key, or by value without one: a repeat has them in the same tasks.

    The column `_keyed` shows that to the format, which does not write it.
    """
    by = [f.col(name).cast("binary") for name in ("key", "value") if name in rows.columns]
    return rows.repartition(tasks, f.coalesce(*by)).withColumn(KEYED, f.lit(True))
