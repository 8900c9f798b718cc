"""The options by which commands name records: partition, offsets, time, and what they are like."""

from __future__ import annotations

import copy
import functools
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import click

from headrace.control.selection import Selection, parse_time


class AliasedOption(click.Option):
    """An option of which the help shows the first spelling; the others are accepted too."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        shown = copy.copy(self)
        shown.opts = self.opts[:1]
        return click.Option.get_help_record(shown, ctx)


class Moment(click.ParamType[datetime]):
    """A point in time: ISO 8601, UTC where no zone is given, or how long ago (`90s`, `15m`, `2h`, `1d`)."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return parse_time(value, time.time())
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither a time such as 2026-01-31T08:00 nor an age such as 2h", param, ctx)


class Rate(click.ParamType[float]):
    """Records per second: more than 0, and no `nan` or `inf`, which are numbers to Python only."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = click.FLOAT.convert(value, param, ctx)
        if not 0 < found < float("inf"):
            self.fail(f"{value!r} is no rate: take a number above 0", param, ctx)
        return found


class Offsets(click.ParamType[tuple[int, int | None]]):
    """One offset, or the first and the last: `17`, `17-40`, `17-`."""

    name = "first-last"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int | None]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d{1,18})(-(\d{0,18}))?", value)
        if not found:
            self.fail(f"{value!r} is no offset (17), and no first and last one (17-40, 17-)", param, ctx)
        first = int(found[1])
        last = first if found[2] is None else int(found[3]) if found[3] else None
        return first, last


class Pair(click.ParamType[tuple[str, str]]):
    """`NAME=VALUE`."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        header, equals, text = value.partition("=")
        if not equals or not header:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return header, text


_OPTIONS = (
    click.option("--partition", type=click.IntRange(0), help="Only this partition of the topic."),
    click.option("--offsets", type=Offsets(), help="Only this offset (17), or from one to one (17-40, 17-)."),
    click.option(
        "--since",
        "--from",
        cls=AliasedOption,
        type=Moment(),
        help="Letters written at this time or later: 2026-01-31T08:00, or 2h (ago).",
    ),
    click.option("--until", type=Moment(), help="Letters written before this time."),
    click.option("--origin", multiple=True, metavar="TOPIC", help="Letters that came from this topic."),
    click.option("--group", multiple=True, help="Letters of this consumer group."),
    click.option("--error", multiple=True, metavar="CLASS", help="Letters of this error class."),
    click.option("--key", multiple=True, help="Letters whose key is this text."),
    click.option(
        "--header", multiple=True, type=Pair(), help="Letters that have this header; all of them, if several."
    ),
)


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Callable[..., Any]]:
    """Give a command several options, in this order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that name letters; it gets `selection`. Options that may repeat mean any of them."""

    @functools.wraps(command)
    def run(  # noqa: PLR0913 one per option
        *,
        partition: int | None,
        offsets: tuple[int, int | None] | None,
        since: datetime | None,
        until: datetime | None,
        origin: tuple[str, ...],
        group: tuple[str, ...],
        error: tuple[str, ...],
        key: tuple[str, ...],
        header: tuple[tuple[str, str], ...],
        **others: Any,
    ) -> Any:
        if offsets is not None and partition is None:
            raise click.UsageError("--offsets needs --partition: offsets count within a partition")
        first, last = offsets or (None, None)
        if len(dict(header)) < len(header):
            raise click.UsageError("--header takes one value of a name")
        selection = Selection(
            partition=partition,
            first=first,
            last=last,
            since=since,
            until=until,
            topics=origin,
            groups=group,
            errors=error,
            keys=key,
            headers=dict(header),
        )
        return command(selection=selection, **others)

    return with_options(_OPTIONS)(run)
