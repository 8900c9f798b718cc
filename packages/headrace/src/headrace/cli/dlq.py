"""`headrace dlq`: reads dead letters from Kafka; redrives, moves and drops them, here or in a running Headrace."""

import contextlib
import gc
import getpass
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click
import msgspec

from headrace.cli.api import Api, address_of
from headrace.cli.cluster_options import ClusterSettings, kafka_options, registry_options
from headrace.cli.command_codecs import open_codecs
from headrace.cli.global_options import HeadraceGroup, uses
from headrace.cli.options import PERCENT, RATE, TIMES, selection_options, with_options
from headrace.cli.output import counted, print_json, print_rows, progress
from headrace.cli.replay_jobs import follow, print_job
from headrace.cli.trust import certificates_of, trust
from headrace.config.whole_file import WholeFile
from headrace.delivery.dead_letter import MAX_REDRIVES
from headrace.errors import HeadraceError
from headrace.kafka import Admin
from headrace.runs.dead_letter_jobs import DRY_RUN_SECONDS, Kind
from headrace.runs.dead_letters.pages import (
    DeadLetterPage,
    DeadLetterPages,
    DeadLetterRecord,
    Order,
    ScanOptions,
    State,
)
from headrace.runs.redrive_spec import Redriven
from headrace.runs.routes import JobEndpoints
from headrace.runs.selection import Selection
from headrace.runtime import LoopThread, SystemClock


@click.group(cls=HeadraceGroup, aliases={"search": "show"})
def dlq() -> None:
    """Count, show, redrive, quarantine and drop dead letters.

    Example: headrace dlq redrive orders.dlq --dry-run
    """


@dlq.command("list")
@click.argument("topic", required=False)
@kafka_options
async def list_(topic: str | None, cluster: ClusterSettings, output: str) -> None:
    """List dead letter topics with the number of dead letters, how many are left, and their times.

    Lists topics named *.dlq and *.quarantine, and with -c those that the file names. The numbers are upper bounds,
    because transactions, compaction and other records take offsets; stats counts dead letters.

    Example: headrace dlq list
    """
    async with _pages(cluster) as pages:
        found = await pages.topics.counts(topic)
    rows = [msgspec.to_builtins(row) if output == "json" else msgspec.structs.asdict(row) for row in found]
    print_rows(rows, output, "no dead letter topics")


@dlq.command()
@click.argument("topic")
@selection_options
@click.option("--max", "most", type=click.IntRange(1), default=10, show_default=True, help="Maximum dead letters.")
@click.option("--order", type=click.Choice(get_args(Order)), default="newest", show_default=True, help="First.")
@click.option("--cursor", default="", help="Start after the page that printed it.")
@click.option("--state", type=click.Choice(get_args(State)), default="all", help="Left or completed.")
@click.option("--text", default="", help="Text in error class, reason or excerpt, in upper or lower case.")
@registry_options
async def show(
    topic: str, selection: Selection, most: int, cluster: ClusterSettings, output: str, **options: Any
) -> None:
    """Show dead letters with their origin, failure, key and value.

    The options select them. At its limits, a search prints how to continue. `search` is the same command.

    Example: headrace dlq show orders.dlq --error "HTTP 500" --since 2h
    """
    async with _pages(cluster) as pages:
        page = await pages.page(topic, selection, ScanOptions(**options), most)
    if output == "json":
        return _print(page)
    for dead_letter in page.dead_letters:
        click.echo(_block(topic, dead_letter) + "\n")
    click.echo(_summary(page), err=bool(page.dead_letters))
    return None


