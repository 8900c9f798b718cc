"""Log levels: what each area logs, and the newest lines of the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from nicegui import ui

from headrace_console.actions import Action, confirm
from headrace_console.server_api import ApiProblem
from headrace_console.table import Table, TableColumn
from headrace_console.view import View, page

LOGGERS: Final = "/adm/logger"
_CONTENT: Final = f"{LOGGERS}/content"
_LEVELS: Final = ("DEBUG", "INFO", "WARN", "ERROR")
_MOST_LINES: Final = 1_000
_SECONDS: Final = 5.0
_COLOURS: Final = {"ERROR": "bad", "WARN": "warn"}
LINES: Final = (
    TableColumn("time", "Time", "number"),
    TableColumn("level", "Level", "state"),
    TableColumn("logger", "Area"),
    TableColumn("message", "Message"),
    TableColumn("id", "Correlation id"),
)


@page("/log-levels", "Log levels", position=120)
async def log_levels(view: View) -> None:
    """Build the page."""
    refusal = view.session.problem_with("admin")
    columns = [TableColumn("name", "Area"), TableColumn("level", "Level")]
    table = Table(
        "Levels", columns, buttons={"Set": lambda name: confirm(view, _change({}, {"name": name}))}, refusal=refusal
    )
    await view.follow(LOGGERS, table.show, seconds=_SECONDS)
    other = ui.button(
        "Set another area", on_click=lambda: confirm(view, _change({"name": "Area: headrace.kafka"})), color=None
    ).props("outline no-caps dense")
    other.classes("hr-button")
    if refusal:
        other.disable()
        other.props["title"] = refusal
    await _newest(view)


async def _newest(view: View) -> None:
    """Show the newest lines of the log, and ask for them on request."""
    with ui.row().classes("items-end"):
        level = ui.radio([*_LEVELS], value="INFO").props("inline dense")
        level.props["aria-label"] = "Lowest level"
        area = ui.input("Only this area: headrace.kafka").props("dense")
        again = ui.button("Read the log", color=None).props("outline no-caps dense").classes("hr-button")
    problem = ui.label().classes("hr-problem")
    lines = Table("Newest lines of ten minutes", LINES, empty="no line of this level")

    async def read() -> None:
        query = {"loggerLevel": level.value, "loggerName": (area.value or "").strip(), "limit": _MOST_LINES}
        try:
            found = await view.get(_CONTENT, query)
            total = sum(one["total"] for one in found.values())
            if total > _MOST_LINES:
                found = await view.get(_CONTENT, {**query, "offset": total - _MOST_LINES})
        except ApiProblem as refused:
            problem.set_text(str(refused))
            return
        problem.set_text("")
        lines.show(rows_of(found))

    again.on_click(read)
    area.on("keydown.enter", read)
    await read()


def rows_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of the log by logger as rows, the newest first."""
    return [row for _, row in sorted(_lines(found), key=lambda one: one[0], reverse=True)]


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    for logger, content in found.items():
        for index, one in enumerate(content["logs"]):
            at = datetime.fromtimestamp(one["timestamp"] / 1000).astimezone()
            yield (
                one["timestamp"],
                {
                    "time": f"{at:%H:%M:%S}.{one['timestamp'] % 1000:03d}",
                    "level": one["level"],
                    "logger": logger,
                    "message": one["message"],
                    "id": one["correlationId"],
                    "_key": f"{logger} {index} {one['timestamp']}",
                    "_level": _COLOURS.get(one["level"], "ok"),
                },
            )


def _change(name: Mapping[str, str], body: Mapping[str, str] | None = None) -> Action:
    fields = {**name, "level": f"Level: {', '.join(_LEVELS)}"}
    what = (body or {}).get("name", "another area")
    return Action(f"Set {what}", "POST", LOGGERS, body or {}, fields, level_body, "", listed=True)


def level_body(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return one change of a level; raises ValueError if a field is none of the levels."""
    level = fields.get("level", "").upper()
    if level not in _LEVELS:
        raise ValueError(f"a level is needed: {', '.join(_LEVELS)}")
    body: dict[str, Any] = {"level": level}
    if fields.get("name"):
        body["name"] = fields["name"]
    return body
