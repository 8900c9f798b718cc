"""`headrace config`: check, schema, show."""

import os
from pathlib import Path

import click

from headrace.cli.output import output_option, print_json
from headrace.config.load import load_config
from headrace.config.model import HeadraceConfig
from headrace.config.show import json_schema, masked
from headrace.errors import ConfigError, HeadraceError
from headrace.kafka.producer_settings import check_properties

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
        settings = load_config(file, os.environ)
        check_properties(settings.kafka, settings.producer)
        _check_files(settings)
    except ConfigError as problem:
        if output == "json":
            print_json({"ok": False, "problems": problem.description.splitlines()})
        raise
    if output == "json":
        print_json({"ok": True, "problems": [], "warnings": settings.producer.warnings})
    else:
        for warning in settings.producer.warnings:
            click.echo(f"warning: {warning}", err=True)
        parts = ("reactive_consumers", "functions", "pipelines")
        counts = ", ".join(f"{part.replace('_', ' ')}: {len(getattr(settings, part))}" for part in parts)
        click.echo(f"{file}: ok ({counts})")


@config.command()
def schema() -> None:
    """Print the JSON Schema of the file, for editors and checks.

    Example: headrace config schema > headrace.schema.json
    """
    print_json(json_schema())


@config.command()
@file_option
@output_option
def show(file: Path, output: str) -> None:
    """Print the effective configuration, secrets masked. Without a file: defaults and environment.

    Example: headrace config show -c headrace.yaml
    """
    shown = masked(load_config(None if file == DEFAULT_FILE and not file.exists() else file, os.environ))
    if output == "json":
        print_json(shown)
    else:
        import yaml

        click.echo(yaml.safe_dump(shown, sort_keys=False), nl=False)


def _check_files(settings: HeadraceConfig) -> None:
    from headrace.functions.load import load_function
    from headrace.pipelines.load import load_pipeline

    problems = []
    for load_file, files in ((load_function, settings.functions), (load_pipeline, settings.pipelines)):
        for file in files:
            try:
                load_file(file)
            except HeadraceError as problem:
                problems.append(problem.description)
    if problems:
        raise ConfigError("\n".join(problems))