@dlq.command()
@click.argument("topic")
@with_options(*TIMES)
@kafka_options
async def stats(
    topic: str, since: datetime | None, until: datetime | None, cluster: ClusterSettings, output: str
) -> None:
    """Count dead letters by error class, origin, status and hour; by default of the day before the newest.

    A window of more than two days is counted by day in place of hour.

    Example: headrace dlq stats orders.dlq --since 7d
    """
    async with _pages(cluster) as pages:
        found = await pages.statistics(topic, Selection(since=since, until=until), ScanOptions())
    if output == "json":
        return _print(found)
    window = f"since {found.since}" if found.since else "in all"
    click.echo(f"{counted(found.dead_letters, 'dead letter')} in {topic} {window}, {found.left} left")
    for title in ("errors", "topics", "writers", "statuses", "times"):
        for name, count in getattr(found, title).items():
            if (title, name) != ("writers", "headrace"):
                click.echo(f"{title:10}{count:>8}  {name}")
    if found.partial:
        summary = f"scanned {found.scanned} of up to {found.scanned + found.remaining}"
        click.echo(f"partial, the newest dead letters only: {summary}; use a smaller window")
    return None


@contextlib.asynccontextmanager
async def _pages(cluster: ClusterSettings) -> AsyncIterator[DeadLetterPages]:
    async with open_codecs(cluster.registry) as codecs:
        yield DeadLetterPages(Admin(cluster.kafka), codecs, SystemClock(), cluster.file or WholeFile())


def _print(found: msgspec.Struct) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))


def _block(topic: str, found: DeadLetterRecord) -> str:
    origin, fields = found.origin, msgspec.structs.asdict(found)
    named = ("group", "attempts", "redrives", "first_failure", "last_failure", "error", "status", "reason")
    lines = {
        "dead letter": f"{topic}-{found.partition} offset {found.offset}{', completed' * found.completed}",
        "writer": "" if found.writer == "headrace" else found.writer,
        "origin": f"{origin.topic}-{origin.partition} offset {origin.offset}",
        **{name.replace("_", " "): fields[name] for name in named},
        **{f"result {name}": text for name, text in msgspec.to_builtins(found.result).items()},
        f"key ({found.key_format})": bytes(found.key).decode(),
        f"value ({found.value_format})": bytes(found.value).decode(),
        "headers": ", ".join(f"{name}: {text}" for name, text in found.headers),
    }
    shown = [f"{name:16} {text}" for name, text in lines.items() if text not in ("", 0)]
    if found.stack_trace not in ("", found.reason, found.excerpt):
        shown += ["stack", *(f"  {line}" for line in found.stack_trace.splitlines())]
    return "\n".join(shown)


def _summary(page: DeadLetterPage) -> str:
    summary = f"scanned {page.scanned} of up to {page.scanned + page.remaining}, found {len(page.dead_letters)}"
    foreign = f"; skipped {counted(page.foreign, 'record')} that are not dead letters" if page.foreign else ""
    if not page.scanned and not page.remaining:
        return f"no dead letters in {page.topic}"
    return summary + foreign + (f"; continue with --cursor {page.cursor}" if page.cursor else "")


_RATE = click.option("--rate", type=RATE, help="Maximum dead letters per second.")
_EXACTLY_ONCE = click.option("--exactly-once", is_flag=True, help="Write in transactions: a kill repeats nothing.")
_RUN = (
    selection_options,
    click.option("--dry-run", is_flag=True, help="Only print what would be done, by error and hour."),
    uses("url", "ca"),
    kafka_options,
)
_ENDPOINTS = {"redrive": JobEndpoints.redrive, "drop": JobEndpoints.drop, "quarantine": JobEndpoints.quarantine}
_VERBS = {
    "redrive": ("redrive", "would go back", "back and acknowledged"),
    "quarantine": ("quarantine", "would be moved", "moved and acknowledged"),
    "drop": ("drop", "would be dropped", "dropped"),
}


class _RunOptions(NamedTuple):
    """Options of every run over dead letters."""

    cluster: ClusterSettings
    selection: Selection
    dry_run: bool
    url: str | None
    ca: Path | None
    output: str
    rate: float | None = None
    exactly_once: bool = False


