"""The graph of a pipeline: which part reads which, the order of the views, and what makes it impossible to run."""

import difflib
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

from headrace.pipelines.spec import PipelineSpec
from headrace.pipelines.sql import tables_read

Path = tuple[str | int, ...]
"""A location in the pipeline file."""


def problems_of(spec: PipelineSpec) -> list[tuple[Path, str]]:
    """Return what makes a pipeline unable to run: path in the file and sentence; empty if nothing does."""
    return [*_clashes(spec), *_unknown(spec)] or [*_view_cycles(spec)] or [*_topic_cycles(spec)]


def ordered_views(spec: PipelineSpec) -> list[str]:
    """Return the names of the views so that each comes after those it reads."""
    edges = {name: tables_read(sql) for name, sql in spec.views.items()}
    return [name for name in TopologicalSorter(edges).static_order() if name in spec.views]


def sources_of(spec: PipelineSpec, flow: str) -> list[str]:
    """Return the sources a flow reads, through views or directly, in order of first use."""
    return [path[1] for path in paths_read(spec, [flow]) if path[0] == "sources"]


def paths_read(spec: PipelineSpec, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the paths of flows, views or sources and of all that they read, in order of first use."""
    waiting = [("flows", name) if name in spec.flows else ("", name) for name in names]
    found: dict[tuple[str, str], None] = {}
    while waiting:
        kind, name = waiting.pop(0)
        path = (kind or ("sources" if name in spec.sources else "views"), name)
        if path not in found:
            found[path] = None
            sql = spec.flows[name].sql if kind else spec.views.get(name, "")
            waiting += [("", table) for table in tables_read(sql)]
    return list(found)


def _clashes(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    for name in spec.views:
        if name in spec.sources:
            yield ("views", name), "has the name of a source: SQL cannot distinguish them, rename one of them"


def _unknown(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    known = [*spec.sources, *spec.views]
    queries: dict[Path, str] = {("views", name): sql for name, sql in spec.views.items()}
    queries |= {("flows", name, "sql"): flow.sql for name, flow in spec.flows.items()}
    for path, sql in queries.items():
        names = tables_read(sql)
        if not names:
            yield path, f"reads no source and no view: write SELECT ... FROM {known[0]}"
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.5)
                hint = f"did you mean {near[0]}?" if near else f"known here are {', '.join(known)}"
                yield path, f"reads {name}, which is neither a source nor a view: {hint}"


def _view_cycles(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    try:
        ordered_views(spec)
    except CycleError as cause:
        circle = list(reversed(cause.args[1]))
        yield ("views", circle[0]), f"reads itself: {' reads '.join(circle)}. Take one of these references out"


def _topic_cycles(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    edges: dict[str, set[str]] = {}
    for name, flow in spec.flows.items():
        edges.setdefault(flow.sink.topic, set()).update(spec.sources[source].topic for source in sources_of(spec, name))
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as cause:
        circle = cause.args[1]
        writer = next(name for name, flow in spec.flows.items() if flow.sink.topic in circle)
        yield (
            ("flows", writer, "sink", "topic"),
            f"goes round for ever: {' feeds '.join(circle)}. Write to a topic that this pipeline does not read",
        )
