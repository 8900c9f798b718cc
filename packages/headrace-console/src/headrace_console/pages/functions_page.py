"""Functions: their workers, rate, calls, and their last failures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from headrace_console.actions import Action, confirm
from headrace_console.pages.log_levels_page import LINES, rows_of
from headrace_console.pages.overview_page import CONSUMERS, state_of
from headrace_console.parts import number, path_of, points_of
from headrace_console.table import Table, TableColumn
from headrace_console.view import View, page

_SECONDS: Final = 5.0
_LOG: Final = "/adm/logger/content?loggerLevel=WARN&limit=1000"
_METRIC: Final = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_BUSY: Final = "headrace_function_busy_workers"
_RESTARTS: Final = "headrace_function_worker_restarts_total"
_FRAMES: Final = "headrace_function_waiting_frames"
_CALLS: Final = "headrace_function_event_seconds"
_COUNT: Final = f"{_CALLS}_count"
_SUM: Final = f"{_CALLS}_sum"
_LIST: Final = (
    TableColumn("name", "Function and trigger"),
    TableColumn("state", "State", "state"),
    TableColumn("rate", "Records/s", "number"),
    TableColumn("rates", "Rate", "plot"),
    TableColumn("workers", "Workers"),
    TableColumn("mean", "Mean time", "number"),
    TableColumn("failed", "Failed records", "number"),
    TableColumn("lag", "Lag", "number"),
    TableColumn("why", "Why"),
)
Values = dict[str, dict[str, float]]
"""Metric to consumer to value."""


@page("/functions", "Functions", position=80)
async def functions(view: View) -> None:
    """Build the page."""
    shown = _Functions(view)
    await view.follow(CONSUMERS, shown.consumers)
    await view.follow("/metrics", shown.metrics, seconds=_SECONDS, optional=True)
    await view.follow(_LOG, shown.log, seconds=_SECONDS, optional=True)


class _Functions:
    """The page, by parts that arrive one after the other."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._listed: list[Mapping[str, Any]] = []
        self._values: Values = {}
        self._table = Table("Functions", _LIST, empty="no function with a Kafka trigger runs in this process")
        self._files = Table(
            "Files",
            (TableColumn("function", "Function"),),
            empty="no function",
            buttons={"Reload": lambda name: _reload(view, name)},
            refusal=view.session.problem_with("admin"),
        )
        self._failures = Table("Last failures", LINES, empty="the log has no warning of a function in ten minutes")

    @property
    def names(self) -> list[str]:
        """Names of the functions, whose consumers have that of their trigger, too."""
        return [*dict.fromkeys(one["name"].partition(".")[0] for one in self._listed)]

    def consumers(self, found: Mapping[str, Any]) -> None:
        """Take their consumers."""
        self._listed = [one for one in found["consumers"] if one["kind"] == "function"]
        self._files.show({"function": name} for name in self.names)
        self._draw()

    def metrics(self, found: object) -> None:
        """Take the metrics of their workers."""
        self._values = values_of(str(found))
        self._draw()

    def log(self, found: Mapping[str, Any]) -> None:
        """Take what the log has of them."""
        self._failures.show(
            row
            for row in rows_of(found)
            if row["logger"].startswith("headrace.function") or row["message"].startswith("function ")
        )

    def _draw(self) -> None:
        self._table.show(_row(self._view, one, self._values) for one in self._listed)


def values_of(text: str) -> Values:
    """Return what the metrics say of functions, by metric and consumer."""
    found: Values = {}
    for line in text.splitlines():
        if line.startswith("headrace_function_") and (match := _METRIC.match(line)):
            labels = dict(_labels(match[2]))
            of = found.setdefault(match[1], {})
            if "consumer" in labels and "le" not in labels:
                of[labels["consumer"]] = of.get(labels["consumer"], 0.0) + float(match[3])
    return found


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _LABEL.findall(text):
        yield name, value.replace('\\"', '"').replace("\\\\", "\\")


def _row(view: View, one: Mapping[str, Any], values: Values) -> dict[str, Any]:
    name, counts = one["name"], one["counts"]
    view.history.add(f"ended {name}", sum(counts.values()))
    rates = view.history.rates(f"ended {name}")
    state, level = state_of(one)

    def value(metric: str) -> float | None:
        return values.get(metric, {}).get(name)

    calls = value(_COUNT)
    return {
        "name": name,
        "state": state,
        "rate": number(rates[-1] if rates else None),
        "rates": points_of(rates),
        "workers": ", ".join(
            f"{_whole(value(metric))} {what}"
            for metric, what in ((_BUSY, "busy"), (_RESTARTS, "replaced"), (_FRAMES, "frames wait"))
        ),
        "mean": f"{1000 * (value(_SUM) or 0.0) / calls:,.1f} ms" if calls else "-",
        "failed": number(sum(count for how, count in counts.items() if how not in ("delivered", "filtered"))),
        "lag": number(one["lag"]),
        "why": one["why"],
        "_level": level,
        "_link": path_of("/consumer", name=name),
    }


def _whole(value: float | None) -> str:
    return number(None if value is None else int(value))


def _reload(view: View, name: str) -> None:
    names = [f"function {name}"]
    confirm(view, Action(f"Reload {name}", "POST", "/adm/modules", reason="", names=names, outcome=_failures))


def _failures(reloads: dict[str, Any]) -> str:
    return "\n".join(f"{name} failed: {why}" for name, why in reloads["failed"].items()) or "reloaded"
