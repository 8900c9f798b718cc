"""Late rows: rows before a flow's watermark, taken out before Spark would silently drop them.

What is late follows from the watermark that Spark writes to the checkpoint's log of offsets before a micro-batch. So
the same rows are late when the batch is repeated, and each row is counted once: in time or late.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from headrace_pipelines.driver.kafka_rows import HEADERS, history_headers, to_json
from headrace_pipelines.driver.source_tables import RECORD_COLUMNS, rows_with_records
from headrace_pipelines.driver_protocol import DriverPlan
from headrace_pipelines.sources import KafkaSource
from headrace_pipelines.spec import LateRowsSpec

LATE = "late rows of the flow"
"""Name of the observed count; no source has it, because a source's name has no blanks."""


def take_out(spark: SparkSession, plan: DriverPlan, flow: str, late: LateRowsSpec) -> DataFrame:
    """Replace a source by its rows in time, with their watermark, and return its late rows as records."""
    from_topic = isinstance(plan.spec.sources[late.source], KafkaSource)
    rows = rows_with_records(spark, plan, late.source) if from_topic else spark.table(late.source)
    names = [name for name in rows.columns if name not in RECORD_COLUMNS.values()]
    is_late = f.coalesce(_passed(plan.checkpoint(flow))(f.col(late.column)), f.lit(False))
    delay = f"{round(late.delay_seconds * 1000)} milliseconds"
    rows.where(~is_late).select(*(f"`{name}`" for name in names)).withWatermark(
        late.column, delay
    ).createOrReplaceTempView(late.source)
    found = rows.where(is_late).observe(LATE, f.count(f.lit(1)).alias("late"))
    reason = f.concat(f.lit(f"{late.column} is before the watermark: "), f.col(late.column).cast("string"))
    key, own = (f.col(RECORD_COLUMNS[name]) if from_topic else f.lit(None) for name in ("key", "headers"))
    history = history_headers(plan.spec.group(flow), "LateRow", reason)
    record = {
        "topic": f.lit(late.topic),
        "key": key.cast("binary"),
        "value": to_json(names).cast("binary"),
        "headers": f.concat(f.coalesce(own.cast(HEADERS), f.array().cast(HEADERS)), history),
    }
    return found.select(*(column.alias(name) for name, column in record.items()))


def _passed(checkpoint: Path) -> Callable[[Column], Column]:
    """Return a function of Spark that tells for each time whether the watermark of the micro-batch has passed it."""

    import pyarrow  # only flows with late rows need it
    import pyarrow.compute
    from pyspark.sql.pandas.functions import arrow_udf

    def passed(times: pyarrow.Array) -> pyarrow.Array:
        context = TaskContext.get()
        assert context is not None
        watermark = watermark_ms(checkpoint, int(context.getLocalProperty("streaming.sql.batchId") or 0))
        return pyarrow.compute.less(times, pyarrow.scalar(watermark, pyarrow.timestamp("ms", times.type.tz)))

    judge: Callable[[Column], Column] = arrow_udf(passed, "boolean")  # type: ignore[call-overload]
    return judge


@functools.lru_cache(64)
def watermark_ms(checkpoint: Path, batch_id: int) -> int:
    """Return the watermark of a micro-batch in milliseconds since 1970; Spark wrote it before the batch began."""
    lines = (checkpoint / "offsets" / str(batch_id)).read_text().splitlines()
    return int(json.loads(lines[1])["batchWatermarkMs"])
