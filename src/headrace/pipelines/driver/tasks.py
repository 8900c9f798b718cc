"""Tasks that end with an answer: describe, show and trial. None of them writes to a sink or to a checkpoint."""

import contextlib
import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructType

from headrace.errors import PipelineInvalid
from headrace.pipelines.driver import plan as wire
from headrace.pipelines.driver.failures import PartFailed, failure_event, part
from headrace.pipelines.driver.topics import options, register_source, rows
from headrace.pipelines.graph import ordered_views
from headrace.pipelines.sql import tables_read, without_streaming

_CORRUPT = "_corrupt_record"
_STATE = {"Aggregate": ("aggregate", "groupingExpressions"), "Distinct": ("distinct", "output"), "Join": ("join", "")}
_STATE |= dict.fromkeys(("Deduplicate", "DeduplicateWithinWatermark"), ("distinct", "keys"))
"""Spark's operators with state: our word, and the method with the keys."""
_WATERMARK = "spark.watermarkDelayMs"
_MTIME = 1_000_000_000
Register = Callable[[str], object]
"""Makes a source known to SQL under its name."""


def answer_requests(spark: SparkSession, plan: wire.DriverPlan, requests: IO[str], send: wire.SendEvent) -> None:
    """Answer a request and all that follow it, until there are no more."""
    while True:
        send(_answer(spark, plan))
        if not (line := requests.readline()):
            return
        plan = wire.DriverPlan.model_validate_json(line)


def _answer(spark: SparkSession, plan: wire.DriverPlan) -> wire.DriverEvent:
    try:
        if isinstance(plan.task, wire.ShowTask):
            return wire.Answered(show(spark, plan, plan.task))
        if isinstance(plan.task, wire.TrialTask):
            return wire.Answered(trial(spark, plan, plan.task))
        return wire.Answered(describe(spark, plan))
    except PartFailed as failure:
        return msgspec.structs.replace(failure.event, stack=traceback.format_exc())
    except (Py4JNetworkError, OSError):
        raise  # the JVM has ended, and the process ends with it
    except Exception as cause:  # noqa: BLE001 boundary: the command shows this text
        return msgspec.structs.replace(failure_event(cause, ""), stack=traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):  # boundary: a JVM that has ended keeps nothing
            for table in spark.catalog.listTables():
                spark.catalog.dropTempView(table.name)


def describe(spark: SparkSession, plan: wire.DriverPlan) -> dict[str, Any]:
    """Return the columns of each part, the state that each flow keeps, and what Spark refuses."""
    java: Any = spark._jvm
    checker = java.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    modes = java.org.apache.spark.sql.streaming.OutputMode
    parts: dict[str, Any] = {}
    problems: list[Any] = []
    for path, make in _parts(spark, plan, lambda name: register_source(spark, plan, name), streaming=True):
        kind, _, name = path.partition(".")
        try:
            with part(path):
                frame = make()
                parts[path] = {"columns": {field.name: field.dataType.simpleString() for field in frame.schema}}
                if kind == "flows":
                    mode, analyzed = plan.spec.flows[name].sink.mode, frame._jdf.queryExecution().analyzed()
                    checker.checkForStreaming(analyzed, getattr(modes, mode.capitalize())())
                    parts[path] |= {"state": list(_state(analyzed, mode))}
        except PartFailed as failure:
            # A part that reads a refused one cannot find it.
            if not problems or failure.event.error != "TABLE_OR_VIEW_NOT_FOUND":
                problems.append(msgspec.to_builtins(failure.event) | {"stack": traceback.format_exc()})
    return {"parts": parts, "problems": problems}


def show(spark: SparkSession, plan: wire.DriverPlan, task: wire.ShowTask) -> dict[str, Any]:
    """Return columns and rows of a part, from the slices of its topics."""

    def register(name: str) -> None:
        source = plan.spec.sources[name]
        slices = task.slices[source.topic]
        first, behind = ({source.topic: {k: v[side] for k, v in slices.items()}} for side in (0, 1))
        bounds = {"startingOffsets": json.dumps(first), "endingOffsets": json.dumps(behind)}
        bounded = {**options(plan, source), **bounds}
        del bounded["maxOffsetsPerTrigger"]
        rows(spark.read.format("kafka").options(**bounded).load(), source, name).createOrReplaceTempView(name)

    for path, make in _parts(spark, plan, register, selected=_needed(plan, task.name)):
        with part(path):
            frame = make()
    with part(path):
        return {"columns": frame.columns, "rows": [json.loads(line) for line in _lines(frame.limit(task.limit))]}


