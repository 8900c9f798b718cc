"""A graph of what reads and writes what; the browser draws it as SVG and shows every name as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from nicegui.element import Element

GraphNode = tuple[str, str]
"""A box: its kind, which is also its colour, and its name."""
_COLUMN: Final = 270
_LINE: Final = 44
_WIDTH: Final = 200
_MIDDLE: Final = 17
_SHOWN: Final = 27
_MOST_LINES: Final = 300


class _GraphPicture(Element, component=Path(__file__).with_name("lineage_graph.js")):
    """The drawing in the browser."""


class LineageGraph:
    """A graph in columns from left to right."""

    def __init__(self, label: str) -> None:
        """Make an empty graph at this point of the page; `label` is what a screen reader says."""
        self._label = label
        self._picture = _GraphPicture()
        self.show((), ())

    def show(self, columns: Sequence[Iterable[GraphNode]], edges: Iterable[tuple[GraphNode, GraphNode]]) -> None:
        """Draw the boxes of each column, and a line for each edge; edges of boxes that are not there are left out."""
        at: dict[GraphNode, tuple[int, int]] = {}
        for column, nodes in enumerate(columns):
            for row, node in enumerate(dict.fromkeys(nodes)):
                at.setdefault(node, (10 + column * _COLUMN, 10 + row * _LINE))
        lines = [(one, other) for one, other in dict.fromkeys(edges) if one in at and other in at][:_MOST_LINES]
        spoken = "; ".join(f"{one[1]} to {other[1]}" for one, other in lines)
        shown: dict[str, Any] = {
            "label": f"{self._label}: {spoken or 'nothing'}",
            "width": max((x for x, _ in at.values()), default=0) + _WIDTH + 10,
            "height": max((y for _, y in at.values()), default=0) + _LINE,
            "lines": [_path(at[one], at[other]) for one, other in lines],
            "boxes": [
                {"kind": kind, "x": x, "y": y, "title": f"{kind} {name}", "text": _short(f"{kind} {name}")}
                for (kind, name), (x, y) in at.items()
            ],
        }
        if any(self._picture.props.get(name) != value for name, value in shown.items()):
            self._picture.props.update(shown)
            self._picture.update()


def _short(name: str) -> str:
    return name if len(name) <= _SHOWN else f"{name[: _SHOWN - 1]}…"


def _path(start: tuple[int, int], end: tuple[int, int]) -> str:
    x, y, to_x, to_y = start[0] + _WIDTH, start[1] + _MIDDLE, end[0], end[1] + _MIDDLE
    return f"M{x} {y}C{x + 35} {y} {to_x - 35} {to_y} {to_x} {to_y}"
