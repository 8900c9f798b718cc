"""The graph of a pipeline: which part reads which, the order of the views, and what prevents it from running."""

import os
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from headrace.config.format_list import SCHEMA_TYPES, STRINGS
from headrace.config.spelling import hint
from headrace.errors import EnvironmentProblem
from headrace_pipelines.sinks.sink import FlowFacts
from headrace_pipelines.sources import CORRUPT_FLOW, CORRUPT_RECORDS, KafkaSource, TableSource
from headrace_pipelines.spec import FlowSpec, PipelineSpec, QuerySpec
from headrace_pipelines.sql import tables_read, with_views

_AGAIN = "would come again forever: name another topic"
_NO_BATCHES = "gets each micro-batch in the driver, and with driver.remote micro-batches stay on the server"
Path = tuple[str | int, ...]
"""A location in the pipeline file."""


def problems_of(spec: PipelineSpec) -> list[tuple[Path, str]]:
    """Return what prevents a pipeline from running: path in the file and sentence; empty if nothing does."""
    found = [*_clashes(spec), *_unknown(spec), *_impossible(spec)]
    return found or [*_view_cycles(spec)] or [*_topic_cycles(spec)]


def read_by(query: QuerySpec) -> list[str]:
    """Return the names of what a query reads, in order of first use."""
    initial = getattr(query, "initial", None)
    return tables_read(query.sql) if query.sql else [*query.reads, *([initial] if initial else [])]


def ordered_views(spec: PipelineSpec) -> list[str]:
    """Return the names of the views so that each comes after those it reads."""
    edges = {name: read_by(view) for name, view in spec.views.items()}
    return [name for name in TopologicalSorter(edges).static_order() if name in spec.views]


def sources_of(spec: PipelineSpec, flow: str) -> list[str]:
    """Return the sources a flow reads, through views or directly, in order of first use."""
    return [path[1] for path in paths_read(spec, [flow]) if path[0] == "sources"]


