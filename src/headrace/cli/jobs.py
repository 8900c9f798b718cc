"""`headrace jobs`: what was asked for and takes long, over the HTTP API; and watching one until it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from headrace.cli.api import Api, api_options, part
from headrace.cli.output import print_json, print_rows, progress

_JOBS = "/adm/jobs"
_ENDED = ("done", "failed", "stopped")
_LOOK_SECONDS = 0.5


@click.group()
def jobs() -> None:
    """Jobs: replays, and what is done with dead letters over HTTP.

    A job goes on when its process is restarted, and at another one when it is gone.

    Example: headrace jobs list
    """


@jobs.command("list")
@api_options
def list_(api: Api, output: str) -> None:
    """List jobs, the newest first.

    Example: headrace jobs list
    """
    found = api.get(_JOBS)["jobs"]
    print_rows(found if output == "json" else [_row(job) for job in found], output, "no jobs")


@jobs.command()
@click.argument("job")
@click.option("--follow", is_flag=True, help="Watch it until it has ended.")
@api_options
def show(job: str, follow: bool, api: Api, output: str) -> int:
    """Show how far a job is.

    Example: headrace jobs show replay-0f1e2d3c4b --follow
    """
    found = api.get(f"{_JOBS}/{part(job)}")
    return watch(api, found, output) if follow else print_job(found, output)


def _step(name: str, text: str) -> Callable[..., Any]:
    @click.argument("job")
    @api_options
    def step(job: str, api: Api, output: str) -> int:
        return print_job(api.post(f"{_JOBS}/{part(job)}/{name}"), output)

    step.__doc__ = f"{text}\n\n    Example: headrace jobs {name} replay-0f1e2d3c4b\n    "
    return jobs.command(name)(step)


_step("pause", "Pause a job; what is under way ends first.")
_step("resume", "Let a paused job go on where it was.")
_step("stop", "End a job for good; what it has done stays done.")


def watch(api: Api, job: Mapping[str, Any], output: str) -> int:
    """Show a bar until a job has ended, then what became of it; returns the exit code.

    Interrupted, it only stops to look: the job goes on, and how to end it is said.
    """
    name = job["id"]
    try:
        with progress(f"{job['kind']} {name}") as show_progress:
            while job["state"] not in (*_ENDED, "paused"):
                time.sleep(_LOOK_SECONDS)
                job = api.get(f"{_JOBS}/{part(name)}")
                show_progress(job["progress"].get("done", 0), job["progress"].get("total"))
    except KeyboardInterrupt:
        click.echo(f"{name} goes on: headrace jobs pause {name}, or stop, if it should not", err=True)
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
