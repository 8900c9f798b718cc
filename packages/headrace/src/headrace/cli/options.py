"""Options that several commands share, and the types of their values."""

import functools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from headrace.kafka.timestamps import parse_time
from headrace.runs.selection import Selection, Span


class ParsedType(click.ParamType[Any]):
    """A text that a function parses."""

    def __init__(self, name: str, parse: Callable[[str], Any], problem: str) -> None:
        """Prepare; `parse` raises ValueError or OverflowError for an invalid text, which `problem` then explains."""
        self.name, self._parse, self._problem = name, parse, problem

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is {self._problem}", param, ctx)


def _rate(text: str) -> float:
    rate = float(text.removesuffix("/s"))
    if not 0 < rate < float("inf"):
        raise ValueError
    return rate


def _offsets(text: str) -> tuple[int, int | None]:
    found = re.fullmatch(r"(\d{1,18})(-(\d{0,18}))?", text)
    if not found:
        raise ValueError
    first = int(found[1])
    return first, first if found[2] is None else int(found[3]) if found[3] else None


def _target(text: str) -> dict[str, Any]:
    if text in ("earliest", "latest"):
        return {"to": text}
    if re.fullmatch(r"\d{1,18}", text):
        return {"offset": int(text)}
    return {"time": parse_time(text, time.time()).isoformat()}


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError
    return name, value


MOMENT = ParsedType(
    "time", lambda text: parse_time(text, time.time()), "neither a time such as 2026-01-31T08:00 nor an age such as 2h"
)
"""A point in time: ISO 8601, by default UTC, or an age (`90s`, `15m`, `2h`, `1d`)."""
RATE = ParsedType("rate", _rate, "not a valid rate: use a number above 0")
"""Records per second, also written 5/s: more than 0, and neither `nan` nor `inf`."""
PERCENT = ParsedType("percent", lambda text: float(text.removesuffix("%")), "not a percentage: write 1%")
PAIR = ParsedType("name=value", _pair, "not NAME=VALUE")
TARGET = ParsedType("position", _target, "no position: write earliest, latest, an offset (47), a time, or an age (2h)")
"""A position to continue at, as requests of the API have it: `to`, `offset` or `time`."""
_OFFSETS = ParsedType("first-last", _offsets, "neither an offset (17) nor a range (17-40, 17-)")

TIMES = (
    click.option(
        "--since", "--from", type=MOMENT, help="Records written at this time or later: 2026-01-31T08:00, or 2h (ago)."
    ),
    click.option("--until", type=MOMENT, help="Records written before this time."),
)
_SPAN = (
    click.option("--partition", type=click.IntRange(0), help="Only this partition of the topic."),
    click.option("--offsets", type=_OFFSETS, help="One offset (17), or a range (17-40, 17-); needs --partition."),
    *TIMES,
)
_CONDITIONS = (
    click.option("--origin", "topics", multiple=True, metavar="TOPIC", help="Dead letters of this topic of origin."),
    click.option("--group", "groups", multiple=True, help="Dead letters of this consumer group."),
    click.option("--error", "errors", multiple=True, metavar="CLASS", help="Dead letters of this error class."),
    click.option("--key", "keys", multiple=True, help="Dead letters whose key is this text."),
    click.option(
        "--header",
        "headers",
        multiple=True,
        type=PAIR,
        help="Dead letters with this header; with several, all of them.",
    ),
)


def with_options(*options: Callable[[Any], Any]) -> Callable[[Any], Callable[..., Any]]:
    """Give a command several options, in this order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def span_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that select a part of a topic; it gets `span`."""

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        span = Span(**_fields_of(Span, given))
        return command(span=span, **given)

    return with_options(*_SPAN)(run)


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that select dead letters; it gets `selection`. A repeated option means any of them."""

    @functools.wraps(command)
    def run(headers: Sequence[tuple[str, str]], **given: Any) -> Any:
        if len(dict(headers)) < len(headers):
            raise click.UsageError("--header takes one value per name")
        selection = Selection(**_fields_of(Selection, given), headers=dict(headers))
        return command(selection=selection, **given)

    return with_options(*_SPAN, *_CONDITIONS)(run)


def _fields_of(kind: type[Span], given: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a span from the values of options, and return them."""
    first, last = given.pop("offsets") or (None, None)
    if first is not None and given["partition"] is None:
        raise click.UsageError("--offsets needs --partition: offsets count within a partition")
    fields = {name: given.pop(name) for name in kind.__struct_fields__ if name in given}
    return {**fields, "first": first, "last": last}
