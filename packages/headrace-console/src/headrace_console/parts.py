"""Small parts of pages. Everything foreign (from Kafka, from an error) is shown as text by these, never as HTML."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal
from urllib.parse import urlencode

from nicegui import ui
from nicegui.element import Element

from headrace.runtime.invisible import escaped

Level = Literal["ok", "warn", "bad"]


def visible(text: object) -> str:
    """Return foreign text in which control characters are seen: those that are invisible, or turn its direction."""
    return escaped(str(text))


def excerpt(text: str, most: int) -> str:
    """Return the start of a text, and how long it is if that is not all."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def heading(text: str, level: int = 2) -> Element:
    """Show a heading."""
    return text_in(f"h{level}", text)


def text_in(tag: str, text: object) -> Element:
    """Show text in an HTML element of this tag."""
    with ui.element(tag) as element:
        ui.label(visible(text)).style("display: inline")
    return element


def badge(text: str, level: Level) -> ui.label:
    """Show a state in the colour of its level."""
    found = ui.label().classes("hr-badge")
    change_badge(found, text, level)
    return found


def change_badge(found: ui.label, text: str, level: Level) -> None:
    """Show another state in a badge."""
    found.set_text(text)
    found.props["data-level"] = level
    found.update()


def path_of(page: str, **query: str) -> str:
    """Return the path of a page of the console, with its query, whose values may be foreign."""
    return f"{page}?{urlencode(query)}" if query else page


def link(text: str, page: str, **query: str) -> Element:
    """Show a link to a page of the console."""
    return ui.link(visible(text), path_of(page, **query))


def points_of(values: Sequence[float]) -> str:
    """Return the points of a small plot, 100 wide and 24 high; it begins at 0."""
    if len(values) < 2:
        return ""
    top = max(*values, 1e-9)
    step = 100 / (len(values) - 1)
    return " ".join(f"{index * step:.1f},{23 - 22 * value / top:.1f}" for index, value in enumerate(values))


def number(value: Any, unit: str = "") -> str:
    """Return a number with separators of thousands, or a dash if it is not known."""
    if value is None:
        return "-"
    return (f"{value:,.1f}" if isinstance(value, float) else f"{value:,}") + unit


def ago(then: float | str) -> str:
    """Return how long ago a time is: seconds since the epoch, or ISO 8601."""
    at = datetime.fromisoformat(then).timestamp() if isinstance(then, str) else then
    seconds = max(0, int(time.time() - at))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
