"""What commands print: aligned columns or JSON on standard output, progress on a terminal's standard error."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

output_option = click.option(
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Form of what is printed on standard output.",
)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_rows(rows: Sequence[Mapping[str, Any]], output: str, empty: str) -> None:
    """Print rows that have the same keys: a JSON array, or columns under the keys.

    Args:
        rows: Key to value, in the order of the columns.
        output: `text` or `json`.
        empty: What text says when there are no rows.
    """
    if output == "json":
        print_json(rows)
    elif not rows:
        click.echo(empty)
    else:
        lines = [
            [name.upper().replace("_", " ") for name in rows[0]],
            *([_cell(v) for v in row.values()] for row in rows),
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(len(rows[0]))]
        for line in lines:
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def counted(number: int, noun: str) -> str:
    """Return `1 record`, `2 records`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar on a terminal, nothing elsewhere.

    Yields:
        A function that takes how much is done and how much there is (None: nobody knows).
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or "-"
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)
