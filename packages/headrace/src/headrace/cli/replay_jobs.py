"""`headrace jobs` and `headrace replay`, over the HTTP API; and following a job until it is finished."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import click
import msgspec

from headrace.cli.api import Api, api_options
from headrace.cli.global_options import HeadraceCommand, HeadraceGroup
from headrace.cli.options import RATE, span_options
from headrace.cli.output import print_result, print_rows, progress
from headrace.runs.routes import JobEndpoints
from headrace.runs.selection import Span

_FINISHED = ("done", "failed", "stopped")
_POLL_SECONDS = 0.5
"""Interval between two requests for the state of a job."""


@click.group(cls=HeadraceGroup)
def jobs() -> None:
    """Jobs: replays, and redrives, drops and quarantines of dead letters over HTTP.

    A job resumes after a restart of its process, or in another process.

    Example: headrace jobs show
    """


@jobs.command()
@click.argument("job", required=False)
@click.option("--follow", "following", is_flag=True, help="Watch it until it is finished.")
@api_options
def show(job: str | None, following: bool, api: Api, output: str) -> int:
    """Show the progress of a job, or without JOB list all of them, the newest first.

    Example: headrace jobs show replay-0f1e2d3c4b --follow
    """
    if job is None:
        if following:
            raise click.UsageError("--follow needs a JOB: headrace jobs show lists them")
        listed = api.call(JobEndpoints.list)["jobs"]
        print_rows(listed if output == "json" else [_row(one) for one in listed], output, "no jobs")
        return 0
    found = api.call(JobEndpoints.show, job=job)
    return print_job(follow(api, found) if following else found, output)


def _step(name: str, text: str) -> Callable[..., Any]:
    @click.argument("job")
    @api_options
    def step(job: str, api: Api, output: str) -> int:
        return print_job(api.call(JobEndpoints.change, job=job, action=name), output)

    step.__doc__ = f"{text}\n\n    Example: headrace jobs {name} replay-0f1e2d3c4b\n    "
    return jobs.command(name)(step)


_step("pause", "Pause a job; deliveries in flight finish first.")
_step("resume", "Resume a paused job.")
_step("stop", "Stop a job permanently; completed records stay completed.")


@click.command(cls=HeadraceCommand)
@click.argument("topic")
@click.option("--to-consumer", metavar="NAME", help="To the backend of this reactive consumer.")
@click.option("--to-function", metavar="NAME", help="To this function.")
@click.option("--to-topic", metavar="NAME", help="To this topic, unchanged.")
@span_options
@click.option("--rate", type=RATE, help="Maximum records per second.")
@click.option("--last-retry", is_flag=True, help="Count records that fail, and write no dead letters for them.")
@click.option("--dry-run", is_flag=True, help="Print what would be replayed.")
@click.option("--detach", is_flag=True, help="Do not wait until the job is finished.")
@api_options
def replay(topic: str, api: Api, output: str, dry_run: bool, detach: bool, **chosen: Any) -> int:
    """Deliver a range of a topic again; no group's offsets change.

    Deliveries have the header X-Headrace-Replay, records in a topic the header headrace.replay. Delivery ids are the
    same as the first time. The consumer's settings for retries and dead letters apply.

    After Ctrl-C the replay continues as a job (headrace jobs).

    Example: headrace replay orders --to-consumer billing --since 2h --rate 500
    """
    found = api.call(JobEndpoints.replay, {**_request(topic, **chosen), "dryRun": dry_run})
    if not dry_run:
        return print_job(found if detach else follow(api, found), output)
    window = found["spec"]["window"]
    parts = [f"{start} to {end - 1} of partition {number}" for number, (start, end) in window["ranges"].items()]
    print_result(found, f"would replay {found['total']} offsets of {window['topic']}: {', '.join(parts)}", output)
    return 0


def _request(topic: str, span: Span, rate: float | None, **chosen: Any) -> dict[str, Any]:
    to = {kind: name for kind in ("consumer", "function", "topic") if (name := chosen[f"to_{kind}"])}
    if len(to) != 1:
        raise click.UsageError("pass exactly one of --to-consumer, --to-function and --to-topic")
    where = msgspec.to_builtins(span)
    return {**where, "topic": topic, "to": to, "rate": rate, "lastRetry": chosen["last_retry"]}


def follow(api: Api, job: dict[str, Any]) -> dict[str, Any]:
    """Show a progress bar until a job is finished or paused, and return it.

    An interrupt does not stop the job; it prints how to do that.
    """
    name = job["id"]
    try:
        with progress(f"{job['kind']} {_topic(job)}") as show_progress:
            while job["state"] not in (*_FINISHED, "paused"):
                time.sleep(_POLL_SECONDS)
                job = api.call(JobEndpoints.show, job=name)
                show_progress(job["progress"].get("done", 0), job["progress"].get("total"))
    except KeyboardInterrupt:
        click.echo(f"{name} is still running: to end it, headrace jobs pause {name}, or stop", err=True)
        raise
    return job


def print_job(job: Mapping[str, Any], output: str) -> int:
    """Print a job; returns the exit code, 1 if it failed."""
    row = {**_row(job), "records": job["progress"].get("counts") or job["progress"].get("targets")}
    lines = [f"{name:9} {_text(value)}" for name, value in row.items() if value not in (None, "")]
    print_result(job, "\n".join(lines), output)
    return int(job["state"] == "failed")


def _row(job: Mapping[str, Any]) -> dict[str, Any]:
    done, total = (job["progress"].get(name) for name in ("done", "total"))
    row = {"job": job["id"], "kind": job["kind"], "state": job["state"], "topic": _topic(job)}
    row["done"] = "" if total is None else f"{done} of {total}"
    return row | {name: job[name] for name in ("by", "since", "message")}


def _topic(job: Mapping[str, Any]) -> str:
    spec = job["spec"]
    return str(spec.get("topic") or spec.get("window", {}).get("topic", ""))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in value.items() if count) or "none"
    return str(value)
