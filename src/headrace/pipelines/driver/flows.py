"""Flows as streaming queries: each writes its rows to its sink, from its own checkpoint."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from headrace.config.format_list import SCHEMA_TYPES
from headrace.pipelines.checkpoints import check
from headrace.pipelines.driver.exactly_once_sink import ExactlyOnceSink, exactly_once
from headrace.pipelines.driver.fingerprint import frozen_of
from headrace.pipelines.driver.kafka_rows import as_records, with_rules
from headrace.pipelines.driver.late_rows import take_out
from headrace.pipelines.driver.source_tables import register_source, texts
from headrace.pipelines.driver.views import register_view, rows_of
from headrace.pipelines.graph import ordered_views, topics_read
from headrace.pipelines.protocol import DriverPlan
from headrace.pipelines.sinks import ConsoleSink, FileSink, KafkaSink, MemorySink, PostgresSink

_PRODUCER = {
    "kafka.acks": "all",
    "kafka.enable.idempotence": "true",
    "kafka.linger.ms": "20",
    "kafka.batch.size": "262144",
    "kafka.compression.type": "lz4",
}


def start_flow(spark: SparkSession, plan: DriverPlan, name: str) -> tuple[StreamingQuery, ExactlyOnceSink | None]:
    """Start a flow's query from its checkpoint; without one, from `starting` of its sources.

    Returns:
        The query, and the sink that writes its micro-batches in this process, if it has one.
    """
    flow = plan.spec.running[name]
    trigger = plan.spec.trigger
    if not plan.spec.driver.remote:
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
    rows, late = rows_of_flow(spark, plan, name)
    topics = {topic: plan.topic_ids[topic] for topic in topics_read(plan.spec, name) if topic in plan.topic_ids}
    check(plan.folder, name, frozen_of([rows, late], plan, flow), topics)
    sink = exactly_once(plan, name)
    writer = _writer(rows, plan, name, late, sink).queryName(name).outputMode(flow.sink.mode)
    writer = writer.option("checkpointLocation", str(plan.checkpoint(name)))
    if trigger.once:
        return writer.trigger(availableNow=True).start(), sink
    if trigger.realtime:
        interval = f"{round(trigger.checkpoint_seconds * 1000)} milliseconds"
        return writer.trigger(realTime=interval).start(), sink  # type: ignore[call-overload]
    return writer.trigger(processingTime=f"{round(trigger.interval_seconds * 1000)} milliseconds").start(), sink


def rows_of_flow(spark: SparkSession, plan: DriverPlan, name: str) -> tuple[DataFrame, DataFrame | None]:
    """Return the rows that a flow's rules let pass, and its late rows as records if they have a topic."""
    flow = plan.spec.running[name]
    late = None
    if flow.late_rows:
        spark = spark.newSession()  # in which the source has its rows in time only
        for source in plan.spec.sources:
            register_source(spark, plan, source)
        late = take_out(spark, plan, name, flow.late_rows)
        for view in ordered_views(plan.spec):
            register_view(spark, plan, view)
    return with_rules(rows_of(spark, plan, flow), flow), late


def _writer(
    rows: DataFrame, plan: DriverPlan, name: str, late: DataFrame | None, target: ExactlyOnceSink | None
) -> DataStreamWriter:
    flow = plan.spec.running[name]
    match flow.sink:
        case KafkaSink() as sink:
            records = as_records(rows, flow, plan.spec.group(name))
            if sink.value_format in SCHEMA_TYPES:
                from headrace.pipelines.driver.value_codecs import encoded  # here, because most pipelines need none

                records = encoded(records, plan, name)
            records = records if late is None else records.unionByName(late)
            if target:
                return records.writeStream.foreachBatch(target)
            options = {**plan.security, "kafka.bootstrap.servers": plan.bootstrap_servers, **_PRODUCER}
            if plan.spec.trigger.realtime:
                options["kafka.linger.ms"] = "0"
            return records.writeStream.format("kafka").options(**{**options, **texts(sink.options)})
        case PostgresSink():
            from headrace.pipelines.driver.postgres import as_texts  # here, because it needs a further library

            assert target
            return as_texts(rows).writeStream.foreachBatch(target)
        case FileSink() as sink:
            writer = rows.writeStream.format(sink.format).options(**texts(sink.options))
            return writer.partitionBy(*sink.partition_by).option("path", plan.path(sink.files))
        case ConsoleSink() as sink:
            return rows.writeStream.format("console").option("numRows", sink.rows).option("truncate", False)
        case MemorySink():
            return rows.writeStream.format("memory")
