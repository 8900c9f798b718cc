"""A streaming query of a test case with a clock of its own: each step is a micro-batch at a time that the case chooses.

Timers and times to live go by Spark's clock, so a test need not wait for them. The first step is at `FIRST_STEP`.
"""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from headrace.errors import PipelineInvalid

FIRST_STEP = datetime(2026, 1, 1, tzinfo=UTC)
_LIMIT_SECONDS = 120.0
_POLL_SECONDS = 0.05


def run_steps(frame: DataFrame, mode: str, given: Path, checkpoint: Path, step_seconds: float) -> DataFrame:
    """Return all rows that a query writes.

    Args:
        frame: What it writes.
        mode: Its output mode.
        given: A folder per source, with a file for each step: `0.json`, `1.json` and so on.
        checkpoint: Its checkpoint, which does not exist yet.
        step_seconds: Time from one step to the next.
    """
    spark, names = frame.sparkSession, sorted(int(file.stem.lstrip(".")) for file in given.glob("*/*.json"))
    java: Any = spark._jvm
    internal = java.org.apache.spark.sql.execution.streaming.sources
    clock, sink = java.org.apache.spark.util.ManualClock(0), internal.MemorySink()
    for number in range(max(names, default=0) + 1):
        for file in [*given.glob("*/*.json")]:  # Spark does not see files whose names begin with a dot
            step = int(file.stem.lstrip("."))
            file.rename(file.with_name(f"{'' if step <= number else '.'}{step}.json"))
        clock.setTime(round((FIRST_STEP.timestamp() + number * step_seconds) * 1000))
        _run(frame, mode, checkpoint, clock, sink, number)
    attributes = java.org.apache.spark.sql.catalyst.types.DataTypeUtils.toAttributes(frame._jdf.schema())
    rows = java.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, internal.MemoryPlan(sink, attributes))
    return DataFrame(rows, spark)


def _run(frame: DataFrame, mode: str, checkpoint: Path, clock: Any, sink: Any, number: int) -> None:
    """Run the query from its checkpoint until it has read the files of a step."""
    spark: Any = frame.sparkSession
    java, by_clock = spark._jvm, ", ProcessingTime, " in frame._jdf.queryExecution().analyzed().toString()
    some, streaming = java.scala.Option.apply, java.org.apache.spark.sql.streaming
    none, options = java.scala.Option.empty(), java.org.apache.spark.api.python.PythonUtils.toScalaMap({})
    output, trigger = getattr(streaming.OutputMode, mode.capitalize())(), streaming.Trigger.AvailableNow()
    query = (
        spark._jsparkSession.sessionState()
        .streamingQueryManager()
        .startQuery(
            some("test"),
            none,
            some(str(checkpoint)),
            frame._jdf,
            options,
            sink,
            output,
            False,  # no temporary checkpoint
            True,  # the checkpoint of the step before is gone on with
            trigger,
            clock,
            none,
            none,
        )
    )
    try:
        end = time.monotonic() + _LIMIT_SECONDS
        while query.isActive() and not (by_clock and _has_read(query, number)):
            if time.monotonic() > end:
                raise PipelineInvalid(f"step {number} takes longer than {_LIMIT_SECONDS} s: give fewer rows")
            time.sleep(_POLL_SECONDS)
        if query.exception().isDefined():
            raise StreamingQueryException(query.exception().get().getMessage())
    finally:
        query.stop()


def _has_read(query: Any, number: int) -> bool:
    """Return whether the file of a step is read. A query with timers by the clock does not end by itself."""
    progress = query.lastProgress()
    ends = [json.loads(source.endOffset() or "{}") for source in progress.sources()] if progress else []
    return bool(ends) and all(end.get("logOffset", -1) >= number for end in ends)
