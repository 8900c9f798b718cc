"""`headrace dlq`: redrive, quarantine, drop; one run over dead letters, and what becomes of them differs."""

from __future__ import annotations

import asyncio
import gc
import getpass
import socket
import sys
from typing import Any

import click
import msgspec

from headrace.cli.api import Api, address_of
from headrace.cli.connection import ClusterSettings, kafka_options, open_producer
from headrace.cli.output import counted, print_json, progress
from headrace.cli.replay import redrive_to_backend
from headrace.cli.selection_options import RateOption, selection_options, with_options
from headrace.config.internal_topics import InternalTopics
from headrace.config.model import HeadraceConfig
from headrace.control.origins import Origins
from headrace.control.redrive import Redrive
from headrace.control.redrive_spec import Redriven, RedriveOptions, RedriveSpec, Target
from headrace.control.selection import Selection
from headrace.delivery.dead_letter import MAX_REDRIVES
from headrace.errors import ConfigError
from headrace.functions.load import load_function
from headrace.functions.spec import triggers_of
from headrace.kafka import Admin
from headrace.lifecycle import SystemClock

_COLLECT_AFTER = 200_000, 50, 100
"""Dead letters are many small objects that live shortly; looking through them every 700 took half of the time."""
_VERBS = {
    "origin": ("redrive", "would go back", "back and acknowledged"),
    "tier": ("redrive", "would be sent", "sent and acknowledged"),
    "quarantine": ("quarantine", "would be moved", "moved and acknowledged"),
    "drop": ("drop", "would be dropped", "dropped"),
}


_OPTIONS = (
    click.option("--dry-run", is_flag=True, help="Say what would go where, and of which errors and hours it is."),
    click.option("--rate", "rate_records", type=RateOption(), help="Dead letters a second at most."),
    click.option("--exactly-once", is_flag=True, help="In transactions: a run that is killed repeats nothing."),
    click.option(
        "--wait",
        "wait_seconds",
        type=click.FloatRange(0),
        default=0.0,
        help="Seconds to wait for another run on the topic; one that was killed is counted out after 10.",
    ),
)


@click.command()
@click.argument("topic")
@click.option("--to-backend", metavar="CONSUMER", help="Have a running Headrace give them to its backend (--url).")
@click.option("--to-tier", type=click.IntRange(1), metavar="DELAY", help="Send them to a retry tier of --consumer.")
@click.option("--consumer", help="Reactive consumer in the file of -c; only dead letters of its group are sent.")
@click.option("--url", envvar="HEADRACE_URL", help="Base URL of that Headrace.")
@click.option("--token", envvar="HEADRACE_TOKEN", default="", help="Token for it; better in HEADRACE_TOKEN.")
@click.option("--max-redrives", type=click.IntRange(1), default=MAX_REDRIVES, show_default=True, help="See above.")
@selection_options
@with_options(_OPTIONS)
@kafka_options
async def redrive(
    topic: str,
    cluster: ClusterSettings,
    output: str,
    selection: Selection,
    to_tier: int | None,
    consumer: str | None,
    **chosen: Any,
) -> int:
    """Send dead letters back to the partitions they came from, with the key, value and headers they had.

    Each dead letter is marked when it is acknowledged, so a later redrive takes what is left. One that is killed sends
    at most 2,000 dead letters again (with --rate, one second of it), with --exactly-once none. Dead letters that arrive
    meanwhile wait for the next redrive. Every group that reads the topic gets the records again; no group's offsets
    change.

    A dead letter goes back only to a topic that its consumer reads, as the configuration says (-c). Without one it goes
    back only to the topic that its dead letter topic is named after. A record that was redriven --max-redrives times
    already is kept back.

    Example: headrace dlq redrive orders.dlq --error "HTTP 400" --since 2h --rate 100
    """
    to_backend, url, token = (chosen.pop(name) for name in ("to_backend", "url", "token"))
    if to_backend:
        if to_tier or chosen["exactly_once"]:
            raise click.UsageError("--to-backend takes conditions, --rate and --dry-run, and no other option")
        api = Api(url or address_of(cluster.file), token)
        return redrive_to_backend(api, topic, to_backend, selection, output=output, **chosen)
    target = Target()
    if to_tier or consumer:
        target, group = _tier(cluster, consumer, to_tier)
        selection = msgspec.structs.replace(selection, groups=[group])
    return await _run(topic, cluster, output, selection, target, **chosen)


