"""Function handlers in Spark: a flow calls its handler by `mapInArrow`, with the code of a function's worker.

Spark's Python workers import this module. Each worker runs the handler of one flow in all micro-batches, so it loads
the module and calls `init_context` once.
"""

import functools
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from headrace.config.format_list import SCHEMA_TYPES
from headrace.config.topic_names import kind_by_name
from headrace.delivery.outcomes import Reply
from headrace.errors import PipelineInvalid, SchemaNotFound
from headrace.formats.plain import schema_id_of
from headrace.functions import protocol
from headrace.functions.sdk import print_line
from headrace.functions.worker.handler import Unusable, context_of
from headrace.functions.worker.loop import prepare
from headrace.records import Header, RecordBatch, TopicPartition, is_reserved
from headrace_pipelines.driver.source_tables import RAW
from headrace_pipelines.driver.value_codecs import HEADERS, RECORD, FailurePolicy, Row, batch_of, counted, registry_of
from headrace_pipelines.driver_protocol import DriverPlan
from headrace_pipelines.handler_setup import setup_of
from headrace_pipelines.sources import KafkaSource
from headrace_pipelines.spec import FlowSpec

_REFUSED = "the handler emits to an internal topic, which only Headrace or Kafka may write to"


class HandlerPlan(NamedTuple):
    """What a Python worker needs to run the handler of a flow. It travels pickled, and no plan of Spark shows it."""

    setup: str
    """JSON of `protocol.Setup`, with one trigger; its output topic is the sink's."""
    failures: FailurePolicy
    attempts: int
    reads_topic: bool
    """Whether the events are records of a topic, to which dead letters can be redriven; otherwise rows."""
    secrets: Path
    """The file with the access to the schema registry."""


def records_of_handler(spark: SparkSession, plan: DriverPlan, flow: FlowSpec) -> DataFrame:
    """Return the records that a flow with a handler writes: columns topic, key, value and headers.

    Raises:
        PipelineInvalid: The handler or its function.yaml is wrong.
    """
    [name] = [name for name, each in plan.spec.flows.items() if each is flow]
    [read] = flow.reads
    reads_topic = isinstance(plan.spec.sources.get(read), KafkaSource) and plan.task.kind != "test"
    events = spark.table(f"`{read} {RAW}`") if reads_topic else as_events(spark.table(read), read)
    failures = FailurePolicy(plan.spec.group(name), flow.dead_letters or "", flow.on_error)
    setup = msgspec.json.encode(setup_of(plan.spec, name)).decode()
    how = HandlerPlan(setup, failures, flow.attempts, reads_topic, plan.secrets)
    # Spark reuses a Python worker for the same environment, and two handlers may have modules of one name.
    environment = {} if plan.spec.driver.remote else spark.sparkContext.environment
    environment["HEADRACE_FLOW"] = failures.group
    made = counted(events.mapInArrow(functools.partial(run, how), RECORD))
    del environment["HEADRACE_FLOW"]
    shown = ("key", "value") if plan.task.kind in ("show", "test") else ()
    return made.withColumns({column: f.col(column).cast("string") for column in shown}) if shown else made


def as_events(rows: DataFrame, name: str) -> DataFrame:
    """Return rows as records for a handler: each value is a JSON object of all columns."""
    value = f.to_json(f.struct("*"), {"ignoreNullFields": "false"}).cast("binary")
    key, headers = f.lit(None).cast("binary"), f.lit(None).cast("array<struct<key: string, value: binary>>")
    origin = {"topic": f.lit(name), "partition": f.spark_partition_id(), "offset": f.lit(0).cast("bigint")}
    columns = {**origin, "timestamp": f.current_timestamp(), "key": key, "value": value, "headers": headers}
    return rows.select(*(column.alias(name) for name, column in columns.items()))


