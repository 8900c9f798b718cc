"""Output of commands: aligned columns or JSON on standard output, progress on a terminal's standard error."""

import contextlib
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from headrace.errors import HeadraceError


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_result(value: Any, text: str, output: str) -> None:
    """Print a result: as JSON, or the text for people."""
    if output == "json":
        print_json(value)
    else:
        click.echo(text)


def print_rows(rows: Sequence[Mapping[str, Any]], output: str, empty: str) -> None:
    """Print rows that have the same keys: a JSON array, or columns under the keys; `empty` if there are none."""
    if output == "json":
        print_json(rows)
    elif not rows:
        click.echo(empty)
    else:
        names = [name.upper().replace("_", " ") for name in rows[0]]
        print_columns([names, *([cell(v) for v in row.values()] for row in rows)])


def print_columns(lines: Sequence[Sequence[str]]) -> None:
    """Print lines of the same number of cells, aligned; control characters are escaped."""
    for line in aligned(lines):
        click.echo(line)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of the same number of cells with aligned columns; control characters are escaped."""
    lines = [[*map(printable, line)] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)).rstrip() for line in lines]


def counted(number: int, noun: str) -> str:
    """Return `1 record`, `2 records`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar on a terminal, nothing in a file or pipe.

    Yields:
        A function that takes the number done and the total (None: unknown).
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    with _bar(MofNCompleteColumn(), TimeElapsedColumn()) as update:
        yield lambda done, total: update(description=doing, completed=done, total=total)


@contextlib.contextmanager
def install_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show the downloads of a first start: a progress bar on a terminal, a line per step in a file or pipe.

    Yields:
        A `headrace_jvm.Progress`.
    """
    reported: set[str] = set()

    def report(what: str, done: int, total: int) -> None:
        if what not in reported:
            reported.add(what)
            click.echo(what + (f" ({total / 1e6:.0f} MB)" if total else ""), err=True)

    if not sys.stderr.isatty():
        yield report
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(DownloadColumn(), TransferSpeedColumn()) as update:
        yield lambda what, done, total: update(description=what, completed=done, total=total or None)


@contextlib.contextmanager
def _bar(*columns: Any) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        yield functools.partial(bar.update, bar.add_task("", total=None))


def printable(text: str) -> str:
    """Escape control characters: the text may be from an untrusted record."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def cell(value: Any) -> str:
    """Return a value as the text of a cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or "-"
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def print_check(error: type[HeadraceError], problems: list[str], warnings: list[str], fine: str, output: str) -> None:
    """Print the result of a check; raise the problems as an error of the given class, or print `fine`."""
    if output == "json":
        print_json({"ok": not problems, "problems": problems, "warnings": warnings})
    else:
        for text in warnings:
            if text not in problems:
                click.echo(f"warning: {text}", err=True)
    if problems:
        raise error("\n".join(problems))
    if output == "text":
        click.echo(fine)


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect the texts of logged warnings without duplicates."""
    found: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.levelno >= logging.WARNING and text not in found:
            found.append(text)
        return False

    handler, logger = logging.Handler(), logging.getLogger("headrace")
    handler.addFilter(collect)
    logger.addHandler(handler)
    logger.propagate, before = False, logger.propagate
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
