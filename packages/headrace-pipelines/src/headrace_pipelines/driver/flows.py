"""Flows as streaming queries: each writes its rows to its sink, from its own checkpoint."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headrace_pipelines.checkpoints import check
from headrace_pipelines.driver.fingerprint import frozen_of
from headrace_pipelines.driver.kafka_rows import as_records, with_rules
from headrace_pipelines.driver.late_rows import take_out
from headrace_pipelines.driver.source_tables import register_source
from headrace_pipelines.driver.views import register_view, rows_of
from headrace_pipelines.driver_protocol import DriverPlan
from headrace_pipelines.graph import ordered_views, topics_read
from headrace_pipelines.sinks.sink import BatchWriter, FlowInDriver

_FAR_MILLISECONDS = 1 << 62


def start_flow(spark: SparkSession, plan: DriverPlan, name: str) -> tuple[StreamingQuery, BatchWriter | None]:
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
    about = _about(plan, name)
    sink = flow.sink.batches(about)
    rows = _as_records(rows, late, plan, name) if flow.sink.topics else rows
    writer = flow.sink.writer(rows, about, sink).queryName(name).outputMode(flow.sink.mode)
    writer = writer.option("checkpointLocation", str(plan.checkpoint(name)))
    if trigger.once:
        return writer.trigger(availableNow=True).start(), sink
    if trigger.realtime:
        interval = f"{round(trigger.checkpoint_seconds * 1000)} milliseconds"
        return writer.trigger(realTime=interval).start(), sink  # type: ignore[call-overload]
    return writer.trigger(processingTime=f"{round(trigger.interval_seconds * 1000)} milliseconds").start(), sink


def end_batches(spark: SparkSession) -> None:
    """Let the tasks of real-time mode end after their next record, so that a stop repeats no rows.

    It works in the driver's JVM only: the executors of a cluster end them at the next checkpoint.
    """
    jvm: Any = spark._jvm
    jvm.org.apache.spark.sql.execution.datasources.v2.LowLatencyClock.setClock(
        jvm.org.apache.spark.util.ManualClock(_FAR_MILLISECONDS)
    )


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


def _about(plan: DriverPlan, name: str) -> FlowInDriver:
    return FlowInDriver(
        name=name,
        group=plan.spec.group(name),
        checkpoint=plan.checkpoint(name),
        path=plan.path,
        connector={**plan.security, "kafka.bootstrap.servers": plan.bootstrap_servers},
        kafka=plan.kafka,
        secrets=plan.secrets,
        tasks=plan.spec.driver.shuffle_partitions,
        realtime=plan.spec.trigger.realtime,
    )


def _as_records(rows: DataFrame, late: DataFrame | None, plan: DriverPlan, name: str) -> DataFrame:
    """Return rows as Kafka records: keys, values and headers, dead letters and late rows too."""
    flow = plan.spec.running[name]
    records = as_records(rows, flow, plan.spec.group(name))
    if flow.sink.can_reject_rows:
        from headrace_pipelines.driver.value_codecs import encoded  # here, because most pipelines need none

        records = encoded(records, plan, name)
    return records if late is None else records.unionByName(late)