def trial(spark: SparkSession, plan: wire.DriverPlan, task: wire.TrialTask) -> dict[str, Any]:
    """Return for each expected part its rows and the expected ones, as JSON texts with the same columns and types."""
    folder = plan.scratch / "trial"
    shutil.rmtree(folder, ignore_errors=True)

    def register(name: str) -> None:
        register_source(spark, plan, name)
        schema = spark.table(name).schema
        steps = [_typed(spark, folder, step, schema, f"given.{name}") for step in task.given.get(name, ())]
        below = folder / name
        below.mkdir(parents=True)
        if not task.streaming:  # several files would be read in an order of their own
            steps = [[line for lines in steps for line in lines]]
        for number, lines in enumerate(steps or [[]]):
            file = below / f"{number}.json"
            file.write_text("\n".join(lines))
            os.utime(file, (_MTIME + number, _MTIME + number))  # the order in which Spark reads them
        if task.streaming:
            frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(below))
        else:
            frame = spark.read.schema(schema).json(str(below))
        frame.createOrReplaceTempView(name)

    selected = {name for each in task.expect for name in _needed(plan, each)}
    found: dict[str, Any] = {}
    for path, make in _parts(spark, plan, register, streaming=task.streaming, selected=selected):
        name = path.partition(".")[2]
        with part(path):
            frame = make()
            if name in task.expect:
                if task.streaming:
                    frame = _streamed(spark, plan, name, frame)
                found[name] = _compared(spark, folder, frame, task.expect[name], f"expect.{name}")
    return found


def _parts(
    spark: SparkSession,
    plan: wire.DriverPlan,
    register: Register,
    *,
    streaming: bool = False,
    selected: set[str] | None = None,
) -> Iterator[tuple[str, Callable[[], DataFrame]]]:
    """Yield each selected part, those that others read first: its path, and what makes it and returns its rows."""
    spec = plan.spec

    def source(name: str) -> DataFrame:
        register(name)
        return spark.table(name)

    def query(sql: str) -> DataFrame:
        return spark.sql(sql if streaming else without_streaming(sql))

    def view(name: str) -> DataFrame:
        frame = query(spec.views[name])
        frame.createOrReplaceTempView(name)
        return frame

    def flow(name: str) -> DataFrame:
        return query(spec.flows[name].sql)

    for kind, names, make in (
        ("sources", spec.sources, source),
        ("views", ordered_views(spec), view),
        ("flows", spec.flows, flow),
    ):
        for name in names:
            if selected is None or name in selected:
                yield f"{kind}.{name}", lambda make=make, name=name: make(name)  # type: ignore[misc]


def _needed(plan: wire.DriverPlan, name: str) -> set[str]:
    """Return the name of a part and of all that it reads."""
    spec, found, waiting = plan.spec, set[str](), [name]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            sql = spec.views.get(each) or (spec.flows[each].sql if each in spec.flows else "")
            waiting += tables_read(sql)
    return found


def _streamed(spark: SparkSession, plan: wire.DriverPlan, name: str, frame: DataFrame) -> DataFrame:
    """Return all rows that a streaming query has written after its last micro-batch."""
    table = f"trial_{name}".replace("-", "_")
    mode = plan.spec.flows[name].sink.mode if name in plan.spec.flows else "append"
    writer = frame.writeStream.format("memory").queryName(table).outputMode(mode)
    query = writer.option("checkpointLocation", str(plan.scratch / "trial" / "checkpoints" / name))
    query.trigger(availableNow=True).start().awaitTermination()
    return spark.table(table)


