"""`headrace reactive top`: a table of the reactive consumers of one process, refreshed at an interval."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from headrace.cli.api import Api, api_options
from headrace.cli.output import counted
from headrace.errors import HeadraceError
from headrace.web.routes.control import ControlEndpoints

if TYPE_CHECKING:  # loaded only to draw
    from rich.console import Group

_LIMIT_SECONDS = 5.0
_ENDED = ("delivered", "deadLetters", "delayed", "skipped", "givenUp")

Summary = Mapping[str, Any]


class Poll(NamedTuple):
    """The answer of the process at one moment."""

    seconds: float
    """Of the monotonic clock."""
    consumers: Sequence[Summary]
    problem: str = ""
    """Why the process does not answer."""


class TopRow(NamedTuple):
    """One consumer in the table."""

    consumer: str
    records_per_second: float | None
    """Records that ended since the poll before; None if there was none."""
    lag: int | None
    in_flight: int
    attempts: int
    breaker: str
    oldest_seconds: float | None
    paused: bool
    why: str


@click.command()
@click.option("--interval", type=click.FloatRange(0.2), default=2.0, show_default=True, help="Seconds between tables.")
@click.option("--once", is_flag=True, help="Print one table after one interval; exit code 1 if no process answers.")
@api_options
def top(api: Api, interval: float, once: bool, output: str) -> int:
    """Watch the reactive consumers: records per second, lag, in flight, attempts, breaker, oldest record, and why a
    consumer stalls. Consumers in trouble come first.

    Without a terminal each table is printed as plain text below the one before, with --output json as a line of JSON.
    Ctrl-C ends it.

    Example: headrace reactive top --url http://localhost:8082
    """
    api.limit_seconds = _LIMIT_SECONDS
    before: Poll | None = None
    with contextlib.suppress(KeyboardInterrupt), _screen(output, api.url) as show:
        while True:
            now = _poll(api)
            if before or not once:
                show(now, rows(before, now))
            if before and once:
                return int(bool(now.problem))
            before = now
            time.sleep(interval)
    return 0


def rows(before: Poll | None, now: Poll) -> list[TopRow]:
    """Return a row per consumer, those in trouble first."""
    earlier = {summary["name"]: _ended(summary) for summary in before.consumers} if before else {}
    found = []
    for one in now.consumers:
        ended = _ended(one) - earlier.get(one["name"], sys.maxsize)
        rate = ended / (now.seconds - before.seconds) if before and ended >= 0 else None
        numbers = (one["lag"], one["inFlight"], one["attempts"])
        row = TopRow(
            one["name"], rate, *numbers, one["breaker"]["state"], one["oldestSeconds"], bool(one["paused"]), one["why"]
        )
        found.append(row)
    return sorted(found, key=lambda row: (-_trouble(row), row.consumer))


def drawn(url: str, now: Poll, table: Sequence[TopRow]) -> Group:
    """Return what is printed: a line with the time, the table, and below it the reasons in full."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    troubled = sum(map(bool, map(_trouble, table)))
    head = f"{datetime.now():%H:%M:%S}  {counted(len(table), 'consumer')}, {troubled} paused or in trouble"
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    shown.add_column("CONSUMER", no_wrap=True)
    for title in ("REC/S", "LAG", "IN FLIGHT", "TRIES", "BREAKER", "OLDEST"):
        shown.add_column(title, no_wrap=True, justify="right", min_width=len(title))
    reasons = [Text(_printable(f"{url}: {now.problem}"), "red")] if now.problem else []
    for row in table:
        style = ("", "yellow", "yellow", "red")[_trouble(row)]
        numbers = map(_short, (row.records_per_second, row.lag, row.in_flight, row.attempts))
        cells = (_printable(row.consumer), *numbers, row.breaker, _age(row.oldest_seconds))
        shown.add_row(*map(Text, cells), style=style)
        if row.why:
            reasons.append(Text(_printable(f"{row.consumer}: {row.why}"), style))
    return Group(Text(head, "dim"), *([shown] if table else []), *reasons)


def _poll(api: Api) -> Poll:
    try:
        return Poll(time.monotonic(), api.call(ControlEndpoints.list)["consumers"])
    except HeadraceError as problem:
        return Poll(time.monotonic(), (), problem.description)
    except (ValueError, LookupError, TypeError):
        return Poll(time.monotonic(), (), "it answers, and is no Headrace with reactive consumers")


@contextlib.contextmanager
def _screen(output: str, url: str) -> Iterator[Callable[[Poll, list[TopRow]], None]]:
    if output == "json":
        yield lambda now, table: click.echo(json.dumps(_document(url, now, table), ensure_ascii=False))
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not sys.stdout.isatty():
        yield lambda now, table: console.print(drawn(url, now, table), "")
    else:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda now, table: live.update(drawn(url, now, table), refresh=True)


def _document(url: str, now: Poll, table: Sequence[TopRow]) -> dict[str, Any]:
    at = datetime.now().astimezone().isoformat(timespec="milliseconds")
    silent = {url: now.problem} if now.problem else {}
    return {"at": at, "consumers": [row._asdict() for row in table], "silent": silent}


def _ended(summary: Summary) -> int:
    return sum(summary["counts"].get(name, 0) for name in _ENDED)


def _trouble(row: TopRow) -> int:
    if row.breaker != "closed":
        return 3
    return 1 if row.paused else 2 * bool(row.why)


def _printable(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _short(number: float | None) -> str:
    if number is None:
        return "-"
    for unit, limit in (("", 100_000), ("k", 100_000_000), ("M", 100_000_000_000)):
        if number < limit:
            return f"{number * 100_000 / limit:,.0f}{unit}"
    return f"{number / 1e9:,.0f}G"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size, limit in (("s", 1, 100), ("m", 60, 6000), ("h", 3600, 360_000)):
        if seconds < limit:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"
