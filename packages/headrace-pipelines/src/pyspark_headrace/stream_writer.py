"""Writes one micro-batch of `headrace-kafka`: each task in one transaction, then the number of the whole.

The writer is made on the driver's machine, where it reads the number of the next micro-batch. It travels to the tasks,
each of which compares that with its own number. Spark makes another one for `commit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, StringType, StructField, StructType

from headrace.errors import ConfigError, PipelineInvalid, TopicNotFound
from headrace_pipelines.driver.batch_decision import decide
from headrace_pipelines.driver.task_sink import write_task
from headrace_pipelines.sinks.batch_transactions import BatchTransactions
from pyspark_headrace.data_source import KEYED
from pyspark_headrace.sink_options import ACCEPT, FORMAT, SinkOptions, options_of

_HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_TEXT: Final[tuple[type[DataType], ...]] = (StringType, BinaryType)
_COLUMNS: Final[Mapping[str, tuple[type[DataType], ...]]] = {
    "topic": (StringType,),
    "key": _TEXT,
    "value": _TEXT,
    "headers": (ArrayType,),
    "partition": (IntegerType,),
}
"""The columns of a record and their types, as Spark's own Kafka sink has them. It ignores others too."""
_ARROW: Final = pa.schema(
    {
        "topic": pa.string(),
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
        "partition": pa.int32(),
    }
)
_IS_CONTINUOUS: Final = "__is_continuous_processing"
_NUMBER: Final = "streaming.sql.batchId"
_QUERY: Final = "sql.streaming.queryId"


class TaskWritten(WriterCommitMessage):
    """A task has been written."""

    def __init__(self, query: str) -> None:
        self.query = query
        """Id of the query."""


@dataclass(frozen=True)
class StreamWriter(DataSourceStreamArrowWriter):
    """Writes one micro-batch."""

    options: SinkOptions
    next_number: int | None
    """Number of the next micro-batch, as Kafka has it; None if it has none."""
    query: str
    """Id of the query that this number belongs to."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWritten:
        """Write the rows of a task, unless Kafka has them.

        Raises:
            HeadraceError: Kafka refuses, or rows would be repeated or missing.
        """
        number, query, task = _task()
        name = f"{self.options.name}.{query}.{task}"
        complete = self._check(number, query)
        records = [as_records(batch, self.options.topic) for batch in iterator if len(batch)]
        target = BatchTransactions(self.options.kafka, name, self.options.timeout_seconds, self.options.producer)
        setting, remedy = f"option {ACCEPT} to true", "use keyed of pyspark_headrace, and a key"
        accepts = self.options.accepts
        write_task(target, number, records, accepts=accepts, setting=setting, remedy=remedy, complete=complete)
        return TaskWritten(query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        """Store that the micro-batch is written: Kafka has the number of each of its tasks."""
        queries = {message.query for message in messages if isinstance(message, TaskWritten)}
        for query in queries:
            _target(self.options).record(batchId, query)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        """Leave what is written: Spark repeats the micro-batch, and its tasks know their numbers."""

    def _check(self, number: int, query: str) -> bool:
        """Return whether the whole micro-batch was written before.

        Raises:
            PipelineInvalid: Its number does not follow the one in Kafka, so rows would be repeated or missing.
        """
        known = self.next_number if self.query == query else None
        decision = decide(number, known, changed=False, may_lag=number == 0, accepts=self.options.accepts)
        if decision == "ahead":
            raise PipelineInvalid(
                f"the checkpoint continues with batch {number}, but Kafka has batch {(known or 0) - 1} of "
                f"{self.options.name}: the checkpoint is an old copy. Restore the newest one, or begin a new one"
            )
        if decision == "unknown":
            last = "has none of this query" if known is None else f"its last is {known - 1}"
            raise PipelineInvalid(
                f"Kafka does not know whether it has batch {number} of {self.options.name}: {last}. Its record of "
                "batches has expired, another query has this name, or the checkpoint is of another sink. To write the "
                f"batch, perhaps a second time, set option {ACCEPT} to true for the next start"
            )
        return decision == "skip"


def writer_of(written: Mapping[str, str], schema: StructType) -> StreamWriter:
    """Return the writer of a micro-batch; it creates the topic of numbers if that is missing.

    Raises:
        HeadraceError: An option or a column is not usable, or Kafka cannot be reached.
    """
    options = options_of(written)
    if problems := [*_column_problems(schema, options)]:
        raise ConfigError(f"rows for {FORMAT}: " + "; ".join(problems))
    target = _target(options)
    try:
        number = target.look_up()
    except TopicNotFound:
        target.create_topic()
        number = None
    return StreamWriter(options, number, target.digest)


def as_records(rows: pa.RecordBatch, topic: str) -> pa.RecordBatch:
    """Return rows as records: their columns in order, with nulls for those that are missing."""
    found: dict[str, Any] = {}
    for field in _ARROW:
        if field.name == "topic" and topic:
            found[field.name] = pa.array([topic] * len(rows), field.type)
        elif field.name in rows.schema.names:
            found[field.name] = rows[field.name].cast(field.type)
        else:
            found[field.name] = pa.nulls(len(rows), field.type)
    if found["topic"].null_count:
        raise PipelineInvalid("a row has no topic: set the option topic, or fill the column topic of every row")
    return pa.RecordBatch.from_arrays([*found.values()], schema=_ARROW)


def _column_problems(schema: StructType, options: SinkOptions) -> Iterator[str]:
    columns = {field.name: field.dataType for field in schema}
    if "value" not in columns:
        yield "the column value is missing: select it, such as to_json(struct(*)) AS value"
    if KEYED not in columns:
        yield (
            "they may be in other tasks when Spark repeats a micro-batch, so some would be written twice and others "
            "never: write keyed(rows, 8) of pyspark_headrace, as the last step"
        )
    if "topic" not in columns and not options.topic:
        yield "the column topic is missing: select it, or set the option topic"
    for name, types in _COLUMNS.items():
        if (kind := columns.get(name)) is None:
            continue
        right = isinstance(kind, types) and (name != "headers" or kind.simpleString() == _HEADERS.simpleString())
        if not right:
            expected = _HEADERS.simpleString() if name == "headers" else " or ".join(t().simpleString() for t in types)
            yield f"the column {name} is {kind.simpleString()}: cast it to {expected}"


def _task() -> tuple[int, str, int]:
    """Return the number of the micro-batch, the id of its query, and the number of the task."""
    context = TaskContext.get()
    assert context
    number, query = context.getLocalProperty(_NUMBER), context.getLocalProperty(_QUERY)
    if not (number and query) or context.getLocalProperty(_IS_CONTINUOUS) == "true":
        raise PipelineInvalid(
            f"{FORMAT} needs micro-batches, whose numbers it stores: use trigger(processingTime=...) or "
            "trigger(availableNow=True), neither continuous nor real-time mode"
        )
    return int(number), query, context.partitionId()


def _target(options: SinkOptions) -> BatchTransactions:
    return BatchTransactions(options.kafka, options.name, options.timeout_seconds)
