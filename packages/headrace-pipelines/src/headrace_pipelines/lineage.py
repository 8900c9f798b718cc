"""The lineage of a pipeline as text and as a graph: topics, sources, views, flows and sinks."""

import itertools
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from html import escape
from typing import Any

from headrace_pipelines.graph import ordered_views, paths_read, reads, sources_of
from headrace_pipelines.sources import KafkaSource, TableSource
from headrace_pipelines.spec import PipelineSpec
from headrace_pipelines.sql import watermarked

_STYLE = "text{font:13px sans-serif}path{fill:none;stroke:#888}.in,.out{fill:#cfe2ff}.sources{fill:#e2e3e5}"
_STYLE += ".views{fill:#fff3cd}.flows{fill:#d1e7dd}.dead{fill:#f8d7da}.late{fill:#ffe5d0}path{marker-end:url(#arrow)}"
_ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<polygon points="0,0 8,4 0,8" fill="#888"/></marker></defs>'
)
_LEGEND = {
    "in": "read",
    "sources": "source",
    "views": "view",
    "flows": "flow",
    "out": "written",
    "dead": "dead letters",
    "late": "late rows",
}
_ENDS = ("out", "dead", "late")
_WIDTH, _HEIGHT, _COLUMN, _LINE = 190, 34, 250, 56
_SHOWN = 26
_ENTRY = 110
Node = tuple[str, str]
"""A box: its kind (one of the legend) and its name."""


def as_text(spec: PipelineSpec, parts: Mapping[str, Any], checkpoints: Mapping[str, str]) -> str:
    """Return each part with what it reads, its columns and its state, and each flow with its sink, guarantee and
    checkpoint."""
    lines: list[str] = []
    for (kind, name), read in edges_of(spec).items():
        if part := parts.get(f"{kind}.{name}"):
            line = f"{kind[:-1]} {name} <- {', '.join(each for _, each in read)}"
            if kind == "flows":
                flow = spec.flows[name]
                line += f" -> {flow.sink.title} ({flow.sink.mode}, {flow.sink.guarantee})"
            lines += [line, "  " + ", ".join(f"{column} {of}" for column, of in part["columns"].items())]
            if kind == "flows":
                lines += _state(spec, name, parts)
                lines += [f"  checkpoint: {checkpoints[name]}"] if name in checkpoints else []
    return "\n".join(lines)


def _state(spec: PipelineSpec, flow: str, parts: Mapping[str, Any]) -> Iterator[str]:
    for kept in parts[f"flows.{flow}"].get("state", ()):
        keys, ends = ", ".join(kept["keys"]), kept.get("ends", "until the watermark has passed a key")
        if not kept["bounded"]:
            ends = "unbounded, because no watermark lets Spark drop old keys"
        yield f"  keeps {kept['keeps']} by {keys}: {ends}" if keys else f"  keeps {kept['keeps']}: one entry"
        if keys and not kept["bounded"]:
            yield f"    to bound it, {_how_to_bound(spec, flow, kept['keeps'], parts)}"


def _how_to_bound(spec: PipelineSpec, flow: str, keeps: str, parts: Mapping[str, Any]) -> str:
    """Return the SQL that lets Spark drop old keys: watermarks, and times among the keys."""
    times: dict[str, str] = {}
    for source in sources_of(spec, flow):
        columns = parts.get(f"sources.{source}", {"columns": {}})["columns"]
        if not isinstance(spec.sources[source], TableSource):
            of_time = [name for name, of in columns.items() if of.startswith("timestamp")]
            if of_time:
                times[source] = of_time[0]
    if not times:
        return "give its sources a column of type TIMESTAMP for a WATERMARK"
    if spec.flows[flow].sink.mode == "complete":
        return "write sink.mode: update or append: complete keeps every key"
    paths = paths_read(spec, [flow])
    queries = [spec.flows[name] if kind == "flows" else spec.views[name] for kind, name in paths if kind != "sources"]
    marked = {table for query in queries for table in watermarked(query.sql or "")}
    missing = [f"`WATERMARK {at} DELAY OF INTERVAL 10 MINUTES` behind {name}" for name, at in times.items()
               if name not in marked]  # fmt: skip
    first, *others = times.items()
    added = f"add {', '.join(missing)}, and " if missing else ""
    if keeps == "join" and others:
        (one, at), (other, time) = first, others[0]
        return f"{added}compare their times in ON: `{other}.{time} BETWEEN {one}.{at} AND {one}.{at} + INTERVAL 1 HOUR`"
    if keeps == "aggregate":
        return f"{added}group by window({first[1]}, '1 hour') too"
    return f"{added}select {first[1]} too"