def paths_read(spec: PipelineSpec, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the paths of flows, views or sources and of all that they read, in order of first use."""
    waiting = [("flows", name) if name in spec.running else _path(spec, name) for name in names]
    found: dict[tuple[str, str], None] = {}
    while waiting:
        path = waiting.pop(0)
        if path not in found:
            found[path] = None
            waiting += reads(spec, path)
    return list(found)


def reads(spec: PipelineSpec, path: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the paths that a flow or view reads itself; a source reads none."""
    kind, name = path
    query = spec.running[name] if kind == "flows" else spec.views.get(name) if kind == "views" else None
    return [_path(spec, table) for table in (read_by(query) if query else ())]


def _path(spec: PipelineSpec, table: str) -> tuple[str, str]:
    if table not in spec.views and table not in spec.sources:
        table = table.removesuffix(CORRUPT_RECORDS)
    return ("sources" if table in spec.sources else "views", table)


def resolved_sql(spec: PipelineSpec, flow: str) -> str:
    """Return the SQL of a flow with the views that it reads in it; a comment for a Python function."""
    read = {name for kind, name in paths_read(spec, [flow]) if kind == "views"}
    views = {name: spec.views[name] for name in ordered_views(spec) if name in read}
    notes = [f"-- {name}: {each.python} of {', '.join(each.reads)}\n" for name, each in views.items() if each.python]
    query = spec.flows[flow]
    sql = query.sql or f"-- {query.python or query.handler or query.processor} of {', '.join(query.reads)}"
    return "".join(notes) + with_views(sql, {name: each.sql for name, each in views.items() if each.sql})


def topics_read(spec: PipelineSpec, flow: str) -> list[str]:
    """Return the topics a flow reads, in order of first use."""
    return [topic for source in sources_of(spec, flow) for topic in spec.sources[source].topics]


def topics_written(spec: PipelineSpec) -> dict[str, str]:
    """Return the topics that flows write to, dead letter topics too, each with the first topic that its flow reads."""
    found: dict[str, str] = {}
    for name, flow in spec.running.items():
        late = flow.late_rows.topic if flow.late_rows else None
        for topic in filter(None, (*flow.sink.topics, flow.dead_letters, late)):
            found.setdefault(topic, next(iter(topics_read(spec, name)), ""))
    return found


def require_cores(spec: PipelineSpec, partitions: Mapping[str, int]) -> None:
    """Raise EnvironmentProblem unless real-time mode has a core for each partition: Spark never reads the others."""
    if not spec.trigger.realtime:
        return
    needed = sum(partitions[topic] for flow in spec.running for topic in topics_read(spec, flow))
    cores = spec.driver.cores or os.cpu_count() or 1
    if needed > cores:
        raise EnvironmentProblem(
            f"Real-time mode needs a core for each partition that a flow reads: {needed}, and there are "
            f"{cores}. Use trigger.interval_seconds instead of trigger.realtime, or driver.cores on a larger machine"
        )


def _queries(spec: PipelineSpec) -> dict[Path, QuerySpec]:
    views: dict[Path, QuerySpec] = {("views", name): view for name, view in spec.views.items()}
    return views | {("flows", name, "sql" if flow.sql else "reads"): flow for name, flow in spec.flows.items()}


def _clashes(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    for name in spec.views:
        if name in spec.sources:
            yield ("views", name), "has the name of a source: SQL cannot distinguish them, rename one of them"
        elif name.removesuffix(CORRUPT_RECORDS) in spec.sources:
            yield ("views", name), "has the name of the corrupt records of a source: rename it"
    for source in spec.sources:
        if (name := source + CORRUPT_FLOW) in spec.flows and spec.running[name] is not spec.flows[name]:
            yield ("flows", name), "has the name of the flow that writes the corrupt records of a source: rename it"


def _unknown(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    corrupt = [name + CORRUPT_RECORDS for name, source in spec.sources.items() if isinstance(source, KafkaSource)]
    known = [*spec.sources, *spec.views, *corrupt]
    for path, query in _queries(spec).items():
        names = read_by(query)
        if not names:
            yield path, f"reads no source and no view: write SELECT ... FROM {known[0]}"
        for name in names:
            if name not in known:
                yield path, f"reads {name}, which is neither a source nor a view: {hint(name, known)}"


def _impossible(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    if "task" in spec.transactions and str(spec.driver.settings.get("spark.speculation")).lower() == "true":
        yield (
            ("driver", "settings"),
            "spark.speculation does not work with scope: task, as two attempts of a task fence each other: remove it",
        )
    if spec.trigger.realtime and spec.transactions and spec.driver.on_cluster and not spec.driver.remote:
        text = "a cluster runs real-time mode at least once: remove driver.master, or delivery: exactly_once"
        yield ("driver", "master"), text
    for name, source in spec.sources.items():
        needs_schema = isinstance(source, KafkaSource) and (source.change or source.value_format == "json")
        if isinstance(source, KafkaSource) and needs_schema and not source.value_schema:
            whose = "change: debezium needs the columns of the table" if source.change else "JSON values need it"
            yield ("sources", name, "schema"), f"is missing: {whose}, such as `id INT, name STRING`"
        if isinstance(source, KafkaSource) and source.change and source.value_format in STRINGS:
            yield ("sources", name, "value_format"), "change: debezium reads json and formats of the registry: use one"
        plain = isinstance(source, KafkaSource) and source.value_format not in SCHEMA_TYPES
        if spec.trigger.realtime and not plain and not isinstance(source, TableSource):
            what = "real-time mode reads topics with json, string or binary values, and tables"
            yield ("sources", name), f"{what}: use trigger.interval_seconds"
        if isinstance(source, KafkaSource) and source.corrupt == "quarantine" and source.dead_letters == source.topic:
            yield ("sources", name, "dead_letter_topic"), f"is what the source reads, so corrupt records {_AGAIN}"
    yield from _not_over_connect(spec) if spec.driver.remote else ()
    for name, flow in spec.flows.items():
        if flow.quarantines and not flow.sink.topics:
            yield ("flows", name, "rules"), "quarantine needs a sink with a topic: use drop or fail here"
        late = flow.late_rows.topic if flow.late_rows else None
        if {flow.dead_letters, late} & {*topics_read(spec, name)}:
            yield ("flows", name), f"writes dead letters or late rows to a topic that it reads, so they {_AGAIN}"
        if flow.late_rows:
            yield from (((*("flows", name), "late_rows"), text) for text in _not_with_late_rows(spec, name, flow))
        facts = FlowFacts(by_handler=bool(flow.handler), realtime=spec.trigger.realtime)
        yield from ((("flows", name, "sink"), text) for text in flow.sink.problems(facts))
        if flow.handler and (flow.rules or flow.late_rows):
            text = "writes records, which have no columns for rules and late_rows: put them into another flow"
            yield ("flows", name, "handler"), text
        yield from (((*("flows", name), key), text) for key, text in _not_for_processors(spec, flow))
        if spec.trigger.realtime:
            yield from (((*("flows", name), key), text) for key, text in _not_in_real_time(flow))


def _not_over_connect(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    driver, handlers = spec.driver, [name for name, flow in spec.flows.items() if flow.handler]
    for name in driver.model_fields_set & {"master", "heap_bytes", "cores"}:
        yield ("driver", name), "is for a driver with a JVM, and driver.remote is a server that has one: remove it"
    for name in driver.settings:
        if not name.startswith("spark.sql."):
            yield ("driver", "settings", name), "is not a setting of a session: set it on the server of driver.remote"
    if spec.trigger.realtime:
        yield ("trigger", "realtime"), "needs the number of cores, which driver.remote hides: use driver.master"
    for name, flow in spec.flows.items():
        if flow.sink.in_driver:
            yield ("flows", name, "sink"), f"{_NO_BATCHES}: use driver.master, or a sink with delivery: at_least_once"
        if flow.late_rows:
            yield (
                ("flows", name, "late_rows"),
                "needs a second session, which driver.remote does not have: use driver.master",
            )
        if flow.handler and name != handlers[0]:
            text = "would run in one Python process with that of another flow, because of driver.remote"
            yield ("flows", name, "handler"), f"{text}: put it into another pipeline"


def _not_with_late_rows(spec: PipelineSpec, name: str, flow: FlowSpec) -> Iterator[str]:
    assert flow.late_rows
    if flow.late_rows.source not in sources_of(spec, name):
        yield f"the flow does not read a source {flow.late_rows.source}: correct late_rows.source"
    if not flow.sink.topics:
        yield "late rows need a sink with a topic: remove late_rows, or write to a topic"
    if flow.sink.mode == "complete" or spec.trigger.realtime:
        yield "late_rows does not work with mode: complete or with real-time mode: remove it"


def _not_for_processors(spec: PipelineSpec, flow: FlowSpec) -> Iterator[tuple[str, str]]:
    if not flow.processor:
        for name in ("key", "initial"):
            if getattr(flow, name):
                yield name, "is for a processor: remove it, or write processor"
        return
    if not flow.key:
        yield "processor", "needs key, the column whose values each have their own state: add key"
    if flow.rules:
        yield "rules", "cannot check the rows of a processor: let it check them, or read its topic by another flow"
    if flow.late_rows:
        yield "late_rows", "does not work with a processor: remove it, and read a view with a WATERMARK"
    if flow.sink.mode == "complete":
        yield "sink", "a processor writes the rows that it yields: use mode: update or append"
    if flow.on_error == "dead_letter" and not flow.sink.topics:
        yield "on_error", "dead_letter needs a sink with a topic: use drop or fail here"
    if spec.driver.remote:
        yield "processor", "does not work with driver.remote: use driver.master, or no cluster"
    if flow.initial and (streams := _streams(spec, flow.initial)):
        yield "initial", f"reads the stream {streams[0]}, and must end: name a source with table, or a view of tables"


def _streams(spec: PipelineSpec, table: str) -> list[str]:
    """Return the sources that a source or view reads and that do not end."""
    waiting, found = [_path(spec, table)], []
    while waiting:
        kind, name = waiting.pop()
        if kind == "sources" and not isinstance(spec.sources[name], TableSource):
            found.append(name)
        waiting += [path for path in reads(spec, (kind, name)) if path[1] in (*spec.sources, *spec.views)]
    return found


def _not_in_real_time(flow: FlowSpec) -> Iterator[tuple[str, str]]:
    for name in ("processor", "python"):
        if getattr(flow, name):
            yield name, "real-time mode runs SQL only: use trigger.interval_seconds"


def _view_cycles(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    try:
        ordered_views(spec)
    except CycleError as cause:
        circle = list(reversed(cause.args[1]))
        yield ("views", circle[0]), f"reads itself: {' reads '.join(circle)}. Take one of these references out"


def _topic_cycles(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    edges: dict[str, set[str]] = {}
    for name, flow in spec.flows.items():
        for topic in flow.sink.topics:
            edges.setdefault(topic, set()).update(topics_read(spec, name))
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as cause:
        circle = cause.args[1]
        writer = next(name for name, flow in spec.flows.items() if set(flow.sink.topics) & {*circle})
        yield (
            ("flows", writer, "sink", "topic"),
            f"is part of a loop: {' feeds '.join(circle)}. Write to a topic that this pipeline does not read",
        )