@dlq.command()
@click.argument("topic")
@click.option("--to-backend", metavar="CONSUMER", help="A running Headrace (--url) delivers them to its backend.")
@click.option("--max-redrives", type=click.IntRange(1), default=MAX_REDRIVES, show_default=True, help="See above.")
@click.option("--from-origin", is_flag=True, help="Read records at their origin where a dead letter has no full copy.")
@click.option(
    "--stop-at-failures", type=PERCENT, metavar="PERCENT", help="Stop when a larger share is refused or returns."
)
@with_options(_RATE, _EXACTLY_ONCE, *_RUN)
def redrive(topic: str, to_backend: str | None, max_redrives: int, **chosen: Any) -> int:
    """Send dead letters back to their original partitions, with the key, value and headers they had.

    A dead letter is saved as completed when its record is acknowledged, so a redrive may be repeated for what is left:
    with other conditions, or after an interruption. If it is killed, the next one sends at most 2,000 dead letters
    again (with --rate, those of one second), with --exactly-once none. Dead letters that arrive meanwhile wait for the
    next redrive. Every group that reads the topic gets the records again; no group's offsets change.

    A dead letter goes back only to a topic that its consumer reads according to the configuration (-c). Without a
    configuration it goes back only to the topic that its dead letter topic is named after. A record that was already
    redriven --max-redrives times is kept back.

    The command uses your rights in Kafka; with --url, a running Headrace uses its own.

    Example: headrace dlq redrive orders.dlq --error "HTTP 400" --since 2h --rate 100
    """
    policy = {"fromOrigin": chosen.pop("from_origin"), "stopAtFailures": chosen.pop("stop_at_failures")}
    options, request = _RunOptions(**chosen), {"maxRedrives": max_redrives, **policy}
    if not to_backend:
        return _run("redrive", topic, request, options)
    if options.exactly_once:
        raise click.UsageError("--to-backend allows only conditions, --rate and --dry-run")
    url = options.url or os.environ.get("HEADRACE_URL") or address_of(options.cluster.file, management=True)
    return _run("redrive", topic, {**request, "toConsumer": to_backend}, options._replace(url=url))


@dlq.command()
@click.argument("topic")
@click.option("--reason", default="", help="Stored in each dead letter.")
@with_options(_EXACTLY_ONCE, *_RUN)
def quarantine(topic: str, reason: str, **chosen: Any) -> int:
    """Move dead letters unchanged to the topic TOPIC.quarantine, where no redrive of TOPIC finds them.

    The topic is created like TOPIC if it is missing. It is a dead letter topic itself: list, show and redrive it by its
    name.

    Example: headrace dlq quarantine orders.dlq --header tenant=acme --reason "see issue 17"
    """
    return _run("quarantine", topic, {"reason": reason}, _RunOptions(**chosen))


@dlq.command()
@click.argument("topic")
@click.option("--reason", required=True, help="Stored with the completed offsets.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation on a terminal.")
@with_options(*_RUN)
def drop(topic: str, reason: str, yes: bool, **chosen: Any) -> int:
    """Drop dead letters: save them as completed without sending them. They stay readable during the topic's retention.

    Example: headrace dlq drop orders.dlq --error DecodeError --until 2026-01-31 --reason "test data" --dry-run
    """
    if sys.stdout.isatty() and not yes and not chosen["dry_run"]:
        click.confirm(f"Drop the selected dead letters of {topic}? --dry-run counts them", abort=True, err=True)
    return _run("drop", topic, {"reason": reason}, _RunOptions(**chosen))


