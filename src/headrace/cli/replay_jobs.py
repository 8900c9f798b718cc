"""`headrace jobs` and `headrace replay`, over the HTTP API; and following a job until it has ended."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from headrace.cli.api import Api, api_options
from headrace.cli.options import RATE, span_options
from headrace.cli.output import print_result, print_rows, progress
from headrace.control.runs.routes import JobEndpoints
from headrace.control.runs.selection import Span
from headrace.http.endpoint import Endpoint

_ENDED = ("done", "failed", "stopped")
POLL_SECONDS = 0.5
"""Between two looks at a job."""


@click.group()
def jobs() -> None:
    """Jobs: replays, and redrives, drops and quarantines of dead letters over HTTP.

    A job resumes after a restart of its process, or in another process.

    Example: headrace jobs list
    """


@jobs.command("list")
@api_options
def list_(api: Api, output: str) -> None:
    """List jobs, the newest first.

    Example: headrace jobs list
    """
    found = api.call(JobEndpoints.list)["jobs"]
    print_rows(found if output == "json" else [_row(job) for job in found], output, "no jobs")


@jobs.command()
@click.argument("job")
@click.option("--follow", "following", is_flag=True, help="Watch it until it has ended.")
@api_options
def show(job: str, following: bool, api: Api, output: str) -> int:
    """Show the progress of a job.

    Example: headrace jobs show replay-0f1e2d3c4b --follow
    """
    found = api.call(JobEndpoints.show, job=job)
    return print_job(follow(api, found) if following else found, output)


def _step(endpoint: Endpoint, name: str, text: str) -> Callable[..., Any]:
    @click.argument("job")
    @api_options
    def step(job: str, api: Api, output: str) -> int:
        return print_job(api.call(endpoint, job=job), output)

    step.__doc__ = f"{text}\n\n    Example: headrace jobs {name} replay-0f1e2d3c4b\n    "
    return jobs.command(name)(step)


_step(JobEndpoints.pause, "pause", "Pause a job; deliveries in flight end first.")
_step(JobEndpoints.resume, "resume", "Resume a paused job.")
_step(JobEndpoints.stop, "stop", "Stop a job for good; finished records stay finished.")


@click.command()
@click.argument("topic")
@click.option("--to-consumer", metavar="NAME", help="To the backend of this reactive consumer.")
@click.option("--to-function", metavar="NAME", help="To this function.")
@click.option("--to-topic", metavar="NAME", help="To this topic, unchanged.")
@click.option("--dead-letters", is_flag=True, help="The dead letters of TOPIC, as the records they were.")
@span_options
@click.option("--rate", type=RATE, help="Records per second at most.")
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
    if not dry_run:
        return print_job(found if detach else follow(api, found), output)
    window = found["spec"]["window"]
    parts = [f"{start} to {end - 1} of partition {number}" for number, (start, end) in window["ranges"].items()]
    print_result(found, f"would replay {found['total']} offsets of {window['topic']}: {', '.join(parts)}", output)
    return 0


def _request(topic: str, span: Span, rate: float | None, **chosen: Any) -> dict[str, Any]:
    to = {kind: name for kind in ("consumer", "function", "topic") if (name := chosen[f"to_{kind}"])}
    if len(to) != 1:
        raise click.UsageError("say where to: --to-consumer, --to-function or --to-topic, one of them")
    request: dict[str, Any] = {"topic": topic, "to": to, "rate": rate, "partition": span.partition}
    request |= {"deadLetter": chosen["dead_letters"], "lastRetry": chosen["last_retry"]}
    if span.first is not None:
        if span.last is None:
            raise click.UsageError("--offsets takes the first and the last one, such as 17-40, and --partition")
        request["offsets"] = {"start": span.first, "end": span.last + 1}
    bounds = (("since", span.since), ("until", span.until))
    times = {name: moment.isoformat() for name, moment in bounds if moment is not None}
    return {**request, "time": times} if times else request


def follow(api: Api, job: dict[str, Any]) -> dict[str, Any]:
    """Show a bar until a job has ended or is paused, and return it.

    An interrupt ends only the watching, and prints how to end the job.
    """
    name = job["id"]
    try:
        with progress(f"{job['kind']} {_topic(job)}") as show_progress:
            while job["state"] not in (*_ENDED, "paused"):
                time.sleep(POLL_SECONDS)
                job = api.call(JobEndpoints.show, job=name)
                show_progress(job["progress"].get("done", 0), job["progress"].get("total"))
    except KeyboardInterrupt:
        click.echo(f"{name} still runs: headrace jobs pause {name}, or stop, to end it", err=True)
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
