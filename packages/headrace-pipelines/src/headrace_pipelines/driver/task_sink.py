"""A micro-batch in several transactions: each task of Spark writes its records in one, in a Python worker.

The key of a record decides on its task, so a repeated micro-batch has the same tasks with the same records. Kafka
stores a number for each task, with a digest of the keys: a task whose keys differ is rejected.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from headrace.config.kafka import KafkaConfig
from headrace.errors import PipelineInvalid
from headrace_pipelines.driver.batch_decision import decide
from headrace_pipelines.secrets_file import KAFKA, secret
from headrace_pipelines.sinks.batch_transactions import BatchTransactions


class TaskWriter(NamedTuple):
    """Writes one micro-batch. It travels pickled to the Python workers, which import this module."""

    query: str
    """Name of the producer and group of the whole query; those of a task have its number in addition."""
    number: int
    """Number of the micro-batch."""
    timeout_seconds: float
    secrets: Path
    """The file with the access to Kafka."""
    accepts: bool
    """Whether a task is written even if Kafka has it with other keys."""

    def all_of(self, batch: DataFrame, tasks: int) -> pa.Table:
        """Write a micro-batch with this number of tasks. Returns no records, because none are left to write."""
        parts = batch.repartition(tasks, f.coalesce("key", "value"))
        return parts.mapInArrow(self.one_task, batch.schema).toArrow()

    def one_task(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the records of a task, unless Kafka has them; the function of `mapInArrow`.

        Raises:
            PipelineInvalid: Kafka has the task with other keys.
        """
        records = [*batches]
        context = TaskContext.get()
        assert context
        kafka = KafkaConfig.model_validate_json(secret(self.secrets, KAFKA))
        target = BatchTransactions(kafka, f"{self.query}.{context.partitionId()}", self.timeout_seconds)
        write_task(target, self.number, records, accepts=self.accepts, setting="sink.accept_unknown_batch: true")
        return iter(())


def write_task(
    target: BatchTransactions,
    number: int,
    records: Sequence[pa.RecordBatch],
    *,
    accepts: bool,
    setting: str,
    remedy: str = "give the sink a key",
    complete: bool = False,
) -> None:
    """Write the records of a task in one transaction, unless Kafka has them.

    Args:
        target: The producer and the group of this task.
        number: Number of the micro-batch.
        records: Its records: columns `topic`, `key`, `value` and `headers`, and perhaps `partition`.
        accepts: Whether the task is written even if Kafka has it with other keys.
        setting: What turns on `accepts`.
        remedy: What gives a task the same keys again.
        complete: Whether every task of the micro-batch was written before.

    Raises:
        PipelineInvalid: Kafka has the task with other keys.
    """
    keys = (key for each in records for key in pc.coalesce(each["key"], each["value"], b"").to_pylist())
    digest = f"{sum(map(len, records))} {sum(map(crc32, keys))}"
    known = target.open()  # it may be far behind: a task has no records in some batches
    changed = target.digest not in ("", digest)
    decision = decide(number, known, changed=changed, may_lag=not (complete and records), accepts=accepts)
    if decision in ("ahead", "unknown"):
        target.close()
        raise PipelineInvalid(
            f"batch {number} had other keys before, so rows would be repeated or missing: {remedy} "
            f"that is the same whenever a row is computed. To write it, perhaps a second time, set {setting} for the "
            "next start"
        )
    if records and decision == "write":
        target.write(number, pa.Table.from_batches(records), digest)
    target.close()