@click.command()
@click.argument("topic")
@click.option("--reason", default="", help="Why; stands in each dead letter.")
@selection_options
@with_options(_OPTIONS)
@kafka_options
async def quarantine(
    topic: str, cluster: ClusterSettings, output: str, selection: Selection, reason: str, **chosen: Any
) -> int:
    """Move dead letters to the topic TOPIC.quarantine, as they are, where no redrive of TOPIC finds them.

    It is made like TOPIC if it is missing, and is a dead letter topic itself: list, show and redrive it by its name.

    Example: headrace dlq quarantine orders.dlq --header tenant=acme --reason "see ticket 17"
    """
    return await _run(topic, cluster, output, selection, Target("quarantine", reason=reason), **chosen)


@click.command()
@click.argument("topic")
@click.option("--reason", required=True, help="Why; stands beside the marks.")
@click.option("--yes", is_flag=True, help="Do not ask, on a terminal.")
@selection_options
@with_options(_OPTIONS)
@kafka_options
async def drop(
    topic: str, cluster: ClusterSettings, output: str, selection: Selection, reason: str, yes: bool, **chosen: Any
) -> int:
    """Mark dead letters as ended and send them nowhere. They stay readable until the topic's retention ends.

    Example: headrace dlq drop orders.dlq --error DecodeError --until 2026-01-31 --reason "test data" --dry-run
    """
    if sys.stdout.isatty() and not yes and not chosen["dry_run"]:
        click.confirm(f"Give up the selected dead letters of {topic}? --dry-run says which", abort=True, err=True)
    return await _run(topic, cluster, output, selection, Target("drop", reason=reason), **chosen)


def _tier(cluster: ClusterSettings, name: str | None, delay_seconds: int | None) -> tuple[Target, str]:
    """Return a consumer's tier, and its group."""
    if not cluster.file or not name or not delay_seconds:
        raise click.UsageError("a tier is named by --to-tier DELAY, --consumer NAME, and -c with its file")
    consumer = cluster.file.reactive_consumers.get(name)
    if consumer is None:
        known = ", ".join(cluster.file.reactive_consumers) or "none"
        raise ConfigError(f"the file has no reactive consumer {name}; it has: {known}")
    if delay_seconds not in consumer.retry.tiers:
        known = ", ".join(map(str, consumer.retry.tiers)) or "none"
        raise ConfigError(f"consumer {name} has no tier of {delay_seconds} s; its retry.tiers: {known}")
    topic = consumer.retry.tier_topics(consumer.group)[consumer.retry.tiers.index(delay_seconds)]
    return Target("tier", topic, delay_seconds), consumer.group


async def _run(
    topic: str, cluster: ClusterSettings, output: str, selection: Selection, target: Target, **chosen: Any
) -> int:
    options = RedriveOptions(by=f"{getpass.getuser()}@{socket.gethostname()}", **chosen)
    doing, *_ = _VERBS[target.kind]
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    spec, origins = RedriveSpec(topic, selection, target, options), _origins(cluster.file or HeadraceConfig())
    with progress(f"{doing} {topic}") as show_progress:

        async def on_progress(done: int, total: int) -> None:
            show_progress(done, total)

        async with open_producer(cluster.kafka) as producer:
            run = Redrive(Admin(cluster.kafka), producer.produce, SystemClock(), spec, origins)
            done = await run.run(asyncio.Event(), on_progress)
    if output == "json":
        print_json({"topic": topic, "dry_run": options.dry_run, **msgspec.structs.asdict(done)})
    else:
        _print(topic, target, options, done)
    return 1 if done.too_large or done.unproved else 0


def _origins(file: HeadraceConfig) -> Origins:
    return Origins(InternalTopics(file, triggers_of(load_function(function) for function in file.functions)))


def _print(topic: str, target: Target, options: RedriveOptions, done: Redriven) -> None:
    doing, would, did = _VERBS[target.kind]
    if done.records:
        places = ", ".join(f"{count} to {name}" for name, count in sorted(done.targets.items()))
        text = f"{counted(done.records, 'dead letter')} of {topic} {would if options.dry_run else did}"
        text += f": {places}" if places else ""
    else:
        text = f"nothing left to {doing} in {topic}"
    if done.kept_back:
        text += f"; {done.kept_back} kept back: redriven {options.max_redrives} times or more"
    click.echo(text)
    if options.dry_run and done.records:
        width = max(len(value) for value in (*done.errors, *done.hours))
        for name, counts in (("error", done.errors), ("hour", done.hours)):
            for value, count in counts.items():
                bar = "#" * max(1, round(30 * count / max(counts.values())))
                click.echo(f"  {name:5}  {value:{width}}  {count:>9}  {bar}")
    unproved = [f"{counted(count, 'dead letter')}: {why}" for why, count in done.unproved.items()]
    for line in (*done.too_large, *unproved):
        click.echo(f"not sent: {line}", err=True)