def _compared(
    spark: SparkSession, folder: Path, frame: DataFrame, expected: list[dict[str, Any]] | Path | None, where: str
) -> dict[str, Any]:
    if expected is None:
        return {"actual": _lines(frame), "expected": None}
    named = expected if isinstance(expected, list) else list(_file_rows(spark, expected, frame.schema))
    _require_columns(named, frame.columns, where)
    columns = [name for name in frame.columns if not named or any(name in row for row in named)]
    chosen = frame.select(*(f"`{name}`" for name in columns))
    return {"actual": _lines(chosen), "expected": _typed(spark, folder, named, chosen.schema, where)}


def _typed(
    spark: SparkSession, folder: Path, given: list[dict[str, Any]] | Path, schema: StructType, where: str
) -> list[str]:
    """Return rows as JSON texts, written as Spark writes values of these types.

    Raises:
        PipelineInvalid: A row has another column, or a value of another type.
    """
    found = given if isinstance(given, list) else list(_file_rows(spark, given, schema))
    _require_columns(found, schema.fieldNames(), where)
    file = folder / "rows.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, found)))
    reader = spark.read.schema(StructType([*schema.fields]).add(_CORRUPT, StringType()))
    frame = reader.json(str(file), columnNameOfCorruptRecord=_CORRUPT)
    collected = frame.select(_as_json(frame, schema.fieldNames()), _CORRUPT).collect()
    for _, corrupt in collected:
        if corrupt:
            raise PipelineInvalid(f"{where} has a row that is not of the type {schema.simpleString()}: {corrupt}")
    return [text for text, _ in collected]


def _require_columns(rows: list[dict[str, Any]], columns: list[str], where: str) -> None:
    if unknown := sorted({name for row in rows for name in row} - set(columns)):
        raise PipelineInvalid(
            f"{where} has the column {unknown[0]}, and the columns are {', '.join(columns)}: correct it"
        )


def _file_rows(spark: SparkSession, file: Path, schema: StructType) -> Iterator[dict[str, Any]]:
    if file.suffix == ".csv":
        texts = spark.read.option("header", True).csv(str(file))
        known = {field.name: field.dataType for field in schema}
        typed = [f.col(name).cast(known[name]) if name in known else f.col(name) for name in texts.columns]
        yield from map(json.loads, _lines(texts.select(*typed)))
    else:
        text = file.read_text()
        yield from json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())


def _lines(frame: DataFrame) -> list[str]:
    return [row[0] for row in frame.select(_as_json(frame, frame.columns)).collect()]


def _as_json(frame: DataFrame, columns: list[str]) -> Any:
    return f.to_json(f.struct(*(f.col(f"`{name}`") for name in columns)), {"ignoreNullFields": "false"})


def _state(analyzed: Any, mode: str) -> Iterator[dict[str, Any]]:
    """Yield what a query keeps between micro-batches: the operation, its keys, and whether a watermark ends them."""
    for node in _below(analyzed):
        name, children = node.nodeName(), _items(node.children())
        if not node.isStreaming() or (name == "Join" and not all(child.isStreaming() for child in children)):
            continue
        if name == "Join":
            keys = [node.condition().get()] if node.condition().isDefined() else []
            marked = [each for each in _attributes(keys) if _has_watermark(each)]
            bounded = all(any(child.outputSet().contains(each) for each in marked) for child in children)
        elif name in _STATE:
            keys = _items(getattr(node, _STATE[name][1])())
            bounded = not keys or any(map(_has_watermark, _attributes(keys)))
        elif "WithState" in name:
            keys, bounded = [], True
        else:
            continue
        texts = [key.sql().replace("`", "") for key in keys]
        keeps = _STATE[name][0] if name in _STATE else name
        yield {"keeps": keeps, "keys": texts, "bounded": bounded and (mode != "complete" or not keys)}


def _attributes(expressions: list[Any]) -> list[Any]:
    return [each for expression in expressions for each in _items(expression.references().toSeq())]


def _has_watermark(attribute: Any) -> bool:
    return bool(attribute.metadata().contains(_WATERMARK))


def _below(node: Any) -> Iterator[Any]:
    yield node
    for child in _items(node.children()):
        yield from _below(child)


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(number) for number in range(sequence.size())]
