"""A table: a page of rows at a time is sent to the browser, which shows every cell as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from nicegui import ui
from nicegui.element import Element

from headrace_console.parts import visible

_PAGE: Final = 50


class TableColumn(NamedTuple):
    """A column. A `state` is a badge in the row's `_level`; a `plot` is what `points_of` returns."""

    name: str
    label: str
    kind: Literal["text", "number", "state", "plot"] = "text"


class _TableRows(Element, component=Path(__file__).with_name("table.js")):
    """The rows in the browser."""


class Table:
    """A table with a filter and pages.

    A row has the names of its columns. It may have `_key`, by default its first column, and a `_link` from `path_of`.
    `_level` is `ok`, `warn` or `bad`; `_buttons` are those of the table's buttons that the row has.
    """

    def __init__(
        self,
        caption: str,
        columns: Sequence[TableColumn],
        *,
        empty: str = "nothing here",
        buttons: Mapping[str, Callable[[str], Any]] | None = None,
        refusal: str = "",
    ) -> None:
        """Make an empty table at this point of the page.

        Args:
            caption: Its title.
            columns: Its columns; the first names the row.
            empty: What it says without rows.
            buttons: Buttons of each row: their label, and what is called with the row's key.
            refusal: Why the buttons are disabled; empty if they are not.
        """
        self._columns = columns
        self._all: list[dict[str, Any]] = []
        self._first = 0
        self.keys: list[str] = []
        """Keys of the rows that the browser has now."""
        self._sorted = ("", 1)
        with ui.element("div").classes("hr-bar"):
            self._filter = ui.input(f"Filter {caption.lower()}", on_change=self._filtered).props("dense clearable")
            self._before = ui.button("Previous", on_click=lambda: self._turn(-_PAGE), color=None).props(
                "flat dense no-caps"
            )
            self._range = ui.label()
            self._after = ui.button("Next", on_click=lambda: self._turn(_PAGE), color=None).props("flat dense no-caps")
        self._rows = _TableRows()
        self._rows.props.update(
            caption=caption,
            columns=[column._asdict() for column in columns],
            rows=[],
            buttons=[*(buttons or ())],
            refusal=refusal,
            empty=empty,
            order=["", 1],
        )
        self._rows.on("sort", lambda event: self._sort(str(event.args)))
        self._rows.on("press", lambda event: (buttons or {})[event.args["button"]](str(event.args["key"])))
        self._draw()

    def show(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Show these rows instead of the present ones."""
        first = self._columns[0].name
        self._all = [{"_key": row[first], **row} for row in rows]
        self._draw()

    def _filtered(self) -> None:
        self._first = 0
        self._draw()

    def _turn(self, rows: int) -> None:
        self._first += rows
        self._draw()

    def _sort(self, column: str) -> None:
        """Sort by a column; the same one again turns the order round, and a third time ends it."""
        name, way = self._sorted
        self._sorted = (column, 1) if name != column else (column, -1) if way > 0 else ("", 1)
        self._rows.props["order"] = [*self._sorted]
        self._rows.update()
        self._draw()

    def _draw(self) -> None:
        needle = (self._filter.value or "").lower()
        names = [column.name for column in self._columns if column.kind != "plot"]
        found = [row for row in self._all if any(needle in str(row.get(name, "")).lower() for name in names)]
        name, way = self._sorted
        if name:
            found.sort(key=lambda row: _natural(row.get(name)), reverse=way < 0)
        self._first = max(0, min(self._first, (len(found) - 1) // _PAGE * _PAGE))
        shown = found[self._first : self._first + _PAGE]
        for part in (self._before, self._range, self._after):
            part.set_visibility(len(found) > _PAGE)
        self._filter.set_visibility(len(self._all) > _PAGE or bool(needle))
        self._before.set_enabled(self._first > 0)
        self._after.set_enabled(self._first + _PAGE < len(found))
        self._range.set_text(f"{self._first + 1}-{self._first + len(shown)} of {len(found)}")
        self.keys = [str(row["_key"]) for row in shown]
        shown = [{name: _cell(name, value) for name, value in row.items()} for row in shown]
        if self._rows.props["rows"] != shown:
            self._rows.props["rows"] = shown
            self._rows.update()


def _cell(name: str, value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not name.startswith("_") else value


def _natural(shown: object) -> tuple[bool, float, str]:
    """Return by what a shown value is sorted: numbers first and by size, then text."""
    text = str(shown)
    try:
        return False, float(text.replace(",", "").split()[0]), text
    except (ValueError, IndexError):
        return True, 0.0, text.lower()
