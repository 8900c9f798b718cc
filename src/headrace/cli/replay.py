"""`headrace replay`: delivers a range of a topic again to a backend, a function or a topic, over the HTTP API."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from headrace.cli.api import Api, api_options
from headrace.cli.jobs import print_job, watch
from headrace.cli.output import counted, print_json
from headrace.cli.selection_options import RateOption, span_options
from headrace.control.selection import Selection, Span
from headrace.web.routes.jobs import JobEndpoints


@click.command()
@click.argument("topic")
@click.option("--to-consumer", metavar="NAME", help="To the backend of this reactive consumer.")
@click.option("--to-function", metavar="NAME", help="To this function.")
@click.option("--to-topic", metavar="NAME", help="To this topic, unchanged.")
@click.option(
    "--dead-letters", "dead_letter", is_flag=True, help="The dead letters of TOPIC, as the records they were."
)
@span_options
@click.option("--rate", type=RateOption(), help="Records per second at most.")
@click.option("--last-retry", is_flag=True, help="Records that fail are counted and become no dead letters.")
@click.option("--dry-run", is_flag=True, help="Print what would be replayed.")
@click.option("--detach", is_flag=True, help="Do not wait for the end.")
@api_options
def replay(topic: str, api: Api, output: str, dry_run: bool, detach: bool, **chosen: Any) -> int:
    """Deliver a range of a topic again; no group's offsets change.

    Deliveries have the header X-Headrace-Replay, records in a topic headrace.replay; ids of deliveries are those of
    the first time. Records that fail are retried as the consumer is set up, and then go to its dead letter topic.

    Ctrl-C ends only the watching: the replay continues (headrace jobs).

    Example: headrace replay orders --to-consumer billing --since 2h --rate 500
    """
    found = api.call(JobEndpoints.replay, {**_request(topic, **chosen), "dryRun": dry_run})
    if dry_run:
        if output == "json":
            print_json(found)
        else:
            ranges = found["spec"]["window"]["ranges"].items()
            parts = ", ".join(f"{start} to {end - 1} of partition {number}" for number, (start, end) in ranges)
            click.echo(f"would replay {found['total']} offsets of {found['spec']['window']['topic']}: {parts}")
        return 0
    return print_job(found, output) if detach else watch(api, found, output)


def _request(topic: str, span: Span, rate: float | None, **chosen: Any) -> dict[str, Any]:
    to = {kind: name for kind in ("consumer", "function", "topic") if (name := chosen[f"to_{kind}"])}
    if len(to) != 1:
        raise click.UsageError("say where to: --to-consumer, --to-function or --to-topic, one of them")
    request: dict[str, Any] = {"topic": topic, "to": to, "rate": rate, "partition": span.partition}
    request |= {"deadLetter": chosen["dead_letter"], "lastRetry": chosen["last_retry"]}
    if span.first is not None:
        if span.last is None:
            raise click.UsageError("--offsets takes the first and the last one, such as 17-40, and --partition")
        request["offsets"] = {"start": span.first, "end": span.last + 1}
    bounds = (("since", span.since), ("until", span.until))
    times = {name: moment.isoformat() for name, moment in bounds if moment is not None}
    return {**request, "time": times} if times else request


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
    found = api.call(JobEndpoints.redrive, {n: v for n, v in asked.items() if v is not None}, topic=topic)
    if not chosen["dry_run"]:
        return watch(api, found, chosen["output"])
    if chosen["output"] == "json":
        print_json(found)
    else:
        errors = ", ".join(f"{count} {error}" for error, count in found["errors"].items())
        click.echo(f"{counted(found['records'], 'dead letter')} of {topic} would go to {consumer}: {errors or 'none'}")
    return 0
