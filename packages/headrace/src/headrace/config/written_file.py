"""Writes what a configuration sets as a `headrace.yaml`, without a secret."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from headrace.config.references import is_secret_name


def as_file(tree: Mapping[str, Any], remarks: Sequence[str], source: str) -> str:
    """Return a file with the settings of a tree, whose references are replaced.

    Args:
        tree: What is set.
        remarks: Keys without effect; they become comments.
        source: What the tree is read from, for the first line.
    """
    variables: list[str] = []
    shown = {section: _shown(value, section, variables) for section, value in tree.items()}
    lines = [f"# Written from {source}. Paths are absolute or relative to this file."]
    lines += [f"# Set the variable {name} before the start." for name in variables]
    lines += [f"# {' '.join(remark.split())}" for remark in remarks]  # a key may have line breaks
    return "\n".join([*lines, yaml.safe_dump(shown, sort_keys=False, width=1000).rstrip()])


def variable_of(key: str) -> str:
    """Return the environment variable that replaces a key."""
    return re.sub(r"[^A-Za-z0-9]", "_", key).upper()


def _shown(value: Any, at: str, variables: list[str]) -> Any:
    """Return a value in the grammar of the file; `variables` gets the name of each secret."""
    if isinstance(value, dict):
        return {key: _shown(item, f"{at}.{key}", variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item, at, variables) for item in value]
    if value and is_secret_name(at):
        variables.append(variable_of(at))
        return f"${{env:{variables[-1]}}}"
    return value.replace("${", "$${") if isinstance(value, str) else value
