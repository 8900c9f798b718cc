"""`headrace ready`: waits until a running Headrace does its work."""

import time

import click

from headrace.cli.api import Api, api_options
from headrace.cli.output import print_json
from headrace.errors import EnvironmentProblem

_AGAIN_SECONDS = 0.2


@click.command()
@click.option("--timeout", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds to wait.")
@api_options
def ready(timeout: float, api: Api, output: str) -> int:
    """Wait until a Headrace is ready; standard error says what it waits for.

    The exit code is 1 if it is not ready in time.

    Example: headrace ready --timeout 30
    """
    end, told = time.monotonic() + timeout, ""
    while True:
        is_ready, why = _state(api)
        if is_ready or time.monotonic() >= end:
            break
        if why.split(" for ")[0] != told:  # an outage is told once, though its length grows
            told = why.split(" for ")[0]
            click.echo(f"waiting: {why}", err=True)
        time.sleep(_AGAIN_SECONDS)
    if output == "json":
        print_json({"url": api.url, "ready": is_ready, "why": why})
    else:
        click.echo(f"ready http={api.url}" if is_ready else f"not ready within {timeout:g} s: {why}", err=not is_ready)
    return 0 if is_ready else 1


def _state(api: Api) -> tuple[bool, str]:
    """Return whether it is ready, and if not, why: the first service that is not."""
    try:
        answer = api.readiness()
    except EnvironmentProblem:
        return False, f"no Headrace answers at {api.url} yet"
    waiting = [f"{name}: {one['reason']}" for name, one in answer.get("services", {}).items() if not one["ready"]]
    return bool(answer.get("ready")), waiting[0] if waiting else "" if answer.get("ready") else "it is not ready"
