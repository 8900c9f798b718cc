"""Audit: its newest events, read from its topic by an instance of an active consumer that commits nothing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from nicegui import ui

from headrace_console.audit_reads import about, audit_topic, newest_events, positions, who, why
from headrace_console.server_api import ApiProblem
from headrace_console.table import Table, TableColumn
from headrace_console.view import View, page

_EVENTS: Final = (100, 500, 2_000)
_COLUMNS: Final = (
    TableColumn("time", "Time", "number"),
    TableColumn("status", "Status", "state"),
    TableColumn("type", "Type"),
    TableColumn("who", "Who"),
    TableColumn("what", "What"),
    TableColumn("where", "Where"),
    TableColumn("why", "Reason"),
    TableColumn("id", "Correlation id"),
)
_LEVELS: Final = {"SUCCESS": "ok", "FAILURE": "bad", "DENIED": "bad"}


@page("/audit", "Audit", position=110)
async def audit(view: View) -> None:
    """Build the page."""
    topic, destination = await audit_topic(view)
    ui.label(destination)
    with ui.row().classes("items-end"):
        field = ui.input("Topic of the audit", value=view.query.get("topic", topic)).props("dense")
        count = ui.radio([*_EVENTS], value=_EVENTS[0]).props("inline dense")
        count.props["aria-label"] = "Newest events of each partition"
        again = ui.button("Read the audit", color=None).props("outline no-caps dense").classes("hr-button")
    problem = ui.label().classes("hr-problem")
    problem.props["role"] = "status"
    table = Table("Newest events", _COLUMNS, empty="no event was read")

    async def read() -> None:
        problem.set_text("")
        try:
            found = await newest_events(view, (field.value or "").strip(), count.value)
        except ApiProblem as refused:
            problem.set_text(str(refused))
            return
        rows = [row_of(one["value"], one) for one in found]
        table.show(sorted(rows, key=lambda row: row["_at"], reverse=True))

    again.on_click(read)
    field.on("keydown.enter", read)
    if field.value:
        await read()


def row_of(event: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an event; each of its fields may be missing."""
    at = event.get("timestamp") or 0
    return {
        "time": f"{datetime.fromtimestamp(at / 1000).astimezone():%Y-%m-%d %H:%M:%S}",
        "status": str(event.get("auditStatus", "")),
        "type": str(event.get("auditType", "")),
        "who": who(event),
        "what": about(event),
        "where": positions(event),
        "why": why(event),
        "id": str(event.get("correlationId", "")),
        "_key": f"{record['partition']}-{record['offset']}",
        "_at": at,
        "_level": _LEVELS.get(event.get("auditStatus", ""), "warn"),
    }
