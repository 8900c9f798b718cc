"""Kafka topics as tables: the connector's options, and JSON values as rows."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructType

from headrace.errors import PipelineInvalid
from headrace.pipelines.driver.plan import DriverPlan
from headrace.pipelines.spec import SourceSpec

_CORRUPT = "_corrupt_record"
_LATENCY_BOUND_SECONDS = 1.0


def register_source(spark: SparkSession, plan: DriverPlan, name: str) -> None:
    """Make a source known to SQL under its name.

    Every flow that reads it counts under this name what was no row; those records are then left out.
    """
    source = plan.spec.sources[name]
    records = spark.readStream.format("kafka").options(**options(plan, source)).load()
    rows(records, source, name).createOrReplaceTempView(name)


def options(plan: DriverPlan, source: SourceSpec) -> dict[str, str]:
    """Return the connector's options for a source."""
    trigger = plan.spec.trigger
    quick = not trigger.once and trigger.interval_seconds < _LATENCY_BOUND_SECONDS
    return {
        "kafka.bootstrap.servers": plan.bootstrap_servers,
        "subscribe": source.topic,
        "startingOffsets": source.starting,
        "maxOffsetsPerTrigger": str(plan.spec.trigger.max_records),
        # Offsets that are gone stop the flow: going on would pass over records without a word.
        "failOnDataLoss": "true",
        "kafka.isolation.level": "read_committed",
        # Short breaks of Kafka pass unnoticed; after about a minute the flow fails, and readiness says why.
        "kafka.request.timeout.ms": "15000",
        "kafka.default.api.timeout.ms": "15000",
        # The default of 500 ms is waited out inside a micro-batch whenever a partition has nothing more.
        **({"kafka.fetch.max.wait.ms": "10"} if quick else {}),
    }


def rows(records: DataFrame, source: SourceSpec, name: str) -> DataFrame:
    """Return the rows of Kafka records (columns `key`, `value`, `timestamp`), counting in passing what is no row."""
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