def edges_of(spec: PipelineSpec) -> dict[Node, list[Node]]:
    """Return each node with the nodes that it reads, those that are read first."""
    edges: dict[Node, list[Node]] = {}
    for name, source in spec.sources.items():
        edges["in", source.title] = []
        edges["sources", name] = [("in", source.title)]
        if isinstance(source, KafkaSource) and source.corrupt == "quarantine":
            edges.setdefault(("dead", f"topic {source.dead_letters}"), []).append(("sources", name))
    edges |= {("views", name): reads(spec, ("views", name)) for name in ordered_views(spec)}
    for name, flow in spec.flows.items():
        edges["flows", name] = reads(spec, ("flows", name))
        ends = {"out": flow.sink.title}
        if flow.dead_letters:
            ends["dead"] = f"topic {flow.dead_letters}"
        if flow.late_rows:
            ends["late"] = f"topic {flow.late_rows.topic}"
        for end in ends.items():
            edges.setdefault(end, []).append(("flows", name))
    return edges


def lineage_graph(spec: PipelineSpec, *, page: bool = False) -> str:
    """Return the lineage graph as SVG, or as an HTML page; its columns run from what is read to what is written."""
    edges = edges_of(spec)
    column: dict[Node, int] = {}
    for node in TopologicalSorter(edges).static_order():
        column[node] = max((column[one] + 1 for one in edges[node]), default=0)
    last = max(column.values())
    read = {one for ones in edges.values() for one in ones}
    column |= {node: last for node in edges if node[0] in _ENDS and node not in read}
    row: dict[Node, int] = {}
    for node in sorted(edges, key=lambda each: column[each]):  # as near as possible to the boxes that it reads
        taken = {row[each] for each in row if column[each] == column[node]}
        nearest = itertools.count(min((row[one] for one in edges[node]), default=0))
        row[node] = next(at for at in nearest if at not in taken)
    at = {node: (20 + column[node] * _COLUMN, 20 + row[node] * _LINE) for node in edges}
    shapes = [_line(*at[one], *at[node]) for node in edges for one in edges[node]]
    shapes += [_box(node, *at[node]) for node in edges]
    below = (max(row.values()) + 1) * _LINE + 20
    shapes += _legend({kind for kind, _ in edges}, below)
    size = f'width="{max(last * _COLUMN + _WIDTH + 40, len(_LEGEND) * _ENTRY + 20)}" height="{below + 30}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>\n{_ARROW}\n'
    drawn, title = head + "\n".join(shapes) + "\n</svg>\n", escape(spec.name)
    return f"<!doctype html>\n<title>{title}</title>\n<h1>{title}</h1>\n{drawn}" if page else drawn


def _box(node: Node, x: int, y: int) -> str:
    kind, name = node
    shown = escape(name if len(name) <= _SHOWN else f"{name[: _SHOWN - 1]}…")
    box = f'<rect class="{kind}" x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
    return f'<g><title>{escape(name)}</title>{box}<text x="{x + 8}" y="{y + 22}">{shown}</text></g>'


def _legend(kinds: set[str], y: int) -> list[str]:
    """Return an entry for each kind of box that is there: its colour, and what it is."""
    entries = enumerate((kind, text) for kind, text in _LEGEND.items() if kind in kinds)
    return [
        f'<g class="legend"><rect class="{kind}" x="{20 + n * _ENTRY}" y="{y}" width="14" height="14"/>'
        f'<text x="{40 + n * _ENTRY}" y="{y + 12}">{text}</text></g>'
        for n, (kind, text) in entries
    ]


def _line(x: int, y: int, to_x: int, to_y: int) -> str:
    x, y, to_y = x + _WIDTH, y + _HEIGHT // 2, to_y + _HEIGHT // 2
    return f'<path d="M{x} {y}C{x + 30} {y} {to_x - 30} {to_y} {to_x} {to_y}"/>'
