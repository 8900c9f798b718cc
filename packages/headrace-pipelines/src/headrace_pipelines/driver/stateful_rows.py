"""Flows with a processor: their rows as a DataFrame, by Spark's transformWithState."""

import json
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from headrace.errors import PipelineInvalid
from headrace_pipelines.driver.kafka_rows import DEAD_LETTER, FAILED_CALLS, HEADERS
from headrace_pipelines.driver.processor_runner import FAILED_ROW, ProcessorPlan, ProcessorRunner
from headrace_pipelines.driver.python_names import imported
from headrace_pipelines.driver.source_tables import ORDER_COLUMNS, rows_with_records
from headrace_pipelines.driver.value_codecs import FailurePolicy
from headrace_pipelines.driver_protocol import DriverPlan
from headrace_pipelines.processors import Processor, states_of
from headrace_pipelines.sources import KafkaSource
from headrace_pipelines.spec import FlowSpec

_VALUES = {"ValueState": "value", "ListState": "list_element", "MapState": "user_map_value"}
"""Kinds of states, and the column of Spark's reader with their values."""
_WATERMARK = "spark.watermarkDelayMs"


def rows_of_processor(spark: SparkSession, plan: DriverPlan, flow: FlowSpec) -> DataFrame:
    """Return the rows of a flow with a processor. If it writes dead letters, their records are in `DEAD_LETTER`.

    Raises:
        PipelineInvalid: The class is wrong, or does not fit the rows or the trigger.
    """
    [name] = [name for name, each in plan.spec.flows.items() if each is flow]
    [read] = flow.reads
    kind = _class_of(plan, flow)
    in_order = isinstance(plan.spec.sources.get(read), KafkaSource) and plan.task.kind != "test"
    rows = rows_with_records(spark, plan, read, ORDER_COLUMNS) if in_order else spark.table(read)
    _require_column(rows, str(flow.key), read, "key")
    timed = [field.name for field in rows.schema if _WATERMARK in field.metadata]
    mode = _time_mode(plan, kind, timed)
    writes_dead_letters = plan.task.kind == "run" and bool(flow.dead_letters)
    failures = FailurePolicy(plan.spec.group(name), flow.dead_letters or "", flow.on_error)
    run = ProcessorPlan(
        str(flow.processor),
        str(plan.spec.folder or ""),
        read,
        timed[0] if timed else "",
        tuple(ORDER_COLUMNS.values()) if in_order else (),
        plan.task.kind == "test",
        StructType.fromDDL(kind.columns).json(),
        json.dumps({name: [_json_of(of) for of in state.types] for name, state in states_of(kind).items()}),
        failures,
        flow.attempts,
    )
    record = f"STRUCT<key: BINARY, value: BINARY, headers: {HEADERS}>"
    schema: Any = StructType.fromDDL(f"{kind.columns}, {DEAD_LETTER} {record}, {FAILED_ROW} BOOLEAN")
    initial = None
    if flow.initial:
        table = spark.table(flow.initial)
        _require_column(table, str(flow.key), flow.initial, "key")
        initial = table.groupBy(str(flow.key))
    _ = spark.streams.active  # starts what the stores report to; a session without queries does not have it
    # Spark reuses a Python worker for the same environment, and two processors may have modules of one name. Spark
    # gives times of a state in the zone of the worker, where some hours may come twice.
    environment = spark.sparkContext.environment
    environment.update(HEADRACE_FLOW=failures.group, TZ="UTC")
    made = rows.groupBy(str(flow.key)).transformWithState(
        ProcessorRunner(run), schema, flow.sink.mode.capitalize(), mode, initial
    )
    del environment["HEADRACE_FLOW"], environment["TZ"]
    made = made.observe(FAILED_CALLS, f.count_if(FAILED_ROW).alias("failed")) if plan.task.kind == "run" else made
    kept = ~f.col(FAILED_ROW) | f.col(DEAD_LETTER).isNotNull() if writes_dead_letters else ~f.col(FAILED_ROW)
    return made.where(kept).drop(*((FAILED_ROW,) if writes_dead_letters else (FAILED_ROW, DEAD_LETTER)))


