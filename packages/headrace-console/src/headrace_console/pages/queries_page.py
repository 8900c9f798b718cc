"""Queries: SQL over tables of topics, with its result as a table and a plot; and the tables with their states."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from nicegui import ui

from headrace_console.actions import Action, confirm
from headrace_console.pages.overview_page import TABLES
from headrace_console.parts import heading, number, points_of
from headrace_console.server_api import ApiProblem
from headrace_console.table import Table, TableColumn
from headrace_console.view import View, page

_MOST_ROWS: Final = 1_000
_MOST_POINTS: Final = 500
_SECONDS: Final = 10.0
_FIRST: Final = "SELECT 1 AS one"
_NUMBER: Final = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|DOUBLE|FLOAT|DECIMAL\(.*\)")
_MISSING: Final = (
    "This process runs no queries: install headrace[queries] where it runs (pip install 'headrace[queries]'), and "
    "name topics as tables in its headrace.yaml. "
)
_LIST: Final = (
    TableColumn("name", "Table"),
    TableColumn("state", "State", "state"),
    TableColumn("topic", "Topic"),
    TableColumn("kind", "Kind"),
    TableColumn("rows", "Rows", "number"),
    TableColumn("bytes", "Bytes", "number"),
    TableColumn("lag", "Lag", "number"),
    TableColumn("corrupt", "Corrupt records", "number"),
    TableColumn("columns", "Columns"),
    TableColumn("why", "Why"),
)


@page("/queries", "Queries", position=90)
async def queries(view: View) -> None:
    """Build the page."""
    sql = ui.textarea("SQL: one SELECT over the tables of this process", value=view.query.get("sql") or _FIRST)
    sql.classes("hr-sql").props("outlined autogrow")
    limit = ui.input("Most rows", value="100").props("dense")
    run = ui.button("Run", color=None).props("outline no-caps").classes("hr-button")
    outcome = ui.label()
    outcome.props["role"] = "status"
    result = ui.element("div")

    async def ask() -> None:
        outcome.set_text("running")
        begun = time.monotonic()
        try:
            rows = min(int(limit.value), _MOST_ROWS)
            found = (await view.send("POST", "/query", {"sql": sql.value, "limit": rows})).body
        except ValueError:
            outcome.set_text(f"the most rows are a whole number, at most {_MOST_ROWS:,}")
            return
        except ApiProblem as problem:
            outcome.set_text((_MISSING if problem.status == 404 else "") + str(problem))
            return
        more = ", and it has more" if found["more"] else ""
        outcome.set_text(f"{number(len(found['rows']))} rows in {time.monotonic() - begun:.2f} s{more}")
        result.clear()
        with result:
            _show_result(found["columns"], found["rows"])

    run.on_click(ask)
    sql.on("keydown.ctrl.enter", ask)
    await _tables(view)


def _show_result(columns: Sequence[Mapping[str, str]], rows: Sequence[Mapping[str, Any]]) -> None:
    numeric = [one["name"] for one in columns if _NUMBER.fullmatch(one["type"])]
    if numeric and len(rows) > 1:
        heading("Plot")
        plot = ui.element("div")

        def draw(name: str) -> None:
            plot.clear()
            with plot:
                _plot(name, [float(row[name]) for row in rows[:_MOST_POINTS] if row[name] is not None])

        if len(numeric) > 1:
            choice = ui.radio(numeric, value=numeric[0], on_change=lambda event: draw(event.value))
            choice.props("inline dense").props["aria-label"] = "Column of the plot"
        draw(numeric[0])
    shown = [
        TableColumn(f"c{index}", one["name"], "number" if one["name"] in numeric else "text")
        for index, one in enumerate(columns)
    ]
    table = Table("Result", shown, empty="no row")
    names = [one["name"] for one in columns]
    table.show(
        {"_key": index, **{f"c{at}": _cell(row[name]) for at, name in enumerate(names)}}
        for index, row in enumerate(rows)
    )


def _plot(name: str, values: Sequence[float]) -> None:
    ends = f"from {min(values):,g} to {max(values):,g}" if values else "without a value"
    label = f"{name}, {ends}, in the order of the rows"
    ui.label(label)
    with ui.element("svg").classes("hr-large-plot") as picture, ui.element("polyline") as line:
        picture.props.update({"viewBox": "0 0 100 24", "role": "img", "preserveAspectRatio": "none"})
        picture.props["aria-label"] = label
        low = min(0.0, *values)
        line.props["points"] = points_of([value - low for value in values])


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def _tables(view: View) -> None:
    missing = ui.label()
    table = Table(
        "Tables",
        _LIST,
        empty="no table is kept by this process",
        buttons={"Rebuild": lambda name: _rebuild(view, name)},
        refusal=view.session.problem_with("admin"),
    )

    def row(one: Mapping[str, Any]) -> dict[str, Any]:
        gap = f"{number(one['gap_offsets'])} offsets are missing: {one['gap']}" if one["gap"] else ""
        return {
            **{name: one[name] for name in ("name", "state", "topic", "kind")},
            **{name: number(one[name]) for name in ("rows", "bytes", "lag", "corrupt")},
            "columns": ", ".join(f"{name} {kind}" for name, kind in one["columns"]),
            "why": "; ".join(filter(None, (one["reason"], gap, one["last_corrupt"]))),
            "_level": "ok" if one["state"] == "live" else "warn",
        }

    def problem(found: ApiProblem) -> None:
        missing.set_text((_MISSING if found.status == 404 else "") + str(found))

    def show(found: Mapping[str, Any]) -> None:
        missing.set_text("")
        table.show(map(row, found["tables"]))

    await view.follow(TABLES, show, seconds=_SECONDS, problem=problem)


def _rebuild(view: View, name: str) -> None:
    confirm(view, Action(f"Rebuild {name}", "POST", f"{TABLES}/{quote(name, safe='')}/rebuild", reason=""))
