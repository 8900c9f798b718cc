"""Tasks that end with a response: describe, show, test and state. None of them writes to a sink or to a checkpoint."""

import contextlib
import functools
import importlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any

import msgspec
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructType

from headrace.errors import PipelineInvalid
from headrace_pipelines import driver_protocol
from headrace_pipelines.driver.failures import PartFailed, failure_event, part
from headrace_pipelines.driver.fingerprint import frozen_of, kept_rows, state_of
from headrace_pipelines.driver.flows import rows_of_flow
from headrace_pipelines.driver.kafka_rows import BROKEN, to_json, with_rules
from headrace_pipelines.driver.project_runs import dry_run
from headrace_pipelines.driver.source_tables import CORRUPT, register_source
from headrace_pipelines.driver.stepped_query import run_steps
from headrace_pipelines.driver.views import rows_of
from headrace_pipelines.graph import ordered_views, paths_read
from headrace_pipelines.sources import CORRUPT_RECORDS, TableSource
from headrace_pipelines.spark_project import SparkProject
from headrace_pipelines.spec import QuerySpec
from headrace_pipelines.sql import without_streaming


def serve_requests(
    spark: SparkSession, plan: driver_protocol.DriverPlan, requests: IO[str], send: driver_protocol.SendEvent
) -> None:
    """Answer a request and all that follow it, until the last one."""
    while True:
        send(_response_of(spark, plan))
        if not (line := requests.readline()):
            return
        plan = driver_protocol.DriverPlan.model_validate_json(line)


def _response_of(spark: SparkSession, plan: driver_protocol.DriverPlan) -> driver_protocol.DriverEvent:
    before = set(sys.modules)
    try:
        work = {"describe": _describe, "show": _show, "test": _test, "state": kept_rows}[plan.task.kind]
        result = work(spark, plan)
        if len(msgspec.json.encode(result)) > driver_protocol.MOST_RESPONSE_BYTES:
            raise PipelineInvalid("the rows are larger than 64 MB: show fewer of them (--limit), or fewer columns")
        return driver_protocol.TaskResult(result)
    except PartFailed as failure:
        return msgspec.structs.replace(failure.event, stack=traceback.format_exc())
    except Exception as cause:  # boundary: the command shows this text
        if isinstance(cause, Py4JError | OSError) and not isinstance(cause, Py4JJavaError):
            raise  # the JVM has ended, and the process ends with it
        return msgspec.structs.replace(failure_event(cause, ""), stack=traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):  # boundary: a JVM that has ended keeps nothing
            for name in (*plan.spec.sources, *(name + CORRUPT_RECORDS for name in plan.spec.sources), *plan.spec.views):
                spark.catalog.dropTempView(name)
        importlib.invalidate_caches()
        for name in sys.modules.keys() - before:  # a file of the pipeline may change before the next request
            if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{plan.spec.folder}{os.sep}"):
                del sys.modules[name]


def _describe(spark: SparkSession, plan: driver_protocol.DriverPlan) -> dict[str, Any]:
    """Return the columns of each part, the state that each flow keeps, what its checkpoint would freeze, and what
    Spark rejects."""
    if isinstance(plan.spec, SparkProject):
        return dry_run(spark, plan.spec)
    java: Any = spark._jvm
    check = java.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming
    parts: dict[str, Any] = {}
    problems: list[dict[str, Any]] = []
    for path, make in _parts(spark, plan, functools.partial(register_source, spark, plan)):
        kind, _, name = path.partition(".")
        try:
            with part(path):
                frame = make()
                parts[path] = {"columns": {field.name: field.dataType.simpleString() for field in frame.schema}}
                if kind == "flows":
                    sink, analyzed = plan.spec.flows[name].sink, frame._jdf.queryExecution().analyzed()
                    check(analyzed, getattr(java.org.apache.spark.sql.streaming.OutputMode, sink.mode.capitalize())())
                    parts[path]["state"] = [*state_of(analyzed, plan.spec.flows[name])]
                    frame.select(*map(f.expr, sink.expressions.values()))
                    if plan.spec.trigger.realtime and sink.transaction_scope:
                        from headrace_pipelines.driver.row_transactions import with_positions  # because few need it

                        with_positions(frame)
        except PartFailed as failure:
            # A part cannot find a rejected part that it reads.
            if not problems or failure.event.error != "TABLE_OR_VIEW_NOT_FOUND":
                problems.append(msgspec.to_builtins(failure.event) | {"stack": traceback.format_exc()})
    frozen: dict[str, Any] = {}
    for name in () if problems else plan.spec.running:
        frames = rows_of_flow(spark, plan, name)
        frozen[name] = msgspec.to_builtins(frozen_of(frames, plan, plan.spec.running[name]))
    return {"parts": parts, "problems": problems, "frozen": frozen}


def _show(spark: SparkSession, plan: driver_protocol.DriverPlan) -> dict[str, Any]:
    register = functools.partial(register_source, spark, plan, bounded=True)
    for path, make in _parts(spark, plan, register, paths_read(plan.spec, [plan.task.name])):
        with part(path):
            frame = make()
    with part(path):
        return {"columns": frame.columns, "rows": [json.loads(line) for line in _lines(frame, plan.task.limit)]}