def described(plan: DriverPlan, flow: FlowSpec, operator: str) -> str:
    """Return what a checkpoint freezes of a processor: its class, key, kind of time, and states."""
    mode = next((mode for mode in ("EventTime", "ProcessingTime") if f", {mode}, " in operator), "no time")
    states = [
        f"{name} {type(state).__name__}({', '.join(state.types)}{', ttl' if state.ttl_seconds else ''})"
        for name, state in sorted(states_of(_class_of(plan, flow)).items())
    ]
    return f"processor {flow.processor} by {flow.key} with {mode} and {', '.join(states) or 'no state'}"


def processor_states(spark: SparkSession, plan: DriverPlan, store: Any) -> list[dict[str, Any]]:
    """Return the states and timers of a processor in a checkpoint: how many rows each has, and some of them."""
    checkpoint, found = str(plan.task.checkpoint), []
    for variable in json.loads(store.operatorProperties)["stateVariables"]:
        name, kind = variable["stateName"], variable["stateVariableType"]
        reader = spark.read.format("statestore").option("operatorId", store.operatorId)
        is_timer = kind == "TimerState"
        reader = reader.option("readRegisteredTimers", True) if is_timer else reader.option("stateVarName", name)
        rows = reader.load(checkpoint)
        value = f.timestamp_millis("expiration_timestamp_ms") if is_timer else f.col(_VALUES[kind])
        if variable["ttlEnabled"]:
            value = value["value"]
        columns = [f.col("key"), (value if is_timer else value["value"]).alias("value")]
        if kind == "MapState":
            columns.append(f.col("user_map_key.value").alias("map_key"))
        lines = rows.select(*columns).limit(plan.task.limit).toJSON().collect()
        shown = [json.loads(str(line)) for line in lines]
        for row in shown:
            row["key"] |= {name: row.pop(name) for name in ("map_key",) if name in row}
            row.setdefault("value", None)
        about = {"operator": "processor", "store": "timers" if is_timer else name, "partitions": store.numPartitions}
        found.append({**about, "batch": store.maxBatchId, "rows": rows.count(), "shown": shown})
    return sorted(found, key=lambda each: str(each["store"]))


def _class_of(plan: DriverPlan, flow: FlowSpec) -> type[Processor]:
    found = imported(str(plan.spec.folder or ""), str(flow.processor), "processor")
    if not (isinstance(found, type) and issubclass(found, Processor)):
        text = f"processor: {flow.processor} is not a class with the base Processor"
        raise PipelineInvalid(f"{text}: write class {str(flow.processor).partition(':')[2]}(Processor)")
    if not isinstance(getattr(found, "columns", None), str):
        raise PipelineInvalid(
            f'processor: {flow.processor} has no columns: write columns = "name TYPE, name TYPE" in it'
        )
    return found


def _json_of(of: str) -> str:
    """Return a type in the form in which Python workers, which have no parser for SQL types, read it."""
    return StructType.fromDDL(f"value {of}").json()


def _require_column(rows: DataFrame, column: str, name: str, setting: str) -> None:
    if column not in rows.columns:
        raise PipelineInvalid(f"{setting}: {name} has no column {column}: take one of {', '.join(rows.columns)}")


def _time_mode(plan: DriverPlan, kind: type[Processor], timed: list[str]) -> str:
    """Return the kind of time that Spark gives the processor."""
    expires = [name for name, state in states_of(kind).items() if state.ttl_seconds]
    if timed and expires:
        raise PipelineInvalid(
            f"processor: state {expires[0]} has a ttl_seconds, which Spark counts by the clock only, and the rows have "
            f"the watermark {timed[0]}: remove ttl_seconds and delete the state in on_timer, or remove the WATERMARK"
        )
    if timed:
        return "EventTime"
    if not expires and kind.on_timer is Processor.on_timer:
        return "None"
    if plan.spec.trigger.once:
        raise PipelineInvalid(
            "processor: timers and ttl_seconds by the clock never end, and trigger.once waits for an end: use "
            "trigger.interval_seconds, or read a view with a WATERMARK"
        )
    return "ProcessingTime"
