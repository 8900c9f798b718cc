"""Overrides from the environment: `HEADRACE__HTTP__PORT=9000` sets `http.port`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from headrace.config.explain import known_keys
from headrace.config.yaml_tree import Path

_PREFIX = "HEADRACE__"


def override(tree: dict[str, Any], places: dict[Path, str], environ: Mapping[str, str]) -> None:
    """Write every override of the environment into the tree, whether the model knows its name or not.

    A value that starts with `[` or `{` is read as YAML; any other stays as it is, for the model to convert. The place
    of what is overridden is the variable's name.
    """
    for name in sorted(environ):
        if not name.upper().startswith(_PREFIX):
            continue
        parts = name[len(_PREFIX) :].split("__")
        node = tree
        path: Path = ()
        for depth, part in enumerate(parts, 1):
            key = _key_for(part, [*node, *known_keys(path)], path)
            path = (*path, key)
            if depth == len(parts):
                node[key] = _override_value(environ[name])
                for below in [below for below in places if below[: len(path)] == path]:
                    del places[below]
                places[path] = name
            elif not isinstance(node.get(key), dict):
                node[key] = {}
            places.setdefault(path, name)
            node = node[key]


def _key_for(part: str, known: list[str], path: Path) -> str:
    """Return the key a part of a variable's name means: variables have neither case, dots nor hyphens."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "_", name.lower())

    new = part.lower().replace("_", ".") if path == ("kafka", "properties") else part.lower()
    return next((key for key in known if plain(key) == plain(part)), new)


def _override_value(text: str) -> Any:
    if text[:1] not in ("[", "{"):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
