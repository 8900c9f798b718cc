"""Overview: what runs, how fast, how far behind, and what needs a person now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from nicegui import ui

from headrace.client.attention import Need, kafka_outage, needs_of
from headrace_console.actions import Action, confirm
from headrace_console.feeds import History
from headrace_console.frame import READINESS
from headrace_console.pages.dead_letters_page import DEAD_LETTER_SECONDS, DEAD_LETTERS, run_action
from headrace_console.parts import Level, badge, change_badge, number, path_of, points_of
from headrace_console.table import Table, TableColumn
from headrace_console.view import View, page

CONSUMERS: Final = "/adm/reactive-consumers"
PIPELINES: Final = "/adm/pipelines"
TABLES: Final = "/tables"
CONTROL: Final = ("admin", "consumers:w")


LIST_COLUMNS: Final = (
    TableColumn("name", "Name"),
    TableColumn("state", "State", "state"),
    TableColumn("rate", "Records/s", "number"),
    TableColumn("rates", "Rate", "plot"),
    TableColumn("lag", "Lag", "number"),
    TableColumn("lags", "Lag over time", "plot"),
    TableColumn("flight", "In flight", "number"),
    TableColumn("why", "Why"),
)


Report = Callable[[str, Mapping[str, Any]], None]
"""Takes the new response of a part of `PARTS`."""
_PAGES: Final = {
    "consumer": "/consumer",
    "function": "/consumer",
    "pipeline": "/pipeline",
    "topic": "/dead-letter-topic",
}
"""The page of one of each kind."""


@page("/", "Overview", position=10)
async def overview(view: View) -> None:
    """Build the page."""
    parts: dict[str, Mapping[str, Any]] = {}
    needs: dict[str, Need] = {}
    kafka = badge("", "ok")
    attention = Table(
        "Needs a person now",
        [TableColumn("what", "What"), TableColumn("why", "Why")],
        empty="nothing",
        buttons={button: partial(_help, view, needs, button) for button in ("Resume", "Pause", "Redrive")},
        refusal=view.session.problem_with(*CONTROL),
    )

    def report(part: str, response: Mapping[str, Any]) -> None:
        parts[part] = response
        needs.clear()
        needs.update({need.about: need for need in needs_of(parts)})
        attention.show(map(_attention_row, needs.values()))

    def services(response: Mapping[str, Any]) -> None:
        report("readiness", response)
        reason = kafka_outage(parts)
        text = f"Kafka does not respond: {reason}" if reason else "Kafka responds"
        change_badge(kafka, text, "bad" if reason else "ok")

    await view.follow(READINESS, services)
    await _consumers(view, report)
    await _pipelines(view, report)
    await _tables(view, report)
    ui.timer(0.1, lambda: _dead_letters(view, report), once=True)  # counting takes Kafka longer than the rest


async def _consumers(view: View, report: Report) -> None:
    table = Table("Consumers and functions", LIST_COLUMNS, empty="no consumer and no function runs in this process")

    def show(found: Mapping[str, Any]) -> None:
        table.show(row_of(one, view.history) for one in found["consumers"])
        report("consumers", found)

    await view.follow(CONSUMERS, show)


async def _pipelines(view: View, report: Report) -> None:
    columns = [
        TableColumn("name", "Pipeline"),
        TableColumn("state", "State", "state"),
        TableColumn("rate", "Records/s", "number"),
    ]
    columns += [TableColumn("rates", "Rate", "plot"), TableColumn("lag", "Lag", "number"), TableColumn("why", "Why")]
    table = Table("Pipelines", columns, empty="no pipeline runs in this process")

    def row(one: Mapping[str, Any]) -> dict[str, Any]:
        name, flows = one["name"], one["flows"].values()
        rate = sum(flow.get("recordsPerSecond") or 0.0 for flow in flows)
        view.history.add(f"rate of pipeline {name}", rate)
        return {
            "name": name,
            "state": one["state"],
            "rate": number(rate),
            "rates": points_of(view.history.values(f"rate of pipeline {name}")),
            "lag": number(sum(flow.get("lagRecords") or 0 for flow in flows)),
            "why": one["reason"],
            "_level": {"failed": "bad", "running": "ok", "finished": "ok"}.get(one["state"], "warn"),
        }

    def show(found: Mapping[str, Any]) -> None:
        table.show(map(row, found["pipelines"]))
        report("pipelines", found)

    await view.follow(PIPELINES, show, optional=True)


async def _tables(view: View, report: Report) -> None:
    columns = [
        TableColumn("name", "Table"),
        TableColumn("state", "State", "state"),
        TableColumn("rows", "Rows", "number"),
    ]
    columns += [TableColumn("lag", "Lag", "number"), TableColumn("why", "Why")]
    table = Table("Tables", columns, empty="no table is kept by this process")

    def show(found: Mapping[str, Any]) -> None:
        rows = [
            {
                "name": one["name"],
                "state": one["state"],
                "rows": number(one.get("rows")),
                "lag": number(one.get("lag")),
                "why": one.get("reason") or "",
                "_level": "ok" if one["state"] == "live" else "warn",
            }
            for one in found["tables"]
        ]
        table.show(rows)
        report("tables", found)

    await view.follow(TABLES, show, optional=True)


async def _dead_letters(view: View, report: Report) -> None:
    def show(found: Mapping[str, Any]) -> None:
        report("dead_letters", found)

    await view.follow(DEAD_LETTERS, show, seconds=DEAD_LETTER_SECONDS, optional=True)


def state_of(one: Mapping[str, Any]) -> tuple[str, Level]:
    """Return the state of a consumer in a word, and its level."""
    if one["kafka"]:
        return "no Kafka", "bad"
    if one["paused"]:
        return "paused", "warn"
    if one["breaker"]["state"] != "closed":
        return f"breaker {one['breaker']['state']}", "bad"
    return ("waits", "warn") if one["why"] else ("runs", "ok")


def row_of(one: Mapping[str, Any], history: History) -> dict[str, Any]:
    """Return the row of a consumer, and keep its lag and count for its plots."""
    name = one["name"]
    history.add(f"ended {name}", sum(one["counts"].values()))
    history.add(f"lag {name}", one["lag"] or 0)
    rates = history.rates(f"ended {name}")
    state, level = state_of(one)
    return {
        "name": name,
        "state": state,
        "rate": number(rates[-1] if rates else None),
        "rates": points_of(rates),
        "lag": "-" if one["kafka"] else number(one["lag"]),
        "lags": points_of(history.values(f"lag {name}")),
        "flight": number(one["inFlight"]),
        "why": one["why"],
        "_level": level,
        "_link": path_of("/consumer", name=name),
    }


def _attention_row(need: Need) -> dict[str, Any]:
    row: dict[str, Any] = {"what": need.about, "why": need.why, "_link": "/", "_buttons": []}
    if need.kind in _PAGES:
        row["_link"] = path_of(_PAGES[need.kind], name=need.name)
        helps = {"pipeline": "Resume", "topic": "Redrive"}
        row["_buttons"] = [helps.get(need.kind) or ("Resume" if need.severity == "paused" else "Pause")]
    return row


def _help(view: View, needs: Mapping[str, Need], button: str, about: str) -> None:
    kind, name = needs[about].kind, needs[about].name
    if kind == "topic":
        confirm(view, run_action(view, name, "redrive", dict))
        return
    path = f"{PIPELINES if kind == 'pipeline' else CONSUMERS}/{quote(name, safe='')}/{button.lower()}"
    reason = "" if kind == "pipeline" else "optional"
    confirm(view, Action(f"{button} {name}", "POST", path, reason=reason, scopes=CONTROL))
