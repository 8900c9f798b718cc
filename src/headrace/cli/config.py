"""`headrace config`: check, schema, show."""

from __future__ import annotations

import os
from pathlib import Path

import click

from headrace.cli.output import output_option, print_json, print_rows
from headrace.config.load import load
from headrace.config.model import HeadraceConfig
from headrace.config.show import json_schema, masked, origins
from headrace.errors import ConfigError, HeadraceError
from headrace.kafka.properties import check_properties

DEFAULT_FILE = Path("headrace.yaml")

file_option = click.option(
    "-c",
    "--config",
    "file",
    type=click.Path(path_type=Path),
    default=DEFAULT_FILE,
    show_default=True,
    help="The configuration file.",
)


@click.group()
def config() -> None:
    """Check and show the configuration; print the schema of the file.

    Example: headrace config check -c headrace.yaml
    """


@config.command()
@file_option
@output_option
def check(file: Path, output: str) -> None:
    """Say everything that is wrong with the file and those it names, with line numbers; exit code 78 if something is.

    Example: headrace config check -c headrace.yaml
    """
    try:
        settings = load(file, os.environ).config
        check_properties(settings.kafka.properties)
        _check_files(settings)
    except ConfigError as problem:
        if output == "json":
            print_json({"ok": False, "problems": problem.description.splitlines()})
        raise
    if output == "json":
        print_json({"ok": True, "problems": []})
    else:
        click.echo(f"{file}: ok ({_contents(settings)})")


@config.command()
def schema() -> None:
    """Print the JSON Schema of the file, for editors and checks.

    Example: headrace config schema > headrace.schema.json
    """
    print_json(json_schema())


@config.command()
@file_option
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@output_option
def show(file: Path, origin: bool, output: str) -> None:
    """Print the effective configuration, secrets masked. Without a file: defaults and environment.

    Example: headrace config show --origin
    """
    loaded = load(None if file == DEFAULT_FILE and not file.exists() else file, os.environ)
    if origin:
        rows = [{"setting": path, "value": value, "origin": source} for path, value, source in origins(loaded)]
        print_rows(rows, output, "")
    elif output == "json":
        print_json(masked(loaded.config))
    else:
        import yaml

        click.echo(yaml.safe_dump(masked(loaded.config), sort_keys=False), nl=False)


def _check_files(settings: HeadraceConfig) -> None:
    from headrace.functions.load import load_function
    from headrace.pipelines.load import load_pipeline

    problems = []
    files = [(load_function, file) for file in settings.functions]
    for load_file, file in [*files, *((load_pipeline, file) for file in settings.pipelines)]:
        try:
            load_file(file)
        except HeadraceError as problem:
            problems.append(problem.description)
    if problems:
        raise ConfigError("\n".join(problems))


def _contents(settings: HeadraceConfig) -> str:
    counts = {
        "reactive consumers": len(settings.reactive_consumers),
        "functions": len(settings.functions),
        "pipelines": len(settings.pipelines),
    }
    return ", ".join(f"{name}: {count}" for name, count in counts.items())
