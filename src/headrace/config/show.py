"""The configuration for people: effective values with secrets masked, their origins, and the schema of the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.config import yaml_tree
from headrace.config.load import Loaded
from headrace.config.model import HeadraceConfig
from headrace.config.secrecy import is_secret_name

_MASK = "**********"


def masked(config: HeadraceConfig) -> dict[str, Any]:
    """Return every effective value as JSON has it; secrets are masked, by their type or by their name."""
    shown: dict[str, Any] = _mask(config.model_dump(mode="json"))
    return shown


def origins(loaded: Loaded) -> list[tuple[str, Any, str]]:
    """Return every single setting: its path, its masked value, and `file:line`, the variable's name or `default`."""
    leaves = _leaves(masked(loaded.config), ())
    return [(yaml_tree.dotted(path), value, loaded.places.get(path, "default")) for path, value in leaves]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, for editors and checks.

    Source: JSON Schema 2020-12.
    """
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **HeadraceConfig.model_json_schema()}


def _mask(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _mask(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_mask(item, name) for item in value]
    return _MASK if value and is_secret_name(name) else value


def _leaves(value: Any, path: yaml_tree.Path) -> Iterator[tuple[yaml_tree.Path, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value
