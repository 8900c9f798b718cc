"""From `headrace.yaml` and the environment to the models, with every problem named by its line.

Order: defaults, file, environment. Nothing outside `config` interprets the file or its references.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from headrace.config import yaml_tree
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.explain import explain, place_of
from headrace.config.model import HeadraceConfig
from headrace.config.overrides import override
from headrace.config.protection import unprotected
from headrace.config.references import ReferenceProblem, holds_plain_text, resolve
from headrace.config.secrecy import is_secret_name, too_open
from headrace.config.section import Section
from headrace.config.yaml_tree import Problems, read_text, read_tree
from headrace.errors import ConfigError

AnySection = TypeVar("AnySection", bound=Section)


_FILE_LISTS = ("functions", "pipelines")


class ConfigReading(NamedTuple):
    """A configuration as far as it can be read."""

    config: HeadraceConfig | None
    """None when a value is wrong."""
    problems: list[str]
    """One paragraph per problem, in the order of the file."""
    files: dict[str, list[Path]]
    """The files it names that exist, under `functions` and `pipelines`."""


def load_config(path: Path | None, environ: Mapping[str, str]) -> HeadraceConfig:
    """Return the effective configuration.

    Args:
        path: See `read_config`.
        environ: See `read_config`.

    Raises:
        ConfigError: One paragraph per problem, all problems at once.
    """
    config, problems, _ = read_config(path, environ)
    if problems or not config:
        raise ConfigError("\n".join(problems))
    return config


def read_config(path: Path | None, environ: Mapping[str, str]) -> ConfigReading:
    """Read the configuration and find every problem of it.

    Args:
        path: The file; None for defaults and environment alone.
        environ: The environment: for `${env:NAME}`, `${NAME:default}` and overrides such as
            `HEADRACE__HTTP__PORT=9000`. An override that starts with `[` or `{` is read as YAML; any other is taken
            as it stands and converted to the type of its setting.

    Raises:
        ConfigError: The file cannot be read.
    """
    problems = Problems()
    name = str(path) if path else "environment"
    text = read_text(path, ConfigError, "Name the file with -c") if path else ""
    tree, places = read_tree(text, name, problems)
    if not isinstance(tree, dict):
        problems.add(f"{name}:1", (), "is not a map of settings: write lines such as `http: {port: 8082}`")
        tree = {}
    folder = path.resolve().parent if path else Path.cwd()
    broken, replaced = _replace_references(tree, environ, folder, places, problems, path)
    override(tree, places, environ)
    files = _named_files(tree, broken, folder, places, problems)
    config = None
    try:
        config = HeadraceConfig.model_validate(tree)
    except ValidationError as cause:
        errors = cause.errors(include_url=False, include_input=False)
        explain(errors, tree, places, broken, problems, hidden=replaced)
    else:
        config = _anchor(config, folder, places, problems)
        for where, sentence in unprotected(config):
            problems.add(place_of(where, places), where, sentence)
    return ConfigReading(config, problems.ordered, files)


def _named_files(
    tree: dict[str, Any],
    broken: set[yaml_tree.Path],
    folder: Path,
    places: Mapping[yaml_tree.Path, str],
    problems: Problems,
) -> dict[str, list[Path]]:
    """Return the function and pipeline files that exist; the others are problems, as are `broken` references."""
    found: dict[str, list[Path]] = {section: [] for section in _FILE_LISTS}
    for section, files in found.items():
        names = tree.get(section)
        for index, name in enumerate(names if isinstance(names, list) else ()):
            path = (section, index)
            if not isinstance(name, str) or path in broken:
                continue  # said elsewhere
            if (file := folder / name).is_file():
                files.append(file)
            else:
                problems.add(place_of(path, places), path, f"names {file}, which is no file: correct the path")
    return found


def _replace_references(
    tree: dict[str, Any],
    environ: Mapping[str, str],
    folder: Path,
    places: Mapping[yaml_tree.Path, str],
    problems: Problems,
    path: Path | None,
) -> tuple[set[yaml_tree.Path], set[yaml_tree.Path]]:
    """Replace references in place, and refuse secrets in files that others read.

    Returns:
        The paths whose references have no value, and those whose references were replaced.
    """
    broken: set[yaml_tree.Path] = set()
    replaced: set[yaml_tree.Path] = set()
    plain = False

    def walk(value: Any, at: yaml_tree.Path) -> Any:
        nonlocal plain
        if isinstance(value, dict):
            for key in value:
                value[key] = walk(value[key], (*at, key))
        elif isinstance(value, list):
            value[:] = [walk(item, (*at, index)) for index, item in enumerate(value)]
        elif isinstance(value, str):
            secret = is_secret_name(next(part for part in reversed(at) if isinstance(part, str)))
            plain = plain or (secret and holds_plain_text(value))
            try:
                found = resolve(value, environ, folder, check_mount if secret else lambda _: None)
                if found != value:
                    replaced.add(at)
                return found
            except ReferenceProblem as cause:
                broken.add(at)
                problems.add(places[at], at, str(cause))
        return value

    def check_mount(file: Path) -> None:
        if file.is_file() and (reason := too_open(file, mounted=True)):
            problems.add("", (), reason)

    walk(tree, ())
    if plain and path and (reason := too_open(path, mounted=False)):
        problems.add("", (), reason)
    return broken, replaced


def _anchor(
    config: HeadraceConfig, folder: Path, places: Mapping[yaml_tree.Path, str], problems: Problems
) -> HeadraceConfig:
    """Return the configuration with absolute paths; files it names must be there."""
    files = {section: [folder / file for file in getattr(config, section)] for section in _FILE_LISTS}
    tls = _anchor_files(config.http.tls, ("http", "tls"), folder, places, problems)
    jwt = _anchor_files(config.security.jwt, ("security", "jwt"), folder, places, problems)
    reactive: dict[str, ReactiveConsumerConfig] = {}
    for name, consumer in config.reactive_consumers.items():
        at = ("reactive_consumers", name, "backend", "tls")
        files_of = _anchor_files(consumer.backend.tls, at, folder, places, problems)
        backend = consumer.backend.model_copy(update={"tls": files_of})
        reactive[name] = consumer.model_copy(update={"backend": backend})
    for key in [tls.key, *(consumer.backend.tls.key for consumer in reactive.values())]:
        if key and key.is_file() and (reason := too_open(key, mounted=True)):
            problems.add("", (), reason)
    return config.model_copy(
        update={
            **files,
            "audit": config.audit.model_copy(update={"file": folder / config.audit.file}),
            "state_dir": folder / config.state_dir,
            "http": config.http.model_copy(update={"tls": tls}),
            "security": config.security.model_copy(update={"jwt": jwt}),
            "reactive_consumers": reactive,
        }
    )


def _anchor_files(
    section: AnySection, at: yaml_tree.Path, folder: Path, places: Mapping[yaml_tree.Path, str], problems: Problems
) -> AnySection:
    """Return a section with absolute paths; files it names must be there."""
    files = {name: folder / value for name, value in section if isinstance(value, Path)}
    for name, file in files.items():
        if not file.is_file():
            path = (*at, name)
            problems.add(place_of(path, places), path, f"names {file}, which is no file: correct the path")
    return section.model_copy(update=files)
