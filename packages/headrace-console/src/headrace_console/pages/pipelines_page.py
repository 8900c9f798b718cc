"""Pipelines: which topics lead where, each flow with its progress, state, lag and bad rows, and what stops a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from nicegui import ui

from headrace_console.actions import Action, action_row
from headrace_console.lineage_graph import GraphNode, LineageGraph
from headrace_console.pages.groups_page import GROUPS
from headrace_console.pages.overview_page import CONSUMERS, PIPELINES, TABLES
from headrace_console.parts import Level, badge, change_badge, heading, number, path_of, points_of
from headrace_console.server_api import ApiProblem
from headrace_console.table import Table, TableColumn
from headrace_console.view import View, page

_SECONDS: Final = 10.0
_LEVELS: Final[Mapping[str, Level]] = {"failed": "bad", "running": "ok", "finished": "ok"}
_LIST: Final = (
    TableColumn("name", "Pipeline"),
    TableColumn("state", "State", "state"),
    TableColumn("flows", "Flows", "number"),
    TableColumn("lag", "Lag", "number"),
    TableColumn("bad", "Bad rows", "number"),
    TableColumn("restarts", "Restarts", "number"),
    TableColumn("why", "Why"),
)
_FLOWS: Final = (
    TableColumn("name", "Flow"),
    TableColumn("state", "State", "state"),
    TableColumn("rate", "Records/s", "number"),
    TableColumn("rates", "Rate", "plot"),
    TableColumn("lag", "Lag", "number"),
    TableColumn("lags", "Lag over time", "plot"),
    TableColumn("input", "Records read", "number"),
    TableColumn("batch", "Micro-batch"),
    TableColumn("kept", "State kept"),
    TableColumn("watermark", "Watermark"),
    TableColumn("bad", "Bad rows"),
    TableColumn("error", "Last error"),
)
_READERS: Final = ("reactive", "function", "table", "flow")
Edges = list[tuple[GraphNode, GraphNode]]


@page("/pipelines", "Pipelines", position=70)
async def pipelines(view: View) -> None:
    """Build the list, and the graph of everything that this process runs."""
    table = Table("Pipelines", _LIST, empty="no pipeline runs in this process")

    def row(one: Mapping[str, Any]) -> dict[str, Any]:
        flows = [*one["flows"].values()]
        return {
            "name": one["name"],
            "state": one["state"],
            "flows": number(len(flows)),
            "lag": number(sum(flow.get("lagRecords") or 0 for flow in flows)),
            "bad": number(sum(sum(_bad(flow).values()) for flow in flows)),
            "restarts": number(one["restarts"]),
            "why": one["reason"],
            "_level": _LEVELS.get(one["state"], "warn"),
            "_link": path_of("/pipeline", name=one["name"]),
        }

    lineage = _Lineage()

    def show(found: Mapping[str, Any]) -> None:
        table.show(map(row, found["pipelines"]))

    await view.follow(PIPELINES, show)
    heading("Lineage")
    ui.label("From topics to what reads them in this process, and where it delivers.")
    lineage.graph = LineageGraph("Lineage of this process")
    await view.follow(CONSUMERS, lineage.consumers, optional=True)
    await view.follow(TABLES, lineage.tables, optional=True)
    await _flow_topics(view, lineage)


@page("/pipeline", "Pipeline")
async def pipeline(view: View) -> None:
    """Build the page of the pipeline in `name`."""
    name = view.query.get("name", "")
    path = f"{PIPELINES}/{quote(name, safe='')}"
    heading(name)
    state, facts = badge("", "ok"), ui.label()
    verbs = ("Pause", "Resume", "Stop")
    action_row(view, {verb: Action(f"{verb} {name}", "POST", f"{path}/{verb.lower()}", reason="") for verb in verbs})
    flows = Table("Flows", _FLOWS, empty="it has no flow")

    def show(found: Mapping[str, Any]) -> None:
        change_badge(state, found["state"], _LEVELS.get(found["state"], "warn"))
        driver = f"driver process {found['driverPid']}" if found["driverPid"] else "no driver process"
        facts.set_text(f"{driver}, {found['restarts']} restarts. {found['reason']}")
        flows.show(_flow(view, name, flow, one) for flow, one in found["flows"].items())

    await view.follow(path, show)
    heading("Lineage")
    lineage = _Lineage()
    lineage.graph = LineageGraph(f"Lineage of {name}")
    await _flow_topics(view, lineage, name)


class _Lineage:
    """The graph, by parts that arrive one after the other."""

    graph: LineageGraph

    def __init__(self) -> None:
        self._parts: dict[str, Edges] = {}

    def consumers(self, found: Mapping[str, Any]) -> None:
        """Take consumers and functions, from topic to destination."""
        edges: Edges = []
        for one in found["consumers"]:
            this = one["kind"], one["name"]
            edges += [(("topic", topic), this) for topic in one["topics"]]
            edges.append((this, ("destination", one["destination"])))
        self.put("consumers", edges)

    def tables(self, found: Mapping[str, Any]) -> None:
        """Take tables, each from its topic."""
        self.put("tables", [(("topic", one["topic"]), ("table", one["name"])) for one in found["tables"]])

    def put(self, part: str, edges: Edges) -> None:
        """Replace a part and draw."""
        self._parts[part] = edges
        shown = [edge for each in self._parts.values() for edge in each]
        starts = [one for one, _ in shown if one[0] == "topic"]
        ends = [other for _, other in shown if other[0] not in _READERS and other not in starts]
        middle = [node for edge in shown for node in edge if node not in starts and node not in ends]
        self.graph.show((starts, middle, ends), shown)


async def _flow_topics(view: View, lineage: _Lineage, only: str = "") -> None:
    """Add the flows of pipelines: their groups have offsets of the topics that they read."""
    try:
        found = (await view.get(PIPELINES))["pipelines"]
    except ApiProblem:
        return
    for one in found:
        for flow, status in one["flows"].items():
            if status.get("group") and only in ("", one["name"]):
                await _flow_of(view, lineage, f"{one['name']}.{flow}", status)


async def _flow_of(view: View, lineage: _Lineage, name: str, status: Mapping[str, Any]) -> None:
    this = "flow", name
    kind, _, sink = status["sink"].partition(" ")
    written: Edges = [(this, ("topic", sink) if kind == "topic" else ("sink", status["sink"]))]

    def show(found: Mapping[str, Any]) -> None:
        topics = dict.fromkeys(one["topic"] for one in found["offsets"])
        lineage.put(f"flow {name}", [*((("topic", topic), this) for topic in topics), *written])

    lineage.put(f"flow {name}", [*written])
    await view.follow(f"{GROUPS}/{quote(status['group'], safe='')}", show, seconds=_SECONDS, optional=True)


def _bad(flow: Mapping[str, Any]) -> dict[str, int]:
    """Return the rows of a flow that did not reach its sink, by reason."""
    named = {"corrupt": "corruptRecords", "late": "lateRecords", "dropped": "droppedRows"}
    found = {name: flow.get(field) or 0 for name, field in named.items()}
    return found | {f"rule {rule}": rows for rule, rows in (flow.get("brokenRules") or {}).items()}


def _flow(view: View, pipeline: str, name: str, one: Mapping[str, Any]) -> dict[str, Any]:
    series = f"flow {pipeline}.{name}"
    view.history.add(f"rate of {series}", one.get("recordsPerSecond") or 0.0)
    view.history.add(f"lag of {series}", one.get("lagRecords") or 0)
    batch, seconds = one.get("batchId", -1), one.get("batchSeconds")
    rows, size = one.get("stateRows"), one.get("stateBytes")
    return {
        "name": name,
        "state": one.get("state", "starting"),
        "rate": number(one.get("recordsPerSecond", 0.0)),
        "rates": points_of(view.history.values(f"rate of {series}")),
        "lag": number(one.get("lagRecords")),
        "lags": points_of(view.history.values(f"lag of {series}")),
        "input": number(one.get("inputRecords", 0)),
        "batch": "-" if batch < 0 else f"{batch}" + (f", {seconds:.1f} s" if seconds is not None else ""),
        "kept": "-" if rows is None else f"{number(rows)} rows, {number(size)} bytes",
        "watermark": one.get("watermark") or "-",
        "bad": ", ".join(f"{number(count)} {why}" for why, count in _bad(one).items() if count) or "0",
        "error": one.get("lastError", ""),
        "_level": _LEVELS.get(one.get("state", "starting"), "warn"),
    }
