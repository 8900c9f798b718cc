"""`headrace reactive top`: what the reactive consumers do at the moment, drawn again and again."""

import asyncio
import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import click

from headrace.cli.api import Api, url_of
from headrace.cli.output import counted, output_option
from headrace.cli.settings import config_option
from headrace.errors import HeadraceError
from headrace.lifecycle import run_blocking

_LIMIT_SECONDS = 5.0
_ENDED = ("delivered", "deadLetters", "delayed", "skipped", "givenUp")
_BREAKER = ("closed", "half-open", "open")
_COLUMNS = {"rec/s": 7, "lag": 7, "in flight": 9, "tries": 5, "breaker": 9, "oldest": 6}
"""Title to width; the consumer's name has the rest."""

Summary = Mapping[str, Any]


class Poll(NamedTuple):
    """What every process answered at one moment."""

    seconds: float
    """Of a clock that never goes back."""
    answers: Mapping[str, Sequence[Summary] | str]
    """URL to its consumers, or to why it does not answer."""


class Row(NamedTuple):
    """One consumer of the deployment, over all processes that have it."""

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


def rows(before: Poll | None, now: Poll) -> list[Row]:
    """Return a row per consumer, those in trouble first."""
    found: dict[str, list[Summary]] = {}
    rates: dict[str, float] = {}
    earlier = {(url, summary["name"]): _ended(summary) for url, summary in _summaries(before)} if before else {}
    for url, summary in _summaries(now):
        name = summary["name"]
        found.setdefault(name, []).append(summary)
        ended = _ended(summary) - earlier.get((url, name), math.inf)
        if before and ended >= 0:
            rates[name] = rates.get(name, 0.0) + ended / (now.seconds - before.seconds)
    merged = [_merged(name, parts, rates.get(name)) for name, parts in found.items()]
    return sorted(merged, key=lambda row: (-_trouble(row), row.consumer))


def lines(now: Poll, table: Sequence[Row], width: int) -> list[tuple[str, str]]:
    """Return what is drawn, with the style of each line; none is wider than `width` columns."""
    troubled = sum(map(bool, map(_trouble, table)))
    widest = max([len("consumer"), *(len(row.consumer) for row in table)])
    name = max(8, min(widest, width - sum(_COLUMNS.values()) - 2 * len(_COLUMNS)))
    head = f"{datetime.now():%H:%M:%S}  {counted(len(table), 'consumer')}, {troubled} paused or in trouble"
    found = [(head, "dim")]
    for url, why in now.answers.items():
        found += [(line, "red") for line in _wrapped(f"{url}: {why}", width)] if isinstance(why, str) else []
    if table:
        found.append((_line("consumer", list(_COLUMNS), name).upper(), "bold"))
    for row in table:
        style = ("", "yellow", "yellow", "red")[_trouble(row)]
        found.append((_line(row.consumer, _cells(row), name), style))
        found += [(f"  {line}", style) for line in _wrapped(row.why, width - 2)]
    return [(_cut(text, width).rstrip(), style) for text, style in found]


@click.command()
@click.option("--url", "urls", multiple=True, envvar="HEADRACE_URL", help="Base URL of a process; may be repeated.")
@click.option("--token", envvar="HEADRACE_TOKEN", default="", help="Token for it; better in HEADRACE_TOKEN.")
@config_option
@click.option("--interval", type=click.FloatRange(0.2), default=2.0, show_default=True, help="Seconds between tables.")
@click.option("--once", is_flag=True, help="One table, after one interval; 1 is the exit code if no process answers.")
@output_option
def top(urls: Sequence[str], token: str, config: Path | None, interval: float, once: bool, output: str) -> int:
    """Watch the reactive consumers: records per second, lag, in flight, attempts, breaker, oldest record, and why one
    stands still; those in trouble first.

    Several --url are processes of one deployment; what they do is added up. Where the output is no terminal each table
    is plain text below the one before, with --output json a line of JSON. Ctrl-C ends it.

    Example: headrace reactive top --url http://localhost:8082 --url http://localhost:8083
    """
    apis = [Api(url, token, _LIMIT_SECONDS) for url in urls or [url_of(config)]]
    with contextlib.suppress(KeyboardInterrupt), _screen(output) as show:
        return asyncio.run(_watch(apis, interval, once, show))
    return 0


