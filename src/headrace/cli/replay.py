"""`headrace replay`: a window of a topic once more, to a backend, a function or a topic, over the HTTP API."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click
import msgspec

from headrace.cli.api import Api, api_options, part
from headrace.cli.jobs import print_job, watch
from headrace.cli.output import counted, print_json
from headrace.cli.selection_options import AliasedOption, Moment, Offsets, Rate
from headrace.control.selection import Selection


@click.command()
@click.argument("topic")
@click.option("--to-consumer", metavar="NAME", help="To the backend of this reactive consumer.")
@click.option("--to-function", metavar="NAME", help="To this function.")
@click.option("--to-topic", metavar="NAME", help="To this topic, as the records are.")
@click.option("--dead-letters", "dead_letter", is_flag=True, help="The dead letters of TOPIC, as what they were.")
@click.option("--partition", type=click.IntRange(0), help="Only this partition.")
@click.option("--offsets", type=Offsets(), help="From one offset to one (17-40), or one (17); needs --partition.")
@click.option(
    "--since",
    "--from",
    cls=AliasedOption,
    type=Moment(),
    help="From this time on: 2026-01-31T08:00, or an age such as 2h.",
)
@click.option("--until", type=Moment(), help="Before this time.")
@click.option("--rate", type=Rate(), help="Records per second at most.")
@click.option("--last-retry", is_flag=True, help="What fails is counted, and no dead letter again.")
@click.option("--dry-run", is_flag=True, help="Say what would be replayed.")
@click.option("--detach", is_flag=True, help="Do not wait for the end.")
@api_options
def replay(topic: str, api: Api, output: str, dry_run: bool, detach: bool, **chosen: Any) -> int:
    """Deliver a window of a topic once more; no group's offsets change.

    The receiver can tell it by the header X-Headrace-Replay, in a topic headrace.replay; ids of deliveries are the
    same as the first time. What fails goes the way of the consumer: attempts, then its dead letter topic.

    Ctrl-C only stops to look: the replay goes on (headrace jobs).

    Example: headrace replay orders --to-consumer billing --since 2h --rate 500
    """
    asked = _request(topic, **chosen)
    found = api.post("/adm/replays", {**asked, "dryRun": dry_run})
    if dry_run:
        if output == "json":
            print_json(found)
        else:
            ranges = found["spec"]["window"]["ranges"].items()
            places = ", ".join(f"{start} to {end - 1} of partition {number}" for number, (start, end) in ranges)
            click.echo(f"would replay {found['total']} offsets of {found['spec']['window']['topic']}: {places}")
        return 0
    return print_job(found, output) if detach else watch(api, found, output)


def _request(
    topic: str,
    offsets: tuple[int, int | None] | None,
    since: datetime | None,
    until: datetime | None,
    partition: int | None,
    **chosen: Any,
) -> dict[str, Any]:
    to = {kind: name for kind in ("consumer", "function", "topic") if (name := chosen.pop(f"to_{kind}"))}
    if len(to) != 1:
        raise click.UsageError("say where to: --to-consumer, --to-function or --to-topic, one of them")
    asked: dict[str, Any] = {"topic": topic, "to": to, "rate": chosen["rate"], "partition": partition}
    asked |= {"deadLetter": chosen["dead_letter"], "lastRetry": chosen["last_retry"]}
    if offsets is not None:
        first, last = offsets
        if partition is None or last is None:
            raise click.UsageError("--offsets takes the first and the last one, such as 17-40, and --partition")
        asked["offsets"] = {"start": first, "end": last + 1}
    times = {name: value.isoformat() for name, value in (("since", since), ("until", until)) if value is not None}
    return {**asked, "time": times} if times else asked


def redrive_to_backend(api: Api, topic: str, consumer: str, selection: Selection, **chosen: Any) -> int:
    """Have selected dead letters delivered to a consumer's backend, and watch that; returns the exit code."""
    texts = [*selection.keys, *selection.headers.values()]
    if any("\udc80" <= character <= "\udcff" for text in texts for character in text):
        raise click.UsageError("--to-backend takes keys and headers that are text")
    asked = {
        **msgspec.to_builtins(selection),
        "toConsumer": consumer,
        "rate": chosen["rate_records"],
        "maxRedrives": chosen["max_redrives"],
        "dryRun": chosen["dry_run"],
    }
    found = api.post(f"/adm/dead-letters/{part(topic)}/redrive", {n: v for n, v in asked.items() if v is not None})
    if not chosen["dry_run"]:
        return watch(api, found, chosen["output"])
    if chosen["output"] == "json":
        print_json(found)
    else:
        errors = ", ".join(f"{count} {error}" for error, count in found["errors"].items())
        click.echo(f"{counted(found['records'], 'letter')} of {topic} would go to {consumer}: {errors or 'none'}")
    return 0
