"""Topics: the list, with what is under-replicated, and how a topic is created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nicegui import ui

from headrace_console.actions import Action, action_button, dry_run
from headrace_console.parts import number, path_of
from headrace_console.server_api import ApiProblem
from headrace_console.table import Table, TableColumn
from headrace_console.topic_records import topic_path
from headrace_console.view import View, page

TOPICS: Final = "/topics"
_LIST_SECONDS: Final = 10.0
_DETAIL_SECONDS: Final = 30.0
SETTINGS_LABEL: Final = "Settings, such as retention.ms=86400000 cleanup.policy=compact"
_COLUMNS: Final = (
    TableColumn("name", "Topic"),
    TableColumn("state", "State", "state"),
    TableColumn("partitions", "Partitions", "number"),
    TableColumn("replication", "Replication", "number"),
    TableColumn("records", "Records", "number"),
    TableColumn("settings", "Changed settings"),
)


@page("/topics", "Topics", position=40)
async def topics(view: View) -> None:
    """Build the list."""
    one = TopicList(view)
    await view.follow(TOPICS, one.show, seconds=_LIST_SECONDS)
    ui.timer(1.0, one.look)


class TopicList:
    """The names of all topics, and details of those that are in view, because the API gives them one by one."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._names: Sequence[str] = ()
        self._details: dict[str, dict[str, Any]] = {}
        self._age = 0.0
        action_button(view, "Create a topic", create_action(view))
        self._table = Table("Topics", _COLUMNS, empty="no topic that you may read")

    def show(self, names: Sequence[str]) -> None:
        """Show the names."""
        self._names = sorted(names)
        self._draw()

    async def look(self) -> None:
        """Ask for the details of the rows that are in view and have none; after a while, for those again."""
        if not self._view.visible:
            return
        self._age += 1.0
        if self._age > _DETAIL_SECONDS:
            self._details, self._age = {}, 0.0
        missing = [name for name in self._table.keys if name not in self._details]
        for name in missing:
            try:
                self._details[name] = _details_of(await self._view.get(topic_path(name)))
            except ApiProblem as problem:
                self._details[name] = {"state": str(problem), "_level": "bad"}
        if missing:
            self._draw()

    def _draw(self) -> None:
        self._table.show(
            {"name": name, "_link": path_of("/topic", name=name), **self._details.get(name, {})} for name in self._names
        )


def _details_of(found: Mapping[str, Any]) -> dict[str, Any]:
    problems = [one["problem"] for one in found["partitions"] if one["problem"]]
    return {
        "state": f"{len(problems)} {problems[0]}" if problems else "replicated",
        "_level": "bad" if problems else "ok",
        "partitions": number(len(found["partitions"])),
        "replication": number(found["replication_factor"]),
        "records": number(found["records"]),
        "settings": settings_text(found["configs"]),
    }


def create_action(view: View) -> Action:
    """Return the action that creates a topic."""
    return Action(
        "Create a topic",
        "POST",
        TOPICS,
        fields={
            "name": "Name",
            "partitions": "Partitions; 1 if empty",
            "replication_factor": "Replication factor; that of the brokers if empty",
            "configs": SETTINGS_LABEL,
        },
        shape=topic_body,
        reason="",
        preview=dry_run(view, "POST", TOPICS, changes_text),
        outcome=changes_text,
    )


def topic_body(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of a new or changed topic; raises ValueError for a field that is wrong."""
    body: dict[str, Any] = {name: fields[name] for name in ("name",) if name in fields}
    for name in ("partitions", "replication_factor"):
        if name in fields:
            if not fields[name].isdecimal():
                raise ValueError(f"{name.replace('_', ' ')} is a whole number")
            body[name] = int(fields[name])
    if "configs" in fields:
        pairs = [one.partition("=") for one in fields["configs"].split()]
        if not all(equals and name for name, equals, _ in pairs):
            raise ValueError("settings are NAME=VALUE, with spaces between them")
        body["configs"] = {name: value or None for name, _, value in pairs}
    return body


def settings_text(configs: Mapping[str, Any]) -> str:
    """Return settings in one line."""
    return ", ".join(f"{name}={value}" for name, value in configs.items())


def changes_text(found: Mapping[str, Any]) -> str:
    """Return the changes of a topic, made or previewed, in lines."""
    lines = [
        f"{one['what']}: {one['before'] if one['before'] is not None else '-'} -> "
        f"{one['after'] if one['after'] is not None else 'default'}"
        for one in found["changes"]
    ]
    return "\n".join(lines or ["nothing changes: it has these values already"])
