"""Kafka topics as tables and flows into topics: the connector's options, JSON values as rows, rows as records."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StringType, StructType

from headrace.errors import PipelineInvalid
from headrace.pipelines.driver.plan import DriverPlan
from headrace.pipelines.spec import SinkSpec, SourceSpec

_CORRUPT = "_corrupt_record"
_LATENCY_BOUND_SECONDS = 1.0
_PRODUCER = {
    "kafka.acks": "all",
    "kafka.enable.idempotence": "true",
    "kafka.linger.ms": "20",
    "kafka.batch.size": "262144",
    "kafka.compression.type": "lz4",
}


def register_source(spark: SparkSession, plan: DriverPlan, name: str) -> None:
    """Make a source known to SQL under its name.

    Every flow that reads it counts records that are no row under this name; they are left out.
    """
    source = plan.spec.sources[name]
    records = spark.readStream.format("kafka").options(**options(plan, source)).load()
    rows(records, source, name).createOrReplaceTempView(name)


def options(plan: DriverPlan, source: SourceSpec) -> dict[str, str]:
    """Return the connector's options for a source."""
    trigger = plan.spec.trigger
    quick = not trigger.once and trigger.interval_seconds < _LATENCY_BOUND_SECONDS
    return {
        **plan.security,
        "kafka.bootstrap.servers": plan.bootstrap_servers,
        "subscribe": source.topic,
        "startingOffsets": source.starting,
        "maxOffsetsPerTrigger": str(plan.spec.trigger.max_records),
        # Missing offsets stop the flow: continuing would pass over records silently.
        "failOnDataLoss": "true",
        "kafka.isolation.level": "read_committed",
        # Short breaks of Kafka pass unnoticed; after about a minute the flow fails, and readiness has the reason.
        "kafka.request.timeout.ms": "15000",
        "kafka.default.api.timeout.ms": "15000",
        # The default of 500 ms is waited out inside a micro-batch whenever a partition has nothing more.
        **({"kafka.fetch.max.wait.ms": "10"} if quick else {}),
    }


def rows(records: DataFrame, source: SourceSpec, name: str) -> DataFrame:
    """Return the rows of Kafka records (columns `key`, `value`, `timestamp`), and count the records that are no row."""
    schema = StructType.fromDDL(source.value_schema)
    if not isinstance(schema, StructType):
        raise PipelineInvalid(f"schema {source.value_schema} names no columns: write `name TYPE, name TYPE`")
    columns = schema.fieldNames()
    parser = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = records.select(
        "key",
        "timestamp",
        f.col("value").isNull().alias("tombstone"),
        f.from_json(f.col("value").cast("string"), schema.add(_CORRUPT, StringType()), parser).alias("row"),
    )
    # An empty value gives no row and no corrupt text either.
    good = f.col("row").isNotNull() & f.col(f"row.{_CORRUPT}").isNull()
    counted = parsed.observe(
        name,
        f.count_if(f.col("tombstone")).alias("tombstones"),
        f.count_if(~good & ~f.col("tombstone")).alias("corrupt"),
    )
    chosen = [f.col(f"row.`{column}`") for column in columns]
    if source.key_column:
        chosen.append(f.col("key").cast("string").alias(source.key_column))
    if source.timestamp_column:
        chosen.append(f.col("timestamp").alias(source.timestamp_column))
    return counted.where(good).select(*chosen)


def start_flow(spark: SparkSession, plan: DriverPlan, name: str) -> StreamingQuery:
    """Start a flow's query from its checkpoint, or from its sources' beginning if it has none; at least once."""
    flow, trigger = plan.spec.flows[name], plan.spec.trigger
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
    writer = (
        as_records(spark.sql(flow.sql), flow.sink)
        .writeStream.queryName(name)
        .format("kafka")
        .outputMode(flow.sink.mode)
        .options(**plan.security)
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
