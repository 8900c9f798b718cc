"""Overview: what runs, how fast, how far behind, and what needs a person now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from nicegui import ui

from headrace.console.actions import Action, confirm
from headrace.console.feeds import History
from headrace.console.frame import READINESS
from headrace.console.parts import Level, ago, badge, number, path_of, points_of
from headrace.console.table import Table, TableColumn
from headrace.console.view import View, page

CONSUMERS: Final = "/adm/reactive-consumers"
PIPELINES: Final = "/adm/pipelines"
TABLES: Final = "/tables"
DEAD_LETTERS: Final = "/adm/dead-letters"
DEAD_LETTER_SECONDS: Final = 10.0
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


class Need(NamedTuple):
    """Something that needs a person; a lower rank is worse."""

    rank: int
    what: str
    why: str
    link: str = "/"
    resume: str = ""
    """A consumer that resuming helps."""


Report = Callable[[str, list[Need]], None]
"""Replaces what a source has found."""


@page("/", "Overview", position=10)
async def overview(view: View) -> None:
    """Build the page."""
    needs: dict[str, list[Need]] = {}
    kafka = badge("", "ok")
    attention = Table(
        "Needs a person now",
        [TableColumn("what", "What"), TableColumn("why", "Why")],
        empty="nothing",
        buttons={"Resume": lambda key: _resume(view, key)},
        refusal=view.session.problem_with(*CONTROL),
    )

    def need(source: str, found: list[Need]) -> None:
        needs[source] = found
        worst = sorted((one for part in needs.values() for one in part), key=lambda one: one.rank)
        reasons = {one.why: one for one in reversed(worst)}
        shown = sorted(reasons.values(), key=lambda one: one.rank)
        attention.show(
            {"what": one.what, "why": one.why, "_link": one.link, "_buttons": ["Resume"] if one.resume else []}
            | {"_key": one.resume or f"{one.what} {one.why}"}
            for one in shown
        )

    def services(report: Mapping[str, Any]) -> None:
        known = report.get("services", {})
        reason = known.get("kafka", {}).get("reason", "")
        kafka.set_text(f"Kafka does not respond: {reason}" if reason else "Kafka responds")
        kafka.props["data-level"] = "bad" if reason else "ok"
        kafka.update()
        need("services", [Need(0, name, one["reason"]) for name, one in known.items() if not one["ready"]])

    await view.follow(READINESS, services)
    await _consumers(view, need)
    await _pipelines(view, need)
    await _tables(view, need)
    ui.timer(0.1, lambda: _dead_letters(view, need), once=True)  # counting takes Kafka longer than the rest


async def _consumers(view: View, need: Report) -> None:
    table = Table("Consumers and functions", LIST_COLUMNS, empty="no consumer and no function runs in this process")

    def show(found: Mapping[str, Any]) -> None:
        table.show(row_of(one, view.history) for one in found["consumers"])
        need("consumers", [*filter(None, map(need_of, found["consumers"]))])

    await view.follow(CONSUMERS, show)


async def _pipelines(view: View, need: Report) -> None:
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
        need("pipelines", [Need(1, one["name"], one["reason"]) for one in found["pipelines"] if one["reason"]])

    await view.follow(PIPELINES, show, optional=True)


async def _tables(view: View, need: Report) -> None:
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
        need("tables", [Need(2, row["name"], row["why"]) for row in rows if row["why"]])

    await view.follow(TABLES, show, optional=True)


async def _dead_letters(view: View, need: Report) -> None:
    def show(found: Mapping[str, Any]) -> None:
        left = [one for one in found["topics"] if one["left"] and not one["topic"].endswith(".quarantine")]
        need(
            "dead letters",
            [
                Need(
                    3,
                    one["topic"],
                    f"{number(one['left'])} dead letters left in {one['topic']}: redrive, quarantine or drop them",
                    path_of("/dead-letter-topic", name=one["topic"]),
                )
                for one in left
            ],
        )

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


def need_of(one: Mapping[str, Any]) -> Need | None:
    """Return what a consumer needs a person for, if it does."""
    state, _ = state_of(one)
    name, link = one["name"], path_of("/consumer", name=one["name"])
    if one["paused"]:
        paused = one["paused"]
        why = f": {paused['reason']}" if paused["reason"] else ""
        return Need(5, name, f"paused for {ago(paused['since'])} by {paused['by']}{why}", link, name)
    if not one["why"]:
        return None
    rank = {"no Kafka": 0, "waits": 4}.get(state, 2)
    return Need(rank, name, one["why"], link)


def _resume(view: View, name: str) -> None:
    path = f"{CONSUMERS}/{quote(name, safe='')}/resume"
    confirm(view, Action(f"Resume {name}", "POST", path, scopes=CONTROL))