def _test(spark: SparkSession, plan: driver_protocol.DriverPlan) -> dict[str, Any]:
    """Return for each expected part its rows and the expected ones, as JSON texts with the same columns and types."""
    task = plan.task
    folder = plan.scratch / "test"
    shutil.rmtree(folder, ignore_errors=True)

    def register(name: str) -> None:
        fixed = isinstance(plan.spec.sources[name], TableSource)
        register_source(spark, plan, name)
        if fixed and name not in task.given:
            return
        if spark.catalog.tableExists(corrupt := name + CORRUPT_RECORDS):  # given rows are rows
            spark.createDataFrame([], spark.table(corrupt).schema).createOrReplaceTempView(corrupt)
        schema, below, steps = spark.table(name).schema, folder / name, task.given.get(name) or [[]]
        below.mkdir(parents=True)
        if fixed or not task.streaming:  # Spark would not read several files in this order
            steps = [[row for step in steps for row in step]]
        for number, step in enumerate(steps):
            file = below / f"{number}.json"
            file.write_text("\n".join(_typed(spark, plan, step, schema, f"given.{name}")))
            os.utime(file, (number, number))  # the order in which Spark reads them
        streamed = task.streaming and not fixed
        reader = spark.readStream.option("maxFilesPerTrigger", 1) if streamed else spark.read
        reader.schema(schema).json(str(below)).createOrReplaceTempView(name)

    found: dict[str, Any] = {}
    for path, make in _parts(spark, plan, register, paths_read(plan.spec, task.expect)):
        name = path.partition(".")[2]
        with part(path):
            frame = make()
            if name in task.expect:
                frame = _streamed(spark, plan, name, frame) if frame.isStreaming else frame
                expected = task.expect[name]
                named = {column for row in expected or () for column in row}
                chosen = frame.select(*(f"`{each}`" for each in frame.columns if each in named or not named))
                found[name] = {"actual": _lines(chosen), "expected": None}
                if expected is not None:
                    schema = chosen.schema if named <= set(frame.columns) else frame.schema
                    found[name]["expected"] = _typed(spark, plan, expected, schema, f"expect.{name}")
    return found


def _parts(
    spark: SparkSession,
    plan: driver_protocol.DriverPlan,
    register: Callable[[str], None],
    selected: Collection[tuple[str, str]] = (),
) -> Iterator[tuple[str, Callable[[], DataFrame]]]:
    """Yield each selected part after those that it reads: its path, and what makes it and returns its rows."""
    spec, task = plan.spec, plan.task

    def source(name: str) -> DataFrame:
        register(name)
        return spark.table(name)

    def query(found: QuerySpec) -> DataFrame:
        if found.sql and task.kind != "describe" and not task.streaming:
            found = found.model_copy(update={"sql": without_streaming(found.sql)})
        return rows_of(spark, plan, found)

    def view(name: str) -> DataFrame:
        query(spec.views[name]).createOrReplaceTempView(name)
        return spark.table(name)

    def flow(name: str) -> DataFrame:
        found = spec.flows[name]
        if task.kind == "describe":
            frame, _ = rows_of_flow(spark, plan, name)
        else:  # given rows are in time
            frame = with_rules(query(found), found)
        return frame.where(f"{BROKEN} IS NULL").drop(BROKEN) if BROKEN in frame.columns else frame

    steps: dict[tuple[str, str], Callable[[], DataFrame]] = {}
    steps |= {("sources", name): functools.partial(source, name) for name in spec.sources}
    steps |= {("views", name): functools.partial(view, name) for name in ordered_views(spec)}
    steps |= {("flows", name): functools.partial(flow, name) for name in spec.flows}
    for path, make in steps.items():
        if not selected or path in selected:
            yield ".".join(path), make


def _streamed(spark: SparkSession, plan: driver_protocol.DriverPlan, name: str, frame: DataFrame) -> DataFrame:
    """Return all rows that a streaming query has written after its last micro-batch."""
    table = f"headrace_test_{name}".replace("-", "_")
    mode, folder = plan.spec.flows[name].sink.mode if name in plan.spec.flows else "append", plan.scratch / "test"
    if name in plan.spec.flows and plan.spec.flows[name].processor:
        return run_steps(frame, mode, folder, folder / f"checkpoint-{name}", plan.task.step_seconds)
    writer = frame.writeStream.format("memory").queryName(table).outputMode(mode).trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / f"checkpoint-{name}")).start().awaitTermination()
    return spark.table(table)


def _typed(
    spark: SparkSession, plan: driver_protocol.DriverPlan, given: driver_protocol.Rows, schema: StructType, where: str
) -> list[str]:
    """Return rows as JSON texts, as Spark writes values of these types; PipelineInvalid for a row that does not fit."""
    known = schema.fieldNames()
    if unknown := sorted({name for row in given for name in row} - set(known)):
        raise PipelineInvalid(
            f"{where} has the column {unknown[0]}, and the columns are {', '.join(known)}: correct it"
        )
    file = plan.scratch / "rows.json"
    file.write_text("\n".join(map(json.dumps, given)))
    reader = spark.read.schema(StructType([*schema.fields]).add(CORRUPT, StringType()))
    frame = reader.json(str(file), columnNameOfCorruptRecord=CORRUPT)
    found = frame.select(to_json(known), CORRUPT).collect()
    if wrong := next((corrupt for _, corrupt in found if corrupt), None):
        raise PipelineInvalid(f"{where} has a row that is not of the type {schema.simpleString()}: {wrong}")
    return [text for text, _ in found]


def _lines(frame: DataFrame, limit: int | None = None) -> list[str]:
    texts = frame.select(to_json(frame.columns))
    return [row[0] for row in (texts.take(limit) if limit else texts.collect())]
