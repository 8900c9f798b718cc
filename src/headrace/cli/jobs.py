"""`headrace jobs`: replays and other jobs, over the HTTP API; and watching one until it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from headrace.cli.api import Api, api_options
from headrace.cli.output import print_json, print_rows, progress
from headrace.web.endpoint import Endpoint
from headrace.web.routes.jobs import JobEndpoints

_ENDED = ("done", "failed", "stopped")
_POLL_SECONDS = 0.5


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
@click.option("--follow", is_flag=True, help="Watch it until it has ended.")
@api_options
def show(job: str, follow: bool, api: Api, output: str) -> int:
    """Show the progress of a job.

    Example: headrace jobs show replay-0f1e2d3c4b --follow
    """
    found = api.call(JobEndpoints.show, job=job)
    return watch(api, found, output) if follow else print_job(found, output)


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


def watch(api: Api, job: Mapping[str, Any], output: str) -> int:
    """Show a bar until a job has ended, then its result; returns the exit code.

    An interrupt ends only the watching, and prints how to end the job.
    """
    name = job["id"]
    try:
        with progress(f"{job['kind']} {name}") as show_progress:
            while job["state"] not in (*_ENDED, "paused"):
                time.sleep(_POLL_SECONDS)
                job = api.call(JobEndpoints.show, job=name)
                show_progress(job["progress"].get("done", 0), job["progress"].get("total"))
    except KeyboardInterrupt:
        click.echo(f"{name} still runs: headrace jobs pause {name}, or stop, to end it", err=True)
        raise
    return print_job(job, output)


def print_job(job: Mapping[str, Any], output: str) -> int:
    """Print a job; returns the exit code, 1 if it failed."""
    if output == "json":
        print_json(job)
    else:
        row = {**_row(job), "records": job["progress"].get("counts") or job["progress"].get("targets")}
        click.echo("\n".join(f"{name:9} {_text(value)}" for name, value in row.items() if value not in (None, "")))
    return int(job["state"] == "failed")


def _row(job: Mapping[str, Any]) -> dict[str, Any]:
    spec = job["spec"]
    done, total = (job["progress"].get(name) for name in ("done", "total"))
    return {
        "job": job["id"],
        "kind": job["kind"],
        "state": job["state"],
        "topic": spec.get("topic") or spec.get("window", {}).get("topic", ""),
        "done": "" if total is None else f"{done} of {total}",
        "by": job["by"],
        "since": job["since"],
        "message": job["message"],
    }


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in value.items() if count) or "none"
    return str(value)
