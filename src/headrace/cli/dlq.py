"""`headrace dlq`: list, show, search, stats; what changes dead letters is in `dlq_redrive.py`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, get_args

import click
import msgspec

from headrace.cli.connection import ClusterSettings, kafka_options, registry_option
from headrace.cli.dlq_redrive import drop, quarantine, redrive
from headrace.cli.output import counted, print_rows
from headrace.cli.records import open_codecs
from headrace.cli.selection_options import selection_options, with_options
from headrace.control.dead_letter_pages import (
    DeadLetterPage,
    DeadLetterPages,
    DeadLetterRecord,
    Order,
    ScanOptions,
    State,
)
from headrace.control.selection import Selection
from headrace.kafka import Admin
from headrace.lifecycle import SystemClock

_OPTIONS = (
    click.option(
        "--state", type=click.Choice(get_args(State)), default="all", help="Dead letters that are left, or ended."
    ),
    click.option("--text", default="", help="What error class, reason or excerpt contain, in any case."),
)
_PAGED = (
    click.option("--max", "most", type=click.IntRange(1), default=10, show_default=True, help="Dead letters at most."),
    click.option("--order", type=click.Choice(get_args(Order)), default="newest", show_default=True, help="First."),
    click.option("--cursor", default="", help="Go on behind the page that gave it."),
)


@click.group()
def dlq() -> None:
    """Dead letters: how many are left and why, one by one, and back to where they came from.

    Example: headrace dlq redrive orders.dlq --dry-run
    """


for _command in (redrive, quarantine, drop):
    dlq.add_command(_command)


@dlq.command("list")
@click.argument("topic", required=False)
@kafka_options
async def list_(topic: str | None, cluster: ClusterSettings, output: str) -> None:
    """Say how many dead letters each dead letter topic has at most, how many are left, and from when they are.

    Looks at topics named *.dlq and *.quarantine, and with -c at those the file names. Reads no record, so compaction,
    transactions and records that are no dead letters make the numbers too large; stats counts dead letters.

    Example: headrace dlq list
    """
    async with _dead_letters(cluster) as dead_letters:
        rows = [msgspec.to_builtins(row) for row in await dead_letters.topics.counts(topic)]
    print_rows(rows, output, "no dead letter topics")


@dlq.command()
@click.argument("topic")
@selection_options
@with_options(_PAGED)
@with_options(_OPTIONS)
@kafka_options
@registry_option
async def show(topic: str, selection: Selection, cluster: ClusterSettings, output: str, **asked: Any) -> None:
    """Show dead letters: where each came from, what went wrong, its key and value.

    The options say which; a search ends at its limits, and says how to go on. `show` and `search` are one command.

    Example: headrace dlq search orders.dlq --error "HTTP 500" --since 2h
    """
    scan = _scan(asked)._replace(order=asked["order"], cursor=asked["cursor"])
    async with _dead_letters(cluster) as dead_letters:
        page = await dead_letters.page(topic, selection, scan, asked["most"])
    if output == "json":
        return _print(page)
    for dead_letter in page.dead_letters:
        click.echo(_block(topic, dead_letter) + "\n")
    click.echo(_went(page), err=bool(page.dead_letters))
    return None


dlq.add_command(show, "search")


@dlq.command()
@click.argument("topic")
@selection_options
@click.option("--bucket", "bucket_seconds", type=click.IntRange(1), default=3600, show_default=True, help="Seconds.")
@with_options(_OPTIONS)
@kafka_options
async def stats(
    topic: str, selection: Selection, bucket_seconds: int, cluster: ClusterSettings, output: str, **asked: Any
) -> None:
    """Count dead letters by error class, origin, status and time; by default those of the day before the newest.

    Example: headrace dlq stats orders.dlq --since 7d --bucket 86400
    """
    async with _dead_letters(cluster) as dead_letters:
        found = await dead_letters.statistics(topic, selection, _scan(asked), bucket_seconds)
    if output == "json":
        return _print(found)
    window = f"since {found.since}" if found.since else "in all"
    click.echo(f"{counted(found.dead_letters, 'dead letter')} in {topic} {window}, {found.left} left")
    for title in ("errors", "topics", "statuses", "times"):
        for name, count in getattr(found, title).items():
            click.echo(f"{title:10}{count:>8}  {name}")
    if found.partial:
        said = f"scanned {found.scanned} of up to {found.scanned + found.remaining}"
        click.echo(f"partial, the newest dead letters only: {said}; take a smaller window")
    return None


@contextlib.asynccontextmanager
async def _dead_letters(cluster: ClusterSettings) -> AsyncIterator[DeadLetterPages]:
    consumers = cluster.file.reactive_consumers.values() if cluster.file else ()
    async with open_codecs(cluster.registry) as codecs:
        yield DeadLetterPages(Admin(cluster.kafka), codecs, SystemClock(), consumers)


def _scan(asked: dict[str, Any]) -> ScanOptions:
    return ScanOptions(state=asked["state"], text=asked["text"])


def _print(found: msgspec.Struct) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))


def _block(topic: str, dead_letter: DeadLetterRecord) -> str:
    origin, result = dead_letter.origin, msgspec.to_builtins(dead_letter.result)
    lines = {
        "dead letter": f"{topic}-{dead_letter.partition} offset {dead_letter.offset}{', ended' * dead_letter.ended}",
        "origin": f"{origin.topic}-{origin.partition} offset {origin.offset}",
        "group": dead_letter.group,
        "attempts": dead_letter.attempts,
        "redrives": dead_letter.redrives,
        "first failure": dead_letter.first_failure,
        "last failure": dead_letter.last_failure,
        "error": dead_letter.error,
        "status": dead_letter.status,
        "reason": dead_letter.reason,
        **{f"result {name}": text for name, text in result.items()},
        f"key ({dead_letter.key_format})": bytes(dead_letter.key).decode(),
        f"value ({dead_letter.value_format})": bytes(dead_letter.value).decode(),
        "headers": ", ".join(f"{name}: {text}" for name, text in dead_letter.headers),
    }
    shown = [f"{name:16} {text}" for name, text in lines.items() if text not in ("", 0)]
    if dead_letter.stack_trace not in ("", dead_letter.reason, dead_letter.excerpt):
        shown += ["stack", *(f"  {line}" for line in dead_letter.stack_trace.splitlines())]
    return "\n".join(shown)


def _went(page: DeadLetterPage) -> str:
    said = f"scanned {page.scanned} of up to {page.scanned + page.remaining}, found {len(page.dead_letters)}"
    foreign = f"; {counted(page.foreign, 'record')} passed over: no dead letter" if page.foreign else ""
    if not page.scanned and not page.remaining:
        return f"no dead letters in {page.topic}"
    return said + foreign + (f"; go on with --cursor {page.cursor}" if page.cursor else "")
