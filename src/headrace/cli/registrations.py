"""`headrace reactive register`, `registrations`, `remove`: a team's own consumers, over the HTTP API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from headrace.cli.api import Api, api_options, part
from headrace.cli.output import print_json, print_rows
from headrace.config.references import ReferenceProblem, resolve
from headrace.config.yaml_tree import Problems, read_text, read_tree
from headrace.errors import ConfigError, HeadraceError

_PLACE = "/reactive-consumers"


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@api_options
def register(file: Path, api: Api, output: str) -> None:
    """Register the consumers of a file, or change them to what it says: its reactive_consumers, as in headrace.yaml.

    ${env:NAME} and ${file:/path} are replaced here, by what this machine has; the values go to Headrace and are kept in
    a Kafka topic.

    Example: headrace reactive register team.yaml
    """
    problems = Problems()
    tree, _ = read_tree(read_text(file, ConfigError, "Name another file"), str(file), problems)
    found = tree.get("reactive_consumers") if isinstance(tree, dict) else None
    if not isinstance(found, dict) or not found:
        problems.add(str(file), (), "names no reactive_consumers: write them as in headrace.yaml")
    if problems.found:
        raise ConfigError("\n".join(problems.found))
    try:
        consumers = _filled(found, file.resolve().parent)
    except ReferenceProblem as cause:
        raise ConfigError(f"{file}: {cause}") from cause
    done: list[dict[str, Any]] = []
    for name, settings in consumers.items():
        try:
            done.append(api.put(f"{_PLACE}/{part(name)}", settings))
        except HeadraceError as error:
            before = f"; registered are {', '.join(one['name'] for one in done)}" if done else ""
            raise HeadraceError(f"{name}: {error.description}{before}", **error.parameters) from error
    _show(done, output)


@click.command()
@api_options
def registrations(api: Api, output: str) -> None:
    """List the consumers you have registered, and why one does not run.

    Example: headrace reactive registrations
    """
    _show(api.get(_PLACE)["consumers"], output)


@click.command()
@click.argument("name")
@api_options
def remove(name: str, api: Api, output: str) -> None:
    """Take a registered consumer away; its group keeps its offsets.

    Example: headrace reactive remove orders
    """
    removed = api.delete(f"{_PLACE}/{part(name)}")
    print_rows([removed], output, "")


def _show(found: list[dict[str, Any]], output: str) -> None:
    if output == "json":
        print_json(found)
    else:
        names = ("name", "owner", "version", "state", "why")
        print_rows([{name: one.get(name, "") for name in names} for one in found], output, "nothing is registered")


def _filled(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {name: _filled(item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, folder) for item in value]
    return resolve(value, os.environ, folder, lambda _: None) if isinstance(value, str) else value
