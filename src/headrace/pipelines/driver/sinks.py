"""Rows into Kafka topics: key from an expression, value as JSON of all columns. At least once."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from headrace.pipelines.driver.plan import DriverPlan
from headrace.pipelines.spec import SinkSpec

_PRODUCER = {
    "kafka.acks": "all",
    "kafka.enable.idempotence": "true",
    "kafka.linger.ms": "20",
    "kafka.batch.size": "262144",
    "kafka.compression.type": "lz4",
}


def start_flow(spark: SparkSession, plan: DriverPlan, name: str) -> StreamingQuery:
    """Start a flow's query from its checkpoint, or from its sources' beginning if it has none."""
    flow, trigger = plan.spec.flows[name], plan.spec.trigger
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
    writer = (
        as_records(spark.sql(flow.sql), flow.sink)
        .writeStream.queryName(name)
        .format("kafka")
        .outputMode(flow.sink.mode)
        .option("kafka.bootstrap.servers", plan.bootstrap_servers)
        .option("topic", flow.sink.topic)
        .option("checkpointLocation", str(plan.checkpoint(name)))
        .options(**_PRODUCER)
    )
    if trigger.once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(trigger.interval_seconds * 1000)} milliseconds").start()


def as_records(rows: DataFrame, sink: SinkSpec) -> DataFrame:
    """Return rows as Kafka records: columns `key` and `value`, both text. Null columns are written as null."""
    key = f.expr(sink.key) if sink.key else f.lit(None)
    value = f.to_json(f.struct("*"), {"ignoreNullFields": "false"})
    return rows.select(key.cast("string").alias("key"), value.alias("value"))