def run(plan: HandlerPlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Call the handler for the records of a task; the function of `mapInArrow`."""
    handler = _handler_of(plan)
    return (handler.outputs(batch) for batch in batches if len(batch))


class SparkHandler:
    """A handler in a Python worker of Spark."""

    def __init__(self, plan: HandlerPlan) -> None:
        """Load the handler and call `init_context`.

        Raises:
            PipelineInvalid: One of them failed.
        """
        setup = msgspec.json.decode(plan.setup, type=protocol.Setup)
        os.environ.update(setup.env)
        context = context_of(setup, print_line)
        context.platform._acknowledge = _acknowledge
        try:
            self._runs, self._serving = prepare(setup, context, mmap.mmap(-1, mmap.PAGESIZE))
        except Unusable as cause:
            lines = str(cause).splitlines()
            raise PipelineInvalid(" ".join(dict.fromkeys((lines[0], lines[-1])))) from None
        [trigger] = setup.triggers
        self._plan = plan
        self._topic = trigger.output_topic
        self._count = count()
        self._framed = trigger.key_format in SCHEMA_TYPES, trigger.value_format in SCHEMA_TYPES
        self._known: set[int | None] = {None}

    def outputs(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Call the handler for records of one partition, and return the rows to write, in their order."""
        began, records = time.time(), self._records_of(batch)
        results = self._attempt(records, self._plan.attempts)
        if {*map(type, results)} == {bytes}:
            size = len(batch)
            columns = pa.repeat(self._topic, size), batch.column("key"), pa.array(results, pa.binary())
            arrays = [*columns, pa.nulls(size, HEADERS), pa.repeat(False, size)]
            return pa.RecordBatch.from_arrays(arrays, ["topic", "key", "value", "headers", "failed"])
        numbered = enumerate(results)
        return batch_of([row for index, result in numbered for row in self._rows(records, index, result, began)])

    def _attempt(self, records: RecordBatch, attempts: int) -> list[protocol.AnyResult]:
        """Return the result of each record after at most this many attempts."""
        for framed, column in zip(self._framed, (records.keys, records.values), strict=True):
            if framed:
                self._learn(column)
        times, keys, values = records.timestamps_ms, records.keys, records.values
        work = protocol.Work(*records.topic_partition, 0, records.offsets, times, keys, values, records.headers)
        results = self._runs.run(self._serving.results(work))
        errors = {at: each for at, each in enumerate(results) if isinstance(each, protocol.Result) and each.error}
        failed = [index for index, error in errors.items() if not error.undecodable]
        if any(errors[index].shared for index in failed):
            for index in failed:  # alone, because the failure of the batch names no record
                [results[index]] = self._attempt(records[index : index + 1], attempts)
        elif failed and attempts > 1:
            again = self._attempt(records.select(failed), attempts - 1)
            for index, result in zip(failed, again, strict=True):
                results[index] = result
        return results

    def _learn(self, framed: Iterable[bytes | None]) -> None:
        """Give the handler's decoders the schemas that these bytes name, if the registry has them."""
        registry = registry_of(self._plan.secrets)
        for schema_id in {*map(schema_id_of, {data[:5] for data in framed if data})} - self._known:
            try:
                found = registry.schema(registry.wait_for(registry.client.by_id(schema_id or 0)))
            except SchemaNotFound:
                continue  # the records that name it cannot be decoded
            self._serving.bodies.learn(found)
            self._known.add(schema_id)

    def _rows(self, records: RecordBatch, index: int, result: protocol.AnyResult, began: float) -> Iterator[Row]:
        """Yield the rows to write for a record: its outputs or its dead letter."""
        if isinstance(result, bytes):
            yield self._topic, records.keys[index], result, None, False
        elif result:
            if any(output.topic and kind_by_name(output.topic) for output in result.outputs):
                result = protocol.Result(error="TopicInternal", reason=_REFUSED, undecodable=True)
            if result.error:
                plan, reply = self._plan, Reply(result.error, result.reason, stack=result.stack)
                attempts = 1 if result.undecodable else plan.attempts
                yield plan.failures.row(records[index], reply, attempts, began, has_origin=plan.reads_topic)
            for output in () if result.error else result.outputs:
                headers = [header for header in output.headers if not is_reserved(header[0])]
                key = records.keys[index] if output.key is None else output.key
                yield output.topic or self._topic, key, output.body, headers or None, False

    def _records_of(self, batch: pa.RecordBatch) -> RecordBatch:
        columns = {name: batch.column(name) for name in batch.schema.names}
        offsets = columns["offset"].to_pylist()
        return RecordBatch(
            TopicPartition(columns["topic"][0].as_py(), columns["partition"][0].as_py()),
            offsets if self._plan.reads_topic else [next(self._count) for _ in offsets],
            pc.divide(columns["timestamp"].cast(pa.int64()), 1000).to_pylist(),
            columns["key"].to_pylist(),
            columns["value"].to_pylist(),
            _headers_of(columns["headers"]),
            [0] * len(offsets),
        )


_handler_of = functools.cache(SparkHandler)


async def _acknowledge(topic: str, partition: int, offset: int) -> str:
    return "in a pipeline a record is completed with its micro-batch"


def _headers_of(column: pa.ListArray) -> list[list[Header] | None] | None:
    if column.null_count == len(column):
        return None
    ends, inner = column.offsets.to_pylist(), column.values
    pairs = [*zip(inner.field("key").to_pylist(), inner.field("value").to_pylist(), strict=True)]
    return [pairs[start:end] or None for start, end in pairwise(ends)]
