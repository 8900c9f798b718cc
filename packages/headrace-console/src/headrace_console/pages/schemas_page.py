"""Schemas: the subjects of the schema registry, and one of them with its versions and what differs between two."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from nicegui import ui

from headrace_console.pages.topic_page import text_block
from headrace_console.parts import heading, link, number, path_of, visible
from headrace_console.server_api import ApiProblem
from headrace_console.table import Table, TableColumn
from headrace_console.view import View, page

SCHEMAS: Final = "/schemas"
_PAGE: Final = 50
_AGAIN_SECONDS: Final = 5.0
_MOST_VERSIONS: Final = 200
_MOST_LINES: Final = 2_000
_LIST: Final = (
    TableColumn("subject", "Subject"),
    TableColumn("topic", "Topic"),
    TableColumn("version", "Latest version", "number"),
    TableColumn("id", "Id", "number"),
    TableColumn("type", "Type"),
    TableColumn("compatibility", "Compatibility"),
    TableColumn("problem", "Problem"),
)
_VERSIONS: Final = (
    TableColumn("version", "Version", "number"),
    TableColumn("id", "Id", "number"),
    TableColumn("type", "Type"),
    TableColumn("references", "Refers to"),
)


@page("/schemas", "Schemas", position=55)
async def schemas(view: View) -> None:
    """Build the list."""
    subjects = Subjects(view)
    await subjects.read()
    ui.timer(_AGAIN_SECONDS, subjects.read_again)


class Subjects:
    """The subjects, a page at a time, because the registry gives their details one by one."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._first = 0
        with ui.element("div").classes("hr-bar"):
            self._part = ui.input("Text in the subject", value=view.query.get("contains", ""))
            self._part.on("keydown.enter", self.find)
            find = ui.button("Read", on_click=self.find, color=None)
            self._before = ui.button("Previous", on_click=lambda: self._turn(-_PAGE), color=None)
            self._after = ui.button("Next", on_click=lambda: self._turn(_PAGE), color=None)
        for button in (find, self._before, self._after):
            button.props("outline no-caps dense").classes("hr-button")
        self._range = ui.label()
        self._range.props["role"] = "status"
        self._problem = ui.label().classes("hr-problem")
        self._problem.props["role"] = "status"
        self._table = Table("Subjects", _LIST, empty="no subject that you may read")

    async def find(self) -> None:
        """Read what has the text, from the start."""
        self._first = 0
        await self.read()

    async def read(self) -> None:
        """Read the present page of subjects, and show it."""
        query = {"contains": self._part.value or "", "offset": self._first, "limit": _PAGE}
        try:
            found = await self._view.get(SCHEMAS, query)
        except ApiProblem as problem:
            self._problem.set_text(visible(problem))
            return
        self._problem.set_text("")
        last = min(self._first + _PAGE, found["total"])
        self._range.set_text(f"{min(self._first + 1, last)}-{last} of {number(found['total'])}")
        self._before.set_enabled(self._first > 0)
        self._after.set_enabled(last < found["total"])
        self._table.show(
            {**one, "id": str(one["id"]), "_link": path_of("/schema", name=one["subject"])} for one in found["subjects"]
        )

    async def read_again(self) -> None:
        """Read if the last attempt has failed, as while the registry starts."""
        if self._problem.text and self._view.visible:
            await self.read()

    async def _turn(self, rows: int) -> None:
        self._first = max(0, self._first + rows)
        await self.read()


@page("/schema", "Schema")
async def schema(view: View) -> None:
    """Build the page of the subject in `name`."""
    name = view.query.get("name", "")
    heading(name)
    try:
        found = await view.get(f"{SCHEMAS}/{quote(name, safe='')}", {"limit": _MOST_VERSIONS})
    except ApiProblem as problem:
        ui.label(visible(problem)).classes("hr-problem")
        return
    if found["topic"]:
        link(f"Topic {found['topic']}", "/topic", name=found["topic"])
    level = found["compatibility"] or f"unknown ({found['problem']})"
    ui.label(visible(f"compatibility {level}; versions: {number(found['total'])}"))
    if len(found["versions"]) < found["total"]:
        ui.label(f"only the newest {len(found['versions'])} versions are shown")
    versions = {one["version"]: one for one in found["versions"]}
    Table("Versions", _VERSIONS).show(map(_version_row, versions.values()))
    if versions:
        Comparison(versions).show()


class Comparison:
    """The text of one version, and what differs from another one."""

    def __init__(self, versions: Mapping[int, Mapping[str, Any]]) -> None:
        """Start with the newest version and the one before it; there is at least one."""
        self._versions = versions
        newest, before = [*versions, *versions][:2]
        with ui.element("div").classes("hr-bar"):
            self._version = ui.input("Version", value=str(newest))
            self._other = ui.input("Compared with version", value=str(before))
            button = ui.button("Show", on_click=self.show, color=None).props("outline no-caps dense")
        button.classes("hr-button")
        self._problem = ui.label().classes("hr-problem")
        self._problem.props["role"] = "status"
        self._texts = ui.element("div").classes("hr-wide")

    def show(self) -> None:
        """Show what the fields select."""
        try:
            version, other = (int(one.value or "0") for one in (self._version, self._other))
            texts = [readable(self._versions[one]["schema"]) for one in (other, version)]
        except (ValueError, KeyError):
            shown = ", ".join(map(str, self._versions))
            self._problem.set_text(f"a version is one of these numbers: {shown}")
            return
        self._problem.set_text("")
        self._texts.clear()
        with self._texts:
            text_block(f"Differences from version {other} to version {version}", differences_of(*texts))
            text_block(f"Version {version}", texts[1])


def _version_row(one: Mapping[str, Any]) -> dict[str, Any]:
    references = [f"{each['name']} ({each['subject']} version {each['version']})" for each in one["references"]]
    return {**one, "id": str(one["id"]), "references": ", ".join(references)}


def readable(text: str) -> str:
    """Return JSON with line breaks and indents, and other text as it is."""
    try:
        found = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        found.encode()  # half of a surrogate pair, which JSON allows, cannot be sent to a browser
    except (ValueError, RecursionError):
        return text
    return found


def differences_of(before: str, after: str) -> str:
    """Return what differs between two texts, in the form of `diff -u`."""
    lines = before.splitlines(), after.splitlines()
    if max(map(len, lines)) > _MOST_LINES:
        return f"a text has more than {number(_MOST_LINES)} lines: compare them with another tool"
    found = [*difflib.unified_diff(*lines, n=3, lineterm="")]
    return "\n".join(found[2:]) or "no difference"