def _run(kind: Kind, topic: str, request: Mapping[str, Any], options: _RunOptions) -> int:
    """Run it here, or as a job of the Headrace at the URL; wait until it is finished and print the result."""
    selection, dry_run = options.selection, options.dry_run
    texts = [*selection.keys, *selection.headers.values()]
    if any("\udc80" <= character <= "\udcff" for text in texts for character in text):
        raise click.UsageError("--key and --header must be UTF-8 text")
    body = {**msgspec.to_builtins(selection), **request}
    body |= {"dryRun": dry_run, "rate": options.rate, "exactlyOnce": options.exactly_once}
    if options.url is None:
        done = _run_here(kind, topic, body, options)
    else:
        own = certificates_of(options.cluster.file) if options.url.startswith(address_of(options.cluster.file)) else []
        api = Api(options.url, 2 * DRY_RUN_SECONDS, tls=trust(options.ca, own))
        found = api.call(_ENDPOINTS[kind], body, topic=topic)
        if not dry_run:
            found = follow(api, found)
        if "toConsumer" in request:
            if dry_run and options.output == "json":
                print_json(found)
                return 0
            if not dry_run:
                return print_job(found, options.output)
        if not dry_run and found["state"] != "done":
            state = f"job {found['id']} is {found['state']}: headrace jobs show {found['id']}"
            raise HeadraceError(found["message"] or state)
        done = msgspec.convert(found if dry_run else found["progress"], Redriven)
    if options.output == "json":
        print_json({"topic": topic, "dry_run": dry_run, **msgspec.structs.asdict(done)})
    else:
        _print_run(kind, topic, body, done)
    return 1 if done.too_large or done.unproved or done.stopped else 0


def _run_here(kind: Kind, topic: str, body: dict[str, Any], options: _RunOptions) -> Redriven:
    """Run it inside the command; an interrupt ends it early, with the completed offsets saved."""
    from headrace.app.command import CommandRuns  # imports all that a process needs, unlike other commands

    logging.getLogger("headrace.runtime.supervisor").setLevel(logging.CRITICAL)
    gc.freeze()
    config = (options.cluster.file or WholeFile()).model_copy(update={"kafka": options.cluster.kafka})

    async def start() -> CommandRuns:
        runs = CommandRuns(config, f"{getpass.getuser()}@{socket.gethostname()}")
        await runs.start()
        return runs

    thread = LoopThread("headrace")
    runs = thread.call(start())
    try:
        with progress(f"{kind} {topic}") as show_progress:

            async def on_progress(done: int, total: int) -> None:
                if not options.dry_run:
                    show_progress(done, total)

            return thread.call(runs.run(kind, topic, body, on_progress))
    except KeyboardInterrupt:
        click.echo("stopping after the records in flight; press Ctrl-C again to stop at once", err=True)
        raise
    finally:
        thread.call(runs.stop())
        thread.stop()


def _print_run(kind: str, topic: str, body: Mapping[str, Any], done: Redriven) -> None:
    doing, would, did = _VERBS[kind]
    if done.records:
        targets = ", ".join(f"{count} to {name}" for name, count in sorted(done.targets.items()))
        text = f"{counted(done.records, 'dead letter')} of {topic} {would if body['dryRun'] else did}"
        text += f": {targets}" if targets else ""
    else:
        text = f"nothing left to {doing} in {topic}"
    if done.kept_back:
        text += f"; {done.kept_back} kept back: redriven {body['maxRedrives']} times or more"
    text += f"; {done.failed_again} failed again" if done.failed_again else ""
    click.echo(text)
    if body["dryRun"] and done.records:
        width = max(len(value) for value in (*done.errors, *done.hours))
        for name, counts in (("error", done.errors), ("hour", done.hours)):
            for value, count in counts.items():
                bar = "#" * max(1, round(30 * count / max(counts.values())))
                click.echo(f"  {name:5}  {value:{width}}  {count:>9}  {bar}")
    unproved = [f"{counted(count, 'dead letter')}: {why}" for why, count in done.unproved.items()]
    for line in (*done.too_large, *unproved):
        click.echo(f"not sent: {line}", err=True)
    if done.stopped:
        click.echo(f"stopped: {done.stopped}", err=True)
