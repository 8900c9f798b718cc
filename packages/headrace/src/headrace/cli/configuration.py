"""`headrace ready`, which waits until a process is ready, and `headrace config`."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import click

from headrace.admin.health.routes import HealthEndpoints
from headrace.cli.api import Api, api_options
from headrace.cli.cluster_options import DEFAULT_FILE, variables, with_environment
from headrace.cli.file_schemas import schema_kinds, schema_of
from headrace.cli.global_options import HeadraceCommand, HeadraceGroup, uses
from headrace.cli.output import collected_warnings, print_check, print_json, print_result
from headrace.cli.trust import START
from headrace.config.explain import masked
from headrace.config.load import load_config, read_config
from headrace.config.model import HeadraceConfig
from headrace.config.written_file import as_file
from headrace.config.yaml_tree import KeyPath
from headrace.consumers.feature_checks import completed, feature_checks, problems_of_files
from headrace.errors import ConfigError, EnvironmentProblem, HeadraceError

_POLL_SECONDS = 0.2
_REPORT_SECONDS = 10.0


@click.command(cls=HeadraceCommand)
@click.option("--timeout", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds to wait.")
@api_options
def ready(timeout: float, api: Api, output: str) -> int:
    """Wait until a Headrace is ready. Standard error shows why it is not.

    The exit code is 1 if it is not ready in time.

    Example: headrace ready --timeout 30
    """
    end, reported, next_report = time.monotonic() + timeout, None, 0.0
    while True:
        is_ready, service, why = _state(api)
        if is_ready or time.monotonic() >= end:
            break
        if service != reported or time.monotonic() >= next_report:
            reported, next_report = service, time.monotonic() + _REPORT_SECONDS
            click.echo(f"waiting: {why}", err=True)
        time.sleep(_POLL_SECONDS)
    if output == "json":
        print_json({"url": api.url, "ready": is_ready, "why": why})
    else:
        click.echo(f"ready http={api.url}" if is_ready else f"not ready within {timeout:g} s: {why}", err=not is_ready)
    return 0 if is_ready else 1


def _state(api: Api) -> tuple[bool, str, str]:
    """Return whether it is ready; if not, also the first service that is not ready, if one is known, and why."""
    try:
        response = api.call(HealthEndpoints.readiness)
    except EnvironmentProblem as problem:
        may_start = problem.parameters.get("remedy", START) == START
        return False, "", f"Headrace is not reachable at {api.url} yet" if may_start else problem.description
    if response.get("ready"):
        return True, "", ""
    if "services" not in response:
        return False, "", "only authenticated callers see the reason: set HEADRACE_TOKEN to a valid token"
    waiting = [(name, one["reason"]) for name, one in response["services"].items() if not one["ready"]]
    service, reason = waiting[0] if waiting else ("", "")
    return False, service, f"{service}: {reason}" if service else "it is not ready"


@click.group(cls=HeadraceGroup)
def config() -> None:
    """Check and show the configuration; print the schema of the file.

    Example: headrace config check -c headrace.yaml
    """


@config.command()
@uses("config", "output")
def check(config: Path | None, output: str) -> None:
    """Report every problem of the file and of the files it names, with line numbers; exit code 78 if there is one.

    Example: headrace config check -c headrace.yaml
    """
    file = config or DEFAULT_FILE
    with collected_warnings() as warnings:
        try:
            settings, problems, files, _, remarks = read_config(file, variables(), _slow_problems)
        except ConfigError as error:
            settings, problems, files, remarks = None, [error.description], {}, []
        problems += problems_of_files(files, settings)
        if settings and not problems:
            problems += _problems_of_assembly(settings)
    print_check(ConfigError, problems, [*remarks, *warnings], f"{file}: ok", output)


@config.command()
@click.argument("kind", type=click.Choice(schema_kinds()), default="config")
def schema(kind: str) -> None:
    """Print the JSON Schema of headrace.yaml, or of a function or pipeline file, for editors and checks.

    Example: headrace config schema pipeline > pipeline.schema.json
    """
    print_json(schema_of(kind))


@config.command()
@click.option("--import", "as_headrace", is_flag=True, help="Print the headrace.yaml that sets the same, for a folder.")
@uses("config", "output")
def show(as_headrace: bool, config: Path | None, output: str) -> None:
    """Print the effective configuration with secrets masked. Without a file: defaults and environment.

    With --import it prints only what is set, in the form of a headrace.yaml; secrets become references to variables.

    Example: headrace config show -c headrace.yaml
    """
    import yaml

    file = config or DEFAULT_FILE
    if as_headrace:
        reading = read_config(file, variables())
        if reading.problems:
            raise ConfigError("\n".join(reading.problems))
        text = as_file(reading.tree, reading.remarks, str(file))
        return print_result(yaml.safe_load(text), text, output)
    path = None if file == DEFAULT_FILE and not file.exists() else file
    shown = masked(with_environment(load_config(path, variables())))
    return print_result(shown, yaml.safe_dump(shown, sort_keys=False).rstrip(), output)


def _slow_problems(settings: HeadraceConfig) -> Iterator[tuple[KeyPath, str]]:
    for checks in feature_checks():
        yield from checks.slow_problems(settings)


def _problems_of_assembly(settings: HeadraceConfig) -> list[str]:
    """Make the services of `headrace run` without starting them; report its errors, and log its warnings."""
    from headrace.app.app import App
    from headrace.runtime import SystemClock

    async def make() -> None:
        App(completed(settings), SystemClock())

    try:
        asyncio.run(make())
    except HeadraceError as problem:
        return problem.description.splitlines()
    return []
