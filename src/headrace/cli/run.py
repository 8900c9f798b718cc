"""`headrace run`, and `headrace ready`, which waits for it."""

import time
from pathlib import Path

import click

from headrace.cli.api import Api, api_options
from headrace.cli.config import file_option
from headrace.cli.connection import variables, with_environment
from headrace.cli.output import print_json
from headrace.config.load import load_config
from headrace.errors import EnvironmentProblem
from headrace.web.routes.health import HealthEndpoints

_POLL_SECONDS = 0.2


@click.command()
@file_option
def run(file: Path) -> int:
    """Run everything the file names, in the foreground.

    Prints one line `ready http=...` on standard output when everything answers; logs go to standard error. SIGTERM or
    Ctrl-C finishes what is in flight, a second one stops at once.

    Example: headrace run -c headrace.yaml
    """
    settings = with_environment(load_config(file, variables()))
    from headrace.app import run as run_everything

    return run_everything(settings, announce=click.echo)


@click.command()
@click.option("--timeout", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds to wait.")
@api_options
def ready(timeout: float, api: Api, output: str) -> int:
    """Wait until a Headrace is ready. Standard error names what it waits for.

    The exit code is 1 if it is not ready in time.

    Example: headrace ready --timeout 30
    """
    end, reported = time.monotonic() + timeout, ""
    while True:
        is_ready, why = _state(api)
        if is_ready or time.monotonic() >= end:
            break
        if why.split(" for ")[0] != reported:  # an outage is reported once, though its length grows
            reported = why.split(" for ")[0]
            click.echo(f"waiting: {why}", err=True)
        time.sleep(_POLL_SECONDS)
    if output == "json":
        print_json({"url": api.url, "ready": is_ready, "why": why})
    else:
        click.echo(f"ready http={api.url}" if is_ready else f"not ready within {timeout:g} s: {why}", err=not is_ready)
    return 0 if is_ready else 1


def _state(api: Api) -> tuple[bool, str]:
    """Return whether it is ready, and if not, the first service that is not and why."""
    try:
        answer = api.call(HealthEndpoints.readiness)
    except EnvironmentProblem:
        return False, f"no Headrace answers at {api.url} yet"
    waiting = [f"{name}: {one['reason']}" for name, one in answer.get("services", {}).items() if not one["ready"]]
    return bool(answer.get("ready")), waiting[0] if waiting else "" if answer.get("ready") else "it is not ready"
