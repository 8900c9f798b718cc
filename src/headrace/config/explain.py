"""The model's errors as sentences for the person who wrote the file: where, which key, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, get_args

from pydantic_core import ErrorDetails

from headrace.config.client_properties import CONSUMER_KEYS, PRODUCER_KEYS, way_out
from headrace.config.model import HeadraceConfig
from headrace.config.secrecy import is_secret_name
from headrace.config.section import Section
from headrace.config.yaml_tree import Path, Problems

_QUOTED_CHARACTERS = 80
_TABLES = {"producer": (PRODUCER_KEYS, CONSUMER_KEYS), "reactive_consumers": (CONSUMER_KEYS,)}
"""Sections in which people write the keys of Java's clients, and where these are explained."""


def explain(
    errors: list[ErrorDetails],
    tree: Any,
    places: Mapping[Path, str],
    broken: set[Path],
    problems: Problems,
    model: type[Section] = HeadraceConfig,
    hidden: Collection[Path] = (),
) -> None:
    """Turn the errors of a model that was given a tree into problems with place, path, remedy and value.

    Nothing is said of the paths in `broken`, which are problems already. The values at `hidden` are not shown.
    """
    told = set(broken)
    for error in errors:
        path = _in_tree(error["loc"], tree)
        shown = error["loc"] if error["type"] == "missing" else path
        if shown in told:  # a union reports once per kind of value it would take
            continue
        told.add(shown)
        problems.add(place_of(path, places), shown, _sentence(error, path, model))
        if path not in hidden and error["type"] not in ("extra_forbidden", "missing", "value_error"):
            problems.found[-1] += _quoted(path, tree)


def _quoted(path: Path, value: Any) -> str:
    """Return the value at a path, to show behind a sentence; empty where it may hold a secret."""
    if any(is_secret_name(part) or part == "headers" for part in path if isinstance(part, str)):
        return ""
    for part in path:
        value = value[part]
    text = repr(value)
    plain = isinstance(value, str | int | float) and len(text) <= _QUOTED_CHARACTERS and not set("?@") & set(text)
    return f" (it is {text})" if plain else ""


def _sentence(error: ErrorDetails, path: Path, model: type[Section]) -> str:
    if error["type"] == "extra_forbidden":
        tables = _TABLES.get(str(path[0]))
        if tables and (text := way_out(str(path[-1]), *tables)):
            return text
        known = known_keys(path[:-1], model)
        near = difflib.get_close_matches(str(path[-1]), known, 1, 0.5)
        return f"unknown key: did you mean {near[0]}?" if near else f"unknown key: known here are {', '.join(known)}"
    if error["type"] == "missing":
        return "is missing and has no default: add it"
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        return f"has characters or a form that are not allowed here (allowed: {error['ctx']['pattern']}): correct it"
    text = error["msg"].removeprefix("Input ")
    if error["type"] == "string_type":
        return f"{text}: put the value in quotes"
    return f"{text}: correct the value"


def _in_tree(location: Path, tree: Any) -> Path:
    """Return the part of a validation error's location that the file or a variable wrote."""
    path: Path = ()
    for part in location:
        inside = isinstance(tree, dict) and part in tree
        if not inside and not (isinstance(tree, list) and isinstance(part, int) and part < len(tree)):
            break
        tree, path = tree[part], (*path, part)
    return path


def place_of(path: Path, places: Mapping[Path, str]) -> str:
    """Return where a path, or the nearest thing around it, was written."""
    while path and path not in places:
        path = path[:-1]
    return places.get(path, "")


def known_keys(path: Path, model: type[Section] = HeadraceConfig) -> list[str]:
    """Return the names that the model has at a path; empty where any name goes."""
    kind: Any = model
    for part in path:
        if isinstance(kind, type) and issubclass(kind, Section):
            field = kind.model_fields.get(str(part))
            kind = field.annotation if field else None
        else:
            kind = (get_args(kind) or (None,))[-1]
    if not (isinstance(kind, type) and issubclass(kind, Section)):
        return []
    return [field.alias or name for name, field in kind.model_fields.items()]
