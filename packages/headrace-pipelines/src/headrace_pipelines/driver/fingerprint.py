"""The checkpoint of a flow: what Spark freezes in it, read from the analysed plan, and the state it keeps."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from headrace_pipelines.checkpoints import Frozen
from headrace_pipelines.driver.source_tables import RAW
from headrace_pipelines.driver_protocol import DriverPlan
from headrace_pipelines.sources import CORRUPT_RECORDS
from headrace_pipelines.spec import FlowSpec

_ID = re.compile(r"#\d+L?(-T\d+ms)?|^~")
_STATEFUL = ("Distinct", "Deduplicate", "GlobalLimit", "FlatMapGroups", "TransformWithState")
_KEY_METHODS = {"Aggregate": "groupingExpressions", "Distinct": "output", "Deduplicate": "keys", "Join": ""}
_KEY_METHODS |= {"DeduplicateWithinWatermark": "keys"}
"""Spark's operators with state, and the method that returns their keys."""
_PROCESSOR = "TransformWithState"
_WINDOWS = ("window", "session_window")
_SPAN = re.compile(r"(?<=[%+] )\d+|(?<=cast\()[\w. ]+(?= as interval)")
_MOST_FIELDS = 1000


def frozen_of(frames: Sequence[DataFrame | None], plan: DriverPlan, flow: FlowSpec) -> Frozen | None:
    """Return what the checkpoint of a flow with the rows of these frames freezes; None if Spark does not show it."""
    if plan.spec.driver.remote:
        return None
    sink = flow.sink
    walk = _PlanWalk(plan)
    parts = plan.spec.driver.shuffle_partitions
    for frame in frames:
        if frame is not None:
            walk.visit(frame._jdf.queryExecution().analyzed(), "")
    operators = walk.operators
    if flow.processor:
        from headrace_pipelines.driver.stateful_rows import described  # here, because most pipelines have none

        operators = [described(plan, flow, each) if each.startswith(_PROCESSOR) else each for each in operators]
    return Frozen(
        sources=walk.sources,
        operators=operators,
        output_mode=sink.mode,
        sink=sink.frozen(parts),
        shuffle_partitions=parts if walk.operators else 0,
    )


def kept_rows(spark: SparkSession, plan: DriverPlan) -> dict[str, Any]:
    """Return the state that a checkpoint keeps, as its newest micro-batch left it: for each store its operator, how
    many rows it has, and some of them."""
    _ = spark.streams.active  # starts what the stores report to; a session without queries does not have it
    checkpoint = str(plan.task.checkpoint)
    found: list[dict[str, Any]] = []
    for store in spark.read.format("state-metadata").load(checkpoint).collect():
        reader = spark.read.format("statestore").option("operatorId", store.operatorId)
        if store.operatorName.startswith("transformWithState"):
            from headrace_pipelines.driver.stateful_rows import processor_states  # here, for the same reason

            found += processor_states(spark, plan, store)
            continue
        if "Join" in store.operatorName:  # each side has two stores, which Spark reads as one
            side, _, kind = store.stateStoreName.partition("-")
            if kind != "keyToNumValues":
                continue
            reader = reader.option("joinSide", side)
        else:
            reader = reader.option("storeName", store.stateStoreName)
        rows = reader.load(checkpoint)
        lines = rows.select("key", "value").limit(plan.task.limit).toJSON().collect()
        shown = [json.loads(str(line)) for line in lines]
        about = {"operator": store.operatorName, "store": store.stateStoreName, "partitions": store.numPartitions}
        found.append({**about, "batch": store.maxBatchId, "rows": rows.count(), "shown": shown})
    return {"stores": found}


def state_of(analyzed: Any, flow: FlowSpec) -> Iterator[dict[str, Any]]:
    """Yield what a flow keeps between micro-batches: the operator, its keys, and whether a watermark bounds them."""
    name, below = analyzed.nodeName(), _sequence(analyzed.children())
    for child in below:
        yield from state_of(child, flow)
    streams = name in _KEY_METHODS and analyzed.isStreaming() and all(child.isStreaming() for child in below)
    if name.startswith(_PROCESSOR) and flow.processor:
        ends = "until the processor deletes it"
        yield {"keeps": f"state of {flow.processor}", "keys": [flow.key], "bounded": True, "ends": ends}
    elif "WithState" in name:
        yield {"keeps": name, "keys": [], "bounded": True}
    elif streams:
        keys = (
            _sequence(getattr(analyzed, _KEY_METHODS[name])())
            if _KEY_METHODS[name]
            else _sequence(analyzed.condition().toList())
        )
        used = [each for key in keys for each in _sequence(key.references().toSeq())]
        marked = [each for each in used if each.metadata().contains("spark.watermarkDelayMs")]
        bounded = all(any(child.outputSet().contains(each) for each in marked) for child in below)
        if name != "Join":
            bounded = not keys or (bool(marked) and flow.sink.mode != "complete")
        yield {"keeps": name.lower(), "keys": [key.sql().replace("`", "") for key in keys], "bounded": bounded}


class _PlanWalk:
    """Collects streaming sources and stateful operators of a plan of Spark, in its order."""

    def __init__(self, plan: DriverPlan) -> None:
        self._known = plan.spec.sources
        self.sources: list[str] = []
        self.operators: list[str] = []

    def visit(self, node: Any, alias: str) -> bool:
        """Collect what is at and below a node. Returns whether it streams."""
        name, children, at = str(node.nodeName()), _sequence(node.children()), len(self.operators)
        source = str(node.alias()) if name == "SubqueryAlias" else ""
        source = source.removesuffix(CORRUPT_RECORDS).removesuffix(f" {RAW}")
        alias = source if source in self._known else alias
        if not children and node.isStreaming():
            self.sources.append(self._known[alias].described if alias in self._known else "another stream")
            return True
        streams = [self.visit(child, alias) for child in children]
        if any(streams) and name == "Aggregate":
            keys = [_key(each, node) for each in _sequence(node.groupingExpressions())]
            found = dict.fromkeys(text for each in _sequence(node.aggregateExpressions()) for text in _aggregates(each))
            self.operators.insert(at, f"aggregate by {', '.join(keys) or 'nothing'} of {', '.join(found)}")
        elif (name == "Join" and sum(streams) > 1) or (any(streams) and name.startswith(_STATEFUL)):
            columns = f" {[_text(each) for each in _sequence(node.output())]}" if name == "Distinct" else ""
            self.operators.insert(at, _ID.sub("", node.simpleString(_MOST_FIELDS)) + columns)
        return any(streams)


def _aggregates(expression: Any) -> Iterator[str]:
    if expression.getClass().getSimpleName() == "AggregateExpression":
        yield _text(expression)
    else:
        for child in _sequence(expression.children()):
            yield from _aggregates(child)


def _key(expression: Any, node: Any) -> str:
    """Return the text of a key; a window's length is in the projection below its aggregate."""
    name = _text(expression)
    while name in _WINDOWS and (below := _sequence(node.children())):
        node = below[0]
        if "named_struct(start" in (text := node.simpleString(_MOST_FIELDS)):
            return f"{name} ({', '.join(dict.fromkeys(_SPAN.findall(_ID.sub('', text))))})"
    return name


def _text(part: Any) -> str:
    return _ID.sub("", part.toString())


def _sequence(found: Any) -> list[Any]:
    return [found.apply(number) for number in range(found.size())]