async def _watch(apis: Sequence[Api], interval: float, once: bool, show: Callable[[Poll, list[Row]], None]) -> int:
    before: Poll | None = None
    while True:
        answers = await asyncio.gather(*(run_blocking(_ask, api) for api in apis))
        now = Poll(time.monotonic(), {api.url: answer for api, answer in zip(apis, answers, strict=True)})
        if before or not once:
            show(now, rows(before, now))
        if before and once:
            return int(all(isinstance(answer, str) for answer in answers))
        before = now
        await asyncio.sleep(interval)


def _ask(api: Api) -> Sequence[Summary] | str:
    try:
        found: Sequence[Summary] = api.get("/adm/reactive-consumers")["consumers"]
    except HeadraceError as problem:
        return problem.description
    except (ValueError, LookupError, TypeError):
        return "it answers, and it is no Headrace with reactive consumers"
    return found


@contextlib.contextmanager
def _screen(output: str) -> Iterator[Callable[[Poll, list[Row]], None]]:
    def text(now: Poll, table: list[Row]) -> list[tuple[str, str]]:
        return lines(now, table, shutil.get_terminal_size().columns)

    if output == "json":
        yield lambda now, table: click.echo(json.dumps(_document(now, table), ensure_ascii=False))
    elif not sys.stdout.isatty():
        yield lambda now, table: click.echo("\n".join(line for line, _ in text(now, table)) + "\n")
    else:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            yield lambda now, table: live.update(
                Group(*(Text(line, style, no_wrap=True) for line, style in text(now, table))), refresh=True
            )


def _document(now: Poll, table: Sequence[Row]) -> dict[str, Any]:
    silent = {url: why for url, why in now.answers.items() if isinstance(why, str)}
    at = datetime.now().astimezone().isoformat(timespec="milliseconds")
    return {"at": at, "consumers": [row._asdict() for row in table], "silent": silent}


def _summaries(poll: Poll) -> Iterator[tuple[str, Summary]]:
    for url, answer in poll.answers.items():
        for summary in answer if not isinstance(answer, str) else ():
            yield url, summary


def _merged(name: str, summaries: Sequence[Summary], rate: float | None) -> Row:
    known = [summary["lag"] for summary in summaries if summary["lag"] is not None]
    ages = [summary["oldestSeconds"] for summary in summaries if summary["oldestSeconds"] is not None]
    return Row(
        name,
        rate,
        max(known, default=None),
        sum(summary["inFlight"] for summary in summaries),
        max(summary["attempts"] for summary in summaries),
        max((summary["breaker"]["state"] for summary in summaries), key=_BREAKER.index),
        max(ages, default=None),
        any(summary["paused"] for summary in summaries),
        next((summary["why"] for summary in summaries if summary["why"]), ""),
    )


def _ended(summary: Summary) -> int:
    return sum(summary["counts"].get(name, 0) for name in _ENDED)


def _trouble(row: Row) -> int:
    if row.breaker != "closed":
        return 3
    return 1 if row.paused else 2 * bool(row.why)


def _cells(row: Row) -> list[str]:
    numbers = (row.records_per_second, row.lag, row.in_flight, row.attempts)
    return [*map(_short, numbers), row.breaker, _age(row.oldest_seconds)]


def _line(name: str, cells: Sequence[str], width: int) -> str:
    wide = zip(cells, _COLUMNS.values(), strict=True)
    return "  ".join([_cut(name, width), *(cell.rjust(size) for cell, size in wide)])


def _wrapped(text: str, width: int) -> list[str]:
    """Return text as lines of at most so many columns."""
    from rich.console import Console
    from rich.text import Text

    shown = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return [line.plain for line in Text(shown).wrap(Console(), width)] if shown else []


def _cut(text: str, width: int) -> str:
    """Return text of exactly so many columns, on one line."""
    from rich.cells import cell_len, set_cell_size

    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return set_cell_size(shown, width - 1) + "…" if cell_len(shown) > width else set_cell_size(shown, width)


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
